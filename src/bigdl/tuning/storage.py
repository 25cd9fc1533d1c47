"""The database of a study."""

from __future__ import annotations

from typing import Any

from bigdl.tuning._by_name import optuna

__all__ = ["open_database"]

_PATIENCE = 120  # seconds that a process waits while others write to the same SQLite file


def open_database(url: str, *, writes_ahead: bool = False) -> Any:
    """The storage of Optuna at a URL.

    Parameters
    ----------
    url : str
        As SQLAlchemy takes it.
    writes_ahead : bool
        Let a file of SQLite have a log that is written ahead, which needs a disk of this machine.

    Returns
    -------
    optuna.storages.RDBStorage
    """
    storages = optuna().storages
    if not url.startswith("sqlite"):
        return storages.RDBStorage(url)
    from bigdl.tuning._sqlite import SQLiteStorage, WriteAhead

    arguments: dict[str, Any] = {"timeout": _PATIENCE}
    if writes_ahead:
        arguments["factory"] = WriteAhead
    return SQLiteStorage(url, engine_kwargs={"connect_args": arguments})
