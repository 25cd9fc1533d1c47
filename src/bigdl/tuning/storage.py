"""Database storages of Optuna studies."""

import sqlite3
import threading
from collections.abc import Sequence
from typing import Any

from optuna.storages import RDBStorage
from optuna.trial import TrialState

from bigdl.common.timeouts import STUDY_LOCK_S

_lock = threading.Lock()


class SQLiteStorage(RDBStorage):
    """SQLite storage that never assigns a waiting trial to two threads.

    Optuna finds a waiting trial and claims it in two steps, and SQLite holds no lock between them.
    All threads that claim trials are in one process.
    """

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        with _lock:
            return super().set_trial_state_values(trial_id, state, values)


class _WriteAheadConnection(sqlite3.Connection):
    """SQLite connection with a write-ahead log, which avoids a disk sync per write.

    With a write-ahead log, a killed process loses no data, and a power failure at most the last
    moments.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA journal_mode=WAL").close()
        self.execute("PRAGMA synchronous=NORMAL").close()


def open_database(url: str, *, write_ahead: bool = False) -> RDBStorage:
    """Open the Optuna storage at a SQLAlchemy URL.

    Parameters
    ----------
    url : str
    write_ahead : bool
        Use a write-ahead log for an SQLite file, which must be on a local disk.
    """
    if not url.startswith("sqlite"):
        return RDBStorage(url)
    arguments: dict[str, Any] = {"timeout": STUDY_LOCK_S}
    if write_ahead:
        arguments["factory"] = _WriteAheadConnection
    return SQLiteStorage(url, engine_kwargs={"connect_args": arguments})
