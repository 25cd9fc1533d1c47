"""Parquet files as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.common.storage import open_file_system
from bigdl.data.lake_tables.table import DataFile, LakeTable, files_identity

require("pyarrow", "data")
import pyarrow as pa  # noqa: E402
import pyarrow.dataset as ds  # noqa: E402


def open_files(urls: Sequence[str]) -> LakeTable:
    """Open Parquet files: the files under some paths.

    The order of the rows is that of the paths as they were given, and within a directory that of
    the files' names; the schema is that of the first.
    """
    if len({url.partition("://")[0] if "://" in url else "" for url in urls}) > 1:
        raise UsageError(f"The paths must be of one file system, got {urls}", code="argument-value")
    files: list[DataFile] = []
    facts: list[tuple] = []
    schema = None
    for url in urls:
        system, path = open_file_system(url)
        try:
            dataset = ds.dataset(path, format="parquet", filesystem=system, partitioning="hive")
        except FileNotFoundError:
            raise UsageError(
                f"There is nothing at {url}; pass the path of Parquet files",
                code="path-missing",
                path=url,
            ) from None
        except (pa.ArrowInvalid, OSError) as error:
            raise UsageError(
                f"{url} cannot be read as Parquet; other files are read by pandas, by spark.read "
                f"or by bigdl.orca.data.pandas first, and what that returns is passed: {error}",
                code="file-format",
                path=url,
            ) from error
        for fragment in sorted(dataset.get_fragments(), key=lambda each: each.path):
            keys = ds.get_partition_keys(fragment.partition_expression)
            files.append(DataFile(fragment.path, tuple(keys.items())))
        facts += [(each.path, *_content_facts(system, each.path)) for each in files[len(facts) :]]
        schema = schema or dataset.schema
    if schema is None or not files:
        raise UsageError(
            f"There is no Parquet file in {', '.join(urls)}", code="data-empty", path=urls
        )
    return LakeTable(urls[0], schema, files, identity=files_identity(None, facts))


def _content_facts(system: Any, path: str) -> tuple:
    """Return the size of a file and when it was written, or its tag in an object store."""
    info = system.info(path)
    marks = ("mtime", "ETag", "etag", "LastModified", "last_modified", "updated", "created")
    return info.get("size"), next((str(info[mark]) for mark in marks if info.get(mark)), "")
