"""Delta Lake tables, opened with deltalake."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from bigdl.common.errors import UsageError, first_line, require
from bigdl.common.storage import joined, open_file_system, plain_path
from bigdl.data.lake_tables.table import KEY, DataFile, LakeTable, files_identity

require("pyarrow", "data")
import pyarrow as pa  # noqa: E402

if TYPE_CHECKING:
    from deltalake import DeltaTable

_KNOWN_FEATURES = {  # reader features; tables that need others are rejected
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
_MAPPING = "delta.columnMapping."


def is_table(path: str) -> bool:
    """Return True, because any folder with a ``_delta_log`` is a Delta table."""
    return True


def open_path(path: str, version: str | None) -> LakeTable:
    """Open the Delta table in a folder, at the newest version or at ``v<number>``."""
    deltalake = require("deltalake", "delta")
    number = re.fullmatch(r"v?(\d+)", version or "v0")
    if number is None:
        raise UsageError(
            f"A Delta version is written @v<number>, such as {path}@v5, got @{version}",
            code="argument-value",
            path=path,
        )
    requested = None if version is None else int(number[1])
    try:
        table = deltalake.DeltaTable(plain_path(path), version=requested)
    except Exception as error:  # deltalake raises several classes, also built-in ones
        if requested is not None:
            newest = open_path(path, None)
            raise UsageError(
                f"The Delta table {path} cannot be opened at version {requested}: the newest "
                f"is {newest.version}, and the log of old versions is cleaned up over time",
                code="name-unknown",
                path=path,
                version=requested,
            ) from error
        raise UsageError(
            f"The Delta table {path} cannot be opened: {first_line(error)}",
            code="path-unusable",
            path=path,
        ) from error
    return _to_lake_table(table, path, is_pinned=requested is not None)


def open_object(table: DeltaTable) -> LakeTable:
    """Open a ``deltalake.DeltaTable`` at its loaded version."""
    path = plain_path(unquote(table.table_uri)).rstrip("/")
    return _to_lake_table(table, path, is_pinned=True)


def _to_lake_table(table: DeltaTable, path: str, *, is_pinned: bool) -> LakeTable:
    version = f"delta:{path}@v{table.version()}"
    protocol = table.protocol()
    unknown = set(protocol.reader_features or ()) - _KNOWN_FEATURES
    if unknown:
        raise UsageError(
            f"The table {version} needs the reader feature {', '.join(sorted(unknown))}, which is "
            "not supported; read it with Spark and pass the DataFrame",
            code="version-unsupported",
            path=version,
        )
    mode = table.metadata().configuration.get(f"{_MAPPING}mode", "none")
    fields = json.loads(table.schema().to_json())["fields"]
    arrow = pa.schema(table.schema().to_arrow())
    if mode != "none":
        arrow = pa.schema(
            [_with_column_mapping(a, f, mode == "id") for a, f in zip(arrow, fields, strict=True)]
        )
    return LakeTable(
        path,
        arrow,
        _files(table, path),
        is_by_id=mode == "id",
        evolves=True,
        version=version,
        is_pinned=is_pinned,
        identity=_identity(table),
    )


def _identity(table: DeltaTable) -> dict[str, Any]:
    actions = pa.table(table.get_add_actions(flatten=True))
    facts = zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True)
    return files_identity(str(table.metadata().id), list(facts))


def _with_column_mapping(arrow: pa.Field, doc: dict, by_id: bool) -> pa.Field:
    """Return a field, and its nested fields, annotated with their names or ids in the files."""
    metadata = doc.get("metadata", {})
    key = metadata[f"{_MAPPING}{'id' if by_id else 'physicalName'}"]
    type_ = _type_with_column_mapping(arrow.type, doc["type"], by_id)
    return pa.field(arrow.name, type_, arrow.nullable, {KEY: str(key).encode()})


def _type_with_column_mapping(arrow: pa.DataType, doc: object, by_id: bool) -> pa.DataType:
    if not isinstance(doc, dict):
        return arrow
    if doc["type"] == "struct":
        fields = zip(arrow, doc["fields"], strict=True)
        return pa.struct([_with_column_mapping(a, f, by_id) for a, f in fields])
    if doc["type"] == "array":
        element = arrow.value_field
        return pa.list_(
            element.with_type(_type_with_column_mapping(element.type, doc["elementType"], by_id))
        )
    key, item = arrow.key_field, arrow.item_field
    return pa.map_(
        key.with_type(_type_with_column_mapping(key.type, doc["keyType"], by_id)),
        item.with_type(_type_with_column_mapping(item.type, doc["valueType"], by_id)),
    )


def _files(table: DeltaTable, root: str) -> list[DataFile]:
    deleted = {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for path, kept in zip(
            batch["filepath"].to_pylist(), batch["selection_vector"], strict=True
        ):
            mask = np.asarray(kept.values.to_numpy(zero_copy_only=False))
            deleted[_path_in_file_system(unquote(path))] = np.flatnonzero(~mask).astype(np.int64)
    actions = pa.table(table.get_add_actions(flatten=True))
    prefix = "partition."
    partitions = {
        name.removeprefix(prefix): actions.column(name).to_pylist()
        for name in actions.column_names
        if name.startswith(prefix)
    }
    files = []
    for row, name in enumerate(actions.column("path").to_pylist()):
        name = unquote(name)
        is_whole = name.startswith(("/", "file:/")) or "://" in name  # e.g. of a shallow clone
        path = _path_in_file_system(name if is_whole else joined(root, name))
        keys = tuple((column, values[row]) for column, values in partitions.items())
        files.append(DataFile(path, keys, deleted.pop(path, None)))
    if deleted:
        raise UsageError(
            f"{root} has deletion vectors for files that are not in its log, such as "
            f"{min(deleted)}; read it with Spark and pass the DataFrame",
            code="file-damaged",
            path=root,
        )
    return sorted(files, key=lambda each: each.path)


def _path_in_file_system(url: str) -> str:
    return open_file_system(plain_path(url))[1]
