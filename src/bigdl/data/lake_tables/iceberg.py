"""Iceberg tables, opened with pyiceberg."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError, first_line, require
from bigdl.common.storage import exists, joined, listdir, open_file_system, plain_path
from bigdl.data.lake_tables.table import FIELD_ID, KEY, DataFile, LakeTable, files_identity

require("pyarrow", "data")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import DataScan, FileScanTask
    from pyiceberg.table import Table as IcebergTable
    from pyiceberg.types import NestedField

_METADATA = re.compile(r"v?(\d+)(-[^/]*)?(\.gz)?\.metadata\.json(\.gz)?")
_VERSION = re.compile(r"([^:]+)(?::schema=(\d+))?")


def is_table(path: str) -> bool:
    """Return True if the ``metadata`` subfolder has Iceberg metadata files."""
    return bool(_metadata_files(path))


def open_path(path: str, version: str | None) -> LakeTable:
    """Open an Iceberg table by its folder or metadata file, at the newest or given snapshot.

    Parameters
    ----------
    path : str
    version : str, optional
        Snapshot id, or name of a branch or tag. The columns are those of the current schema;
        append ``:schema=0`` for the schema with id 0.
    """
    require("pyiceberg", "iceberg")
    from pyiceberg.table import StaticTable

    location = path if path.endswith(".metadata.json") else _newest_metadata(path)
    try:
        table = StaticTable.from_metadata(plain_path(location))
    except Exception as error:  # pyiceberg raises several classes, also built-in ones
        raise UsageError(
            f"The Iceberg table {path} cannot be opened: {first_line(error)}",
            code="path-unusable",
            path=path,
        ) from error
    match = _VERSION.fullmatch(version or "")
    name, schema_id = match.groups() if match else (None, None)
    scan = table.scan(snapshot_id=_snapshot_of(table, path, name))
    schema = table.schema() if schema_id is None else _schema_of(table, path, int(schema_id))
    return _to_lake_table(scan, schema, path, is_pinned=version is not None)


def open_object(data: IcebergTable | DataScan) -> LakeTable:
    """Open a pyiceberg table, or a pyiceberg scan without row filter and limit."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.table import DataScan

    scan = data if isinstance(data, DataScan) else data.scan()
    if scan.row_filter != AlwaysTrue() or scan.limit is not None:
        raise UsageError(
            "A scan of an Iceberg table must have no row_filter and no limit; pass the frame that "
            "its to_pandas() returns instead",
            code="unsupported",
        )
    path = plain_path(scan.table_metadata.location)
    return _to_lake_table(scan, scan.projection(), path, is_pinned=True)


def _metadata_files(path: str) -> list[tuple[int, str]]:
    """Return version numbers and paths of a table's metadata files, in ascending order."""
    folder = joined(path, "metadata")
    names = listdir(folder) if exists(folder) else []
    matches = [(_METADATA.fullmatch(name.rpartition("/")[2]), name) for name in names]
    return sorted((int(match[1]), name) for match, name in matches if match)


def _newest_metadata(path: str) -> str:
    files = _metadata_files(path)
    if not files:
        raise UsageError(
            f"There is no Iceberg table at {path}; pass the folder that contains 'metadata'",
            code="path-missing",
            path=path,
        )
    newest = [name for number, name in files if number == files[-1][0]]
    if len(newest) > 1:
        raise UsageError(
            f"The Iceberg table {path} has several newest metadata files ({newest[0]}, "
            f"{newest[1]}); pass the path of the one in the catalog, or the catalog's table",
            code="path-unusable",
            path=path,
        )
    return newest[0]


def _snapshot_of(table: IcebergTable, path: str, version: str | None) -> int | None:
    if version is None:
        return None
    snapshot = (
        table.snapshot_by_id(int(version)) if version.isdigit() else table.snapshot_by_name(version)
    )
    if snapshot is None:
        snapshot_ids = [str(each.snapshot_id) for each in table.metadata.snapshots]
        names = [name for name in table.metadata.refs if name != "main"]
        raise UsageError(
            f"The Iceberg table {path} has no snapshot, branch or tag '{version}'; it has "
            f"{', '.join([*snapshot_ids, *names]) or 'none'}",
            code="name-unknown",
            path=path,
            version=version,
            allowed=[*snapshot_ids, *names],
        )
    return snapshot.snapshot_id


def _schema_of(table: IcebergTable, path: str, schema_id: int) -> Schema:
    schemas = table.schemas()
    if schema_id not in schemas:
        raise UsageError(
            f"The Iceberg table {path} has no schema {schema_id}; it has {sorted(schemas)}",
            code="name-unknown",
            path=path,
            allowed=list(schemas),
        )
    return schemas[schema_id]


def _to_lake_table(scan: DataScan, schema: Schema, path: str, *, is_pinned: bool) -> LakeTable:
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    snapshot = scan.snapshot()
    if snapshot is None:
        raise UsageError(
            f"The Iceberg table {path} has no snapshot, so it has no rows",
            code="data-empty",
            path=path,
        )
    version = f"iceberg:{path}@{snapshot.snapshot_id}:schema={schema.schema_id}"
    try:
        tasks = list(scan.plan_files())
    except Exception as error:  # e.g. a ValueError for equality deletes
        raise UsageError(
            f"pyiceberg cannot read the table {version}: {first_line(error)}; read it with "
            "Spark and pass the DataFrame",
            code="unsupported",
            path=version,
        ) from error
    for field in schema.fields:
        _refuse_nested_defaults(field, version)
    reader = _DataFiles(scan, schema, version)
    files = sorted((reader.data_file(task) for task in tasks), key=lambda each: each.path)
    return LakeTable(
        tasks[0].file.file_path if tasks else path,
        pa.schema([_with_field_ids(each) for each in schema_to_pyarrow(schema)]),
        files,
        is_by_id=True,
        evolves=True,
        version=version,
        is_pinned=is_pinned,
        identity=files_identity(
            str(scan.table_metadata.table_uuid), [(snapshot.snapshot_id, f.path) for f in files]
        ),
        complete_schema=reader.with_ids,
    )


def _with_field_ids(field: pa.Field) -> pa.Field:
    """Return a field, and its nested fields, annotated with their field ids in the files."""
    metadata = field.metadata or {}
    key = {KEY: metadata[FIELD_ID]} if FIELD_ID in metadata else None
    return pa.field(field.name, _type_with_field_ids(field.type), field.nullable, key)


def _type_with_field_ids(type_: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_struct(type_):
        return pa.struct([_with_field_ids(each) for each in type_])
    if types.is_list(type_) or types.is_large_list(type_):
        return pa.list_(_with_field_ids(type_.value_field))
    if types.is_map(type_):
        return pa.map_(_with_field_ids(type_.key_field), _with_field_ids(type_.item_field))
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(type_, type_)


def _refuse_nested_defaults(field: NestedField, version: str) -> None:
    for child in getattr(field.field_type, "fields", ()):
        if child.initial_default is not None:
            raise UsageError(
                f"The field '{child.name}' in column '{field.name}' of {version} has an initial "
                "default, which is supported for top-level columns only; read it with Spark and "
                "pass the DataFrame",
                code="unsupported",
                path=version,
                column=field.name,
            )
        _refuse_nested_defaults(child, version)


class _DataFiles:
    """Converter of pyiceberg scan tasks to :class:`DataFile` objects."""

    def __init__(self, scan: DataScan, schema: Schema, version: str):
        self._io, self._schema, self._version = scan.io, schema, version
        self._specs = scan.table_metadata.specs()
        self._names = scan.table_metadata.name_mapping()
        self._deletes: dict[str, dict[str, list[np.ndarray]]] = {}

    def data_file(self, task: FileScanTask) -> DataFile:
        """Return the data file of a scan task, with the positions of its deleted rows."""
        from pyiceberg.manifest import FileFormat

        file = task.file
        if file.file_format != FileFormat.PARQUET:
            raise UsageError(
                f"The table {self._version} has {file.file_format.name} files, but only Parquet is "
                "supported; read it with Spark and pass the DataFrame",
                code="file-format",
                path=self._version,
            )
        deletions = [
            positions
            for delete in task.delete_files
            for positions in self._deletes_in(delete).get(file.file_path, ())
        ]
        deleted = np.unique(np.concatenate(deletions)) if deletions else None
        return DataFile(_path_in_file_system(file.file_path), self._constants(file), deleted)

    def _constants(self, file: IcebergFile) -> tuple[tuple[str, Any], ...]:
        """Return values for columns missing in a file: partition values or column defaults."""
        from pyiceberg.transforms import IdentityTransform

        values = {
            field.field_id: field.initial_default
            for field in self._schema.fields
            if field.initial_default is not None
        }
        for index, each in enumerate(self._specs[file.spec_id].fields):
            if isinstance(each.transform, IdentityTransform):
                values[each.source_id] = file.partition[index]
        names = {field.field_id: field.name for field in self._schema.fields}
        return tuple((names[i], value) for i, value in values.items() if i in names)

    def _deletes_in(self, file: IcebergFile) -> dict[str, list[np.ndarray]]:
        """Return the row positions that a delete file marks as deleted, by data file."""
        from pyiceberg.manifest import FileFormat

        path = file.file_path
        if path not in self._deletes:
            if file.file_format == FileFormat.PARQUET:
                self._deletes[path] = _positions(path)
            elif file.file_format == FileFormat.PUFFIN:
                self._deletes[path] = _vectors(self._io, path)
            else:
                raise UsageError(
                    f"The table {self._version} has delete files in {file.file_format.name} "
                    "format, which is not supported; read it with Spark and pass the DataFrame",
                    code="file-format",
                    path=self._version,
                )
        return self._deletes[path]

    def with_ids(self, file: DataFile, schema: pa.Schema) -> DataFile:
        """Add field ids from the table's name mapping to a file without field ids."""
        from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow

        if any(FIELD_ID in (each.metadata or {}) for each in schema):
            return file
        if self._names is None:
            raise UsageError(
                f"The columns in the file {file.path} of {self._version} have no ids and the table "
                "has no schema.name-mapping.default; read it with Spark and pass the DataFrame",
                code="data-schema",
                path=file.path,
            )
        known = schema_to_pyarrow(pyarrow_to_schema(schema, self._names))
        return replace(file, schema=known)


def _path_in_file_system(url: str) -> str:
    return open_file_system(plain_path(url))[1]


def _positions(url: str) -> dict[str, list[np.ndarray]]:
    """Read a Parquet position-delete file; return the deleted positions of each data file."""
    system, path = open_file_system(plain_path(url))
    table = pq.read_table(path, columns=["file_path", "pos"], filesystem=system)
    grouped = table.group_by("file_path").aggregate([("pos", "list")])
    paths, positions = grouped["file_path"].to_pylist(), grouped["pos_list"].combine_chunks()
    return {path: [each.values.to_numpy()] for path, each in zip(paths, positions, strict=True)}


def _vectors(io: FileIO, url: str) -> dict[str, list[np.ndarray]]:
    """Return the deleted row positions in a Puffin file's deletion vectors, by data file."""
    from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    from pyiceberg.table.puffin import PuffinFile

    with io.new_input(url).open() as stream:
        puffin = PuffinFile(stream.read())
    vectors: dict[str, list[np.ndarray]] = {}
    for each in deletion_vectors_from_puffin_file(puffin):
        positions = each.to_vector().to_numpy().astype(np.int64)
        vectors.setdefault(each.referenced_data_file, []).append(positions)
    return vectors
