"""Files of SQLite as the databases of studies."""

from __future__ import annotations

import sqlite3
import threading

from optuna.storages import RDBStorage

__all__ = ["SQLiteStorage", "WriteAhead"]

_lock = threading.Lock()


class SQLiteStorage(RDBStorage):
    """A database in which no trial that waits is given to two threads.

    Optuna looks whether a trial is waiting and takes it in two steps, between which SQLite locks
    nothing.  The threads that take trials are all of one process.
    """

    def set_trial_state_values(self, trial_id, state, values=None):
        with _lock:
            return super().set_trial_state_values(trial_id, state, values)


class WriteAhead(sqlite3.Connection):
    """A connection that does not wait for the disk at every epoch of a trial.

    With the log that is written ahead, a process that is killed loses nothing, and a machine that
    loses its power at most the last moments.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA journal_mode=WAL").close()
        self.execute("PRAGMA synchronous=NORMAL").close()
