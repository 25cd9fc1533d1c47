"""Databases of studies."""

import sqlite3
import threading
from collections.abc import Sequence
from typing import Any

from optuna.storages import RDBStorage
from optuna.trial import TrialState

from bigdl.common.timeouts import STUDY_LOCK_S

_lock = threading.Lock()


class SQLiteStorage(RDBStorage):
    """A database in which no waiting trial is given to two threads.

    Optuna looks for a waiting trial and takes it in two steps, between which SQLite locks nothing.
    The threads that take trials are all of one process.
    """

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        with _lock:
            return super().set_trial_state_values(trial_id, state, values)


class _WriteAheadConnection(sqlite3.Connection):
    """A connection that does not wait for the disk at every epoch of a trial.

    With a write-ahead log, a process that is killed loses nothing, and a machine that loses its
    power at most the last moments.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA journal_mode=WAL").close()
        self.execute("PRAGMA synchronous=NORMAL").close()


def open_database(url: str, *, write_ahead: bool = False) -> RDBStorage:
    """Open the storage of Optuna at a URL of SQLAlchemy.

    Parameters
    ----------
    url : str
    write_ahead : bool
        Give a file of SQLite a write-ahead log, which needs a disk of this machine.
    """
    if not url.startswith("sqlite"):
        return RDBStorage(url)
    arguments: dict[str, Any] = {"timeout": STUDY_LOCK_S}
    if write_ahead:
        arguments["factory"] = _WriteAheadConnection
    return SQLiteStorage(url, engine_kwargs={"connect_args": arguments})
