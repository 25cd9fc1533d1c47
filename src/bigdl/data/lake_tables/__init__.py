"""Parquet files, Delta Lake tables and Iceberg tables, read at one version.

:func:`open_table` detects the table format at a path.  A
:class:`~bigdl.data.lake_tables.table.LakeTable` lists the Parquet files of the version, the column
names within each file, and the deleted rows.  Each worker reads its range of rows
(:mod:`bigdl.data.lake_tables.table`); :mod:`bigdl.orca.data.lake_tables.frames` converts whole
tables to frames.

The submodules need pyarrow, so they are imported where they are used.
"""

from __future__ import annotations

import logging
import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.common.storage import exists, is_local_path, joined, open_file_system

if TYPE_CHECKING:
    from types import ModuleType

    from bigdl.data.lake_tables.table import LakeTable

__all__ = ["is_lake", "is_table_object", "open_table"]

logger = logging.getLogger("bigdl.orca")

_PREFIX = re.compile(r"(delta|iceberg):(?!//)")
_VERSION = re.compile(r"(?P<path>.+)@(?P<version>[^@/]+)")
_MARKER_FOLDERS = (("delta", "_delta_log"), ("iceberg", "metadata"))
_TABLE_CLASSES = {  # table classes of deltalake and pyiceberg
    ("deltalake.", "DeltaTable"): "delta",
    ("pyiceberg.", "Table"): "iceberg",
    ("pyiceberg.", "DataScan"): "iceberg",
}


def open_table(data: Any) -> LakeTable:
    """Open Parquet files, a Delta Lake table or an Iceberg table.

    Parameters
    ----------
    data : str, path, sequence of them, deltalake.DeltaTable, pyiceberg.table.Table or DataScan
        Parquet files or folders of them; or the folder of one Delta Lake or Iceberg table. Append
        ``@v5`` for version 5 of a Delta table, ``@8955043794552107389`` for a snapshot of an
        Iceberg table, or ``@name`` for a branch or tag. The prefix ``delta:`` or ``iceberg:``
        states the format, so the folder is not inspected.

    Raises
    ------
    UsageError
        If the table or version does not exist, or cannot be read exactly.

    Examples
    --------
    >>> import deltalake
    >>> import pyarrow as pa
    >>> from bigdl.data.lake_tables import open_table
    >>> deltalake.write_deltalake("clicks", pa.table({"id": [1, 2]}))
    >>> deltalake.write_deltalake("clicks", pa.table({"id": [3]}), mode="append")
    >>> table = open_table("clicks")
    >>> table.version.rpartition("@")[2], len(table.files), table.schema.names
    ('v1', 2, ['id'])
    >>> len(open_table("clicks@v0").files)
    1
    """
    table_format = _format_of_object(data)
    if table_format is not None:
        return _module(table_format).open_object(data)
    is_sequence = isinstance(data, list | tuple)
    paths = [os.fspath(path) for path in (data if is_sequence else [data])]
    lakes = [_lake_at(path) for path in paths]
    if not any(lakes):
        from bigdl.data.lake_tables.parquet import open_files

        return open_files(paths)
    if len(paths) > 1:
        lake = next(path for path, is_lake in zip(paths, lakes, strict=True) if is_lake)
        raise UsageError(
            f"A list may contain only Parquet paths, but {lake} is a Delta or Iceberg table; "
            "pass that table alone",
            code="argument-value",
            path=lake,
        )
    ((table_format, path, version),) = (each for each in lakes if each is not None)
    if is_local_path(path):  # other processes may have a different working directory
        path = open_file_system(path)[1]
    path = path.rstrip("/") or path
    return _module(table_format).open_path(path, version)


def is_lake(data: object) -> bool:
    """Return True for a Delta or Iceberg table, False for paths of Parquet files.

    Examples
    --------
    >>> import deltalake
    >>> import pyarrow as pa
    >>> from bigdl.data.lake_tables import is_lake
    >>> deltalake.write_deltalake("clicks", pa.table({"id": [1, 2]}))
    >>> is_lake("clicks"), is_lake("clicks@v0"), is_lake("clicks.parquet")
    (True, True, False)
    """
    if is_table_object(data):
        return True
    paths = data if isinstance(data, list | tuple) else [data]
    return any(isinstance(p, str | os.PathLike) and _lake_at(os.fspath(p)) for p in paths)


def is_table_object(data: object) -> bool:
    """Return True for a table object of deltalake or pyiceberg.

    Examples
    --------
    >>> import deltalake
    >>> import pyarrow as pa
    >>> from bigdl.data.lake_tables import is_table_object
    >>> deltalake.write_deltalake("clicks", pa.table({"id": [1, 2]}))
    >>> is_table_object(deltalake.DeltaTable("clicks")), is_table_object("clicks")
    (True, False)
    """
    return _format_of_object(data) is not None


def _format_of_object(data: object) -> str | None:
    for cls in type(data).__mro__:
        for (package, name), table_format in _TABLE_CLASSES.items():
            if cls.__name__ == name and cls.__module__.startswith(package):
                return table_format
    return None


def _lake_at(path: str) -> tuple[str, str, str | None] | None:
    """Return the format, folder and version of the lake table at a path, or None."""
    prefix = _PREFIX.match(path)
    if prefix is not None:
        path = path[prefix.end() :]
        table_format: str | None = prefix[1]
        is_whole = exists(path)
    else:
        table_format = _format_of_folder(path)
        is_whole = table_format is not None
    version = None if is_whole else _VERSION.fullmatch(path)
    if version is None:
        return None if table_format is None else (table_format, path, None)
    table_format = table_format or _format_of_folder(version["path"])
    return None if table_format is None else (table_format, version["path"], version["version"])


def _format_of_folder(path: str) -> str | None:
    try:
        for table_format, marker in _MARKER_FOLDERS:
            if exists(joined(path, marker)) and _module(table_format).is_table(path):
                return table_format
    except Exception as error:  # any storage driver; reading the path reports it better
        logger.debug("Cannot detect the table format at %s: %s", path, error)
    return None


def _module(table_format: str) -> ModuleType:
    return import_module(f"{__name__}.{table_format}")
