"""Tables of files: Parquet files, Delta Lake and Iceberg tables, at one version.

:func:`open_table` looks what is at a path.  A :class:`~bigdl.data.lake_tables.table.LakeTable` says
which Parquet files have the rows of the version, under which names each of them has the columns,
and which rows are deleted.  Workers read ranges of rows by themselves
(:mod:`bigdl.data.lake_tables.table`); whole tables become frames in
:mod:`bigdl.data.lake_tables.frames`.

Needs pyarrow, so it is imported where it is used.
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
    from bigdl.data.lake_tables.table import LakeTable

__all__ = ["is_lake", "is_table_object", "open_table"]

logger = logging.getLogger("bigdl.orca")

_PREFIX = re.compile(r"(delta|iceberg):(?!//)")
_VERSION = re.compile(r"(?P<path>.+)@(?P<version>[^@/]+)")
_MARKS = (("delta", "_delta_log"), ("iceberg", "metadata"))
_CLASSES = {  # of the libraries, that stand for a table
    ("deltalake.", "DeltaTable"): "delta",
    ("pyiceberg.", "Table"): "iceberg",
    ("pyiceberg.", "DataScan"): "iceberg",
}


def open_table(data: Any) -> LakeTable:
    """Open the table at a path.

    Parameters
    ----------
    data : str, path, sequence of them, deltalake.DeltaTable, pyiceberg.table.Table or DataScan
        Parquet files or folders of them; or one Delta Lake or Iceberg table: the path of its
        folder, with ``@v5`` behind it version 5 of a Delta table, with ``@8955043794552107389``
        that snapshot of an Iceberg table and with ``@name`` what a branch or tag of it names. With
        ``delta:`` or ``iceberg:`` in front the folder is not looked at.

    Raises
    ------
    UsageError
        If there is no such table or version, or one that cannot be read exactly.

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
    kind = _kind_of_object(data)
    if kind is not None:
        return _module(kind).open_object(data)
    several = isinstance(data, list | tuple)
    paths = [os.fspath(path) for path in (data if several else [data])]
    lakes = [_lake_at(path) for path in paths]
    if not any(lakes):
        from bigdl.data.lake_tables.parquet import open_files

        return open_files(paths)
    if len(paths) > 1:
        lake = next(path for path, is_lake in zip(paths, lakes, strict=True) if is_lake)
        raise UsageError(
            f"A list of paths must be of Parquet files, but {lake} is a Delta or Iceberg table; "
            "pass one table",
            code="argument-value",
            path=lake,
        )
    ((kind, path, version),) = (each for each in lakes if each is not None)
    if is_local_path(path):  # other processes may have another working directory
        path = open_file_system(path)[1]
    path = path.rstrip("/") or path
    return _module(kind).open_path(path, version)


def is_lake(data: Any) -> bool:
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


def is_table_object(data: Any) -> bool:
    """Return True for an object of deltalake or pyiceberg that stands for a table.

    Examples
    --------
    >>> import deltalake
    >>> import pyarrow as pa
    >>> from bigdl.data.lake_tables import is_table_object
    >>> deltalake.write_deltalake("clicks", pa.table({"id": [1, 2]}))
    >>> is_table_object(deltalake.DeltaTable("clicks")), is_table_object("clicks")
    (True, False)
    """
    return _kind_of_object(data) is not None


def _kind_of_object(data: Any) -> str | None:
    for cls in type(data).__mro__:
        for (package, name), kind in _CLASSES.items():
            if cls.__name__ == name and cls.__module__.startswith(package):
                return kind
    return None


def _lake_at(path: str) -> tuple[str, str, str | None] | None:
    """The kind, folder and version of the lake's table that a path names; None for other paths."""
    prefix = _PREFIX.match(path)
    if prefix is not None:
        path = path[prefix.end() :]
        kind: str | None = prefix[1]
        is_whole = exists(path)
    else:
        kind = _kind_of_folder(path)
        is_whole = kind is not None
    version = None if is_whole else _VERSION.fullmatch(path)
    if version is None:
        return None if kind is None else (kind, path, None)
    kind = kind or _kind_of_folder(version["path"])
    return None if kind is None else (kind, version["path"], version["version"])


def _kind_of_folder(path: str) -> str | None:
    try:
        for kind, mark in _MARKS:
            if exists(joined(path, mark)) and _module(kind).is_table(path):
                return kind
    except Exception as error:  # of any driver of a storage; whoever reads the path says it better
        logger.debug("It cannot be told what is at %s: %s", path, error)
    return None


def _module(kind: str) -> Any:
    return import_module(f"{__name__}.{kind}")
