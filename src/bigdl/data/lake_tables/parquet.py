"""Parquet files, opened as one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError, require
from bigdl.common.storage import open_file_system
from bigdl.data.lake_tables.table import DataFile, LakeTable, files_identity

require("pyarrow", "data")
import pyarrow as pa  # noqa: E402
import pyarrow.dataset as ds  # noqa: E402

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def open_files(urls: Sequence[str]) -> LakeTable:
    """Open all Parquet files at or under the given paths as one table.

    Rows keep the order of the paths; within a directory, files are sorted by name. The first path
    determines the schema.
    """
    if len({url.partition("://")[0] if "://" in url else "" for url in urls}) > 1:
        raise UsageError(f"All paths must be on one file system, got {urls}", code="argument-value")
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
                f"{url} cannot be read as Parquet; read other formats with pandas, spark.read or "
                f"bigdl.orca.data.pandas and pass the result: {error}",
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
            f"Found no Parquet file in {', '.join(urls)}", code="data-empty", path=urls
        )
    return LakeTable(urls[0], schema, files, identity=files_identity(None, facts))


def _content_facts(system: AbstractFileSystem, path: str) -> tuple:
    """Return a file's size and its modification time or ETag, to detect changed content."""
    info = system.info(path)
    keys = ("mtime", "ETag", "etag", "LastModified", "last_modified", "updated", "created")
    return info.get("size"), next((str(info[key]) for key in keys if info.get(key)), "")
