"""Event histories of users, appended while recommendations are served.

An :class:`EventStore` keeps the newest events of each user: items, and times in seconds. Events are
ordered by time and item, as ``SequenceRecommender`` orders them. An event with an id that the
user's history already contains is ignored, so that a client may repeat a request.

:class:`EmbeddedEvents` is a SQLite database in a folder, for the processes of one machine.
:class:`RedisEvents` is a sorted set per user in Redis.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import sqlite3
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError, one_line, require
from bigdl.common.timeouts import EVENTS_WRITE_S
from bigdl.friesian.serving.errors import LogRateLimit
from bigdl.friesian.serving.redis_store import connected_redis
from bigdl.friesian.serving.rows import Ids, ids_of, table_of
from bigdl.nano.serving.batching import UnavailableError

if TYPE_CHECKING:
    from bigdl.friesian.serving.rows import TableSource

logger = logging.getLogger(__name__)

__all__ = ["Appended", "EmbeddedEvents", "Event", "EventStore", "RedisEvents", "UserHistory"]

DEFAULT_EVENTS = 1000
MOST_TIME = 9e18  # models read times as 64-bit integers
_FILE = "events.sqlite"
_ROW = np.dtype([("time", "<f8"), ("item", "<i8"), ("key", "<u8")])
_USERS_AT_ONCE = 500  # maximum number of users per query
_OLDEST = 1 << 63  # bias with which signed ids are ordered as unsigned bytes


@dataclass(frozen=True)
class Event:
    """Interaction of a user with an item.

    Attributes
    ----------
    user, item : int
    time : float
        Seconds since 1970; in the unit of the training data, if that is another one.
    id : str
        Identifies the event, so that it is appended once; empty if it is never repeated.

    Examples
    --------
    >>> from bigdl.friesian.serving import Event
    >>> Event(user=1, item=7, time=1.7e9, id="click-815").item
    7
    """

    user: int
    item: int
    time: float
    id: str = ""

    @classmethod
    def of(cls, content: object) -> Event:
        """Return the event of a JSON object such as ``{"user": 1, "item": 7}``.

        Parameters
        ----------
        content : dict
            ``user``, ``item``, and optionally ``time`` (default: now) and ``id``.

        Raises
        ------
        UsageError
            If a value has the wrong type, or a key is unknown.
        """
        if not isinstance(content, Mapping):
            raise _invalid(f"An event should be an object with user and item, got {content!r}")
        if strange := sorted(map(str, content.keys() - {"user", "item", "time", "id"})):
            raise _invalid(
                f"An event has the unknown key {strange[0]!r}; known are user, item, time, id"
            )
        numbers = {}
        for name in ("user", "item"):
            value = content.get(name)
            is_id = isinstance(value, int) and not isinstance(value, bool)
            if not is_id or not -_OLDEST <= value < _OLDEST:  # type: ignore[operator]
                raise _invalid(f"The {name} of an event should be a whole number, got {value!r}")
            numbers[name] = int(value)  # type: ignore[arg-type]
        when = content.get("time")
        if when is None:
            when = time.time()
        if isinstance(when, bool) or not isinstance(when, int | float):
            raise _invalid(f"The time of an event should be a number of seconds, got {when!r}")
        _check_time(when)
        key = content.get("id", "")
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise _invalid(f"The id of an event should be a string or a number, got {key!r}")
        return cls(numbers["user"], numbers["item"], float(when), str(key))


def _invalid(sentence: str) -> UsageError:
    return UsageError(sentence, code="request-invalid", argument="events")


def _check_time(when: float) -> None:
    if not abs(when) < MOST_TIME:  # also NaN
        raise _invalid(
            f"The time of an event should be a finite number below {MOST_TIME:g}, got {when!r}"
        )


@dataclass(frozen=True)
class Appended:
    """Result of appending events.

    Attributes
    ----------
    added : int
    repeated : int
        Events whose id the history of the user already contains.
    late : int
        Events that are older than a full history; they are ignored.

    Examples
    --------
    >>> from bigdl.friesian.serving.events import Appended
    >>> Appended(added=2).repeated
    0
    """

    added: int = 0
    repeated: int = 0
    late: int = 0


@dataclass(frozen=True)
class UserHistory:
    """Newest events of a user, oldest first.

    Attributes
    ----------
    items : ndarray of int64
    times : ndarray of float64
    total : int
        Number of events that were ever appended; the older ones are no longer kept.

    Examples
    --------
    >>> from bigdl.friesian.serving import EmbeddedEvents, Event
    >>> with EmbeddedEvents("events", most=2) as events:
    ...     _ = events.append([Event(1, item, float(item)) for item in (5, 6, 7)])
    ...     history = events.read([1])[0]
    >>> history.items.tolist(), history.total
    ([6, 7], 3)
    """

    items: np.ndarray
    times: np.ndarray
    total: int


class EventStore(ABC):
    """Base class of stores of event histories; several threads may use a store at once.

    Parameters
    ----------
    most : int
        Number of events to keep per user.

    Examples
    --------
    >>> from bigdl.friesian.serving import EventStore, open_events
    >>> with open_events("events") as events:  # or a Redis URL
    ...     isinstance(events, EventStore)
    True
    """

    def __init__(self, most: int = DEFAULT_EVENTS):
        self.most = check_integer("most", most, 1)
        self._log_limit = LogRateLimit()

    def _outage(self, location: str, error: Exception) -> UnavailableError:
        """Log an error of the storage; return one for clients, which need not know the details."""
        if self._log_limit.allows():
            logger.error(
                "The events at %s cannot be read or written: %s", location, one_line(error)
            )
        return UnavailableError(
            "The event store does not work now; try again later", code="cluster-unreachable"
        )

    def append(self, events: Iterable[Event]) -> Appended:
        """Append events atomically; a later read by any process contains them.

        Parameters
        ----------
        events : iterable of Event

        Returns
        -------
        Appended

        Raises
        ------
        UsageError
            If a time is not finite.
        UnavailableError
            If the store does not answer, or cannot be written.
        """
        per_user: dict[int, list[tuple[float, int, int]]] = {}
        for each in events:
            _check_time(each.time)
            key = _key_of(each.id)
            per_user.setdefault(each.user, []).append((each.time, each.item, key))
        if not per_user:
            return Appended()
        rows = {user: np.array(new, _ROW) for user, new in per_user.items()}
        return self._append(rows)

    def append_table(
        self,
        source: TableSource,
        user_col: str = "user",
        item_col: str = "item",
        time_col: str = "time",
    ) -> Appended:
        """Append the events of a table, such as the training data; atomically for each user.

        The id of an event consists of its values, so that the same table can be loaded again, for
        example after an interruption.

        Parameters
        ----------
        source : FeatureTable, DataFrame, pyarrow.Table or str
            A str is the path of Parquet files.
        user_col, item_col, time_col : str
            Ids are integers, times are numbers, in seconds since 1970 or as in training.

        Returns
        -------
        Appended
        """
        table = table_of(source, "the table of events")
        for name in (user_col, item_col, time_col):
            if name not in table.column_names:
                raise UsageError(
                    f"The table of events has no column {name!r}, only {table.column_names}",
                    code="column-missing",
                    column=name,
                    allowed=list(table.column_names),
                )
        users = ids_of(table[user_col], "the users")
        times = table[time_col].to_numpy()
        if times.dtype.kind == "M":
            moments = times.astype("datetime64[us]")
            times = np.where(np.isnat(moments), np.nan, moments.astype(np.int64) / 1e6)
        times = times.astype(np.float64)
        if (wrong := np.flatnonzero(~(np.abs(times) < MOST_TIME))).size:
            raise UsageError(
                f"The times should be finite numbers below {MOST_TIME:g}, got {times[wrong[0]]} in "
                f"{len(wrong)} of {len(times)} rows; remove these rows",
                code="data-value",
                column=time_col,
            )
        rows = np.zeros(len(users), _ROW)
        rows["time"], rows["item"] = times, ids_of(table[item_col], "the items")
        order = np.lexsort((rows["item"], rows["time"], users))
        users, rows = users[order], rows[order]
        # The n-th of equal rows gets the key n, so that each of them is kept, and kept once.
        same = np.zeros(len(rows), bool)
        same[1:] = (users[1:] == users[:-1]) & (rows[1:] == rows[:-1])
        at = np.arange(len(rows))
        number = at - np.maximum.accumulate(np.where(same, 0, at))
        rows["key"] = np.ascontiguousarray(rows["time"]).view(np.uint64) + number.astype(np.uint64)
        distinct, starts = np.unique(users, return_index=True)
        per_user = dict(zip(distinct.tolist(), np.split(rows, starts)[1:], strict=True))
        counts = np.zeros(3, np.int64)
        for part in _batches(list(per_user)):
            added = self._append({user: per_user[user] for user in part})
            counts += (added.added, added.repeated, added.late)
        return Appended(*counts.tolist())

    @abstractmethod
    def _append(self, rows: Mapping[int, np.ndarray]) -> Appended:
        """Append rows of time, item and key by user, atomically."""

    @abstractmethod
    def read(self, users: Ids) -> list[UserHistory]:
        """Return the history of each user; unknown users have an empty one.

        Parameters
        ----------
        users : sequence of int
        """

    @abstractmethod
    def size(self) -> int:
        """Return the number of users who have events."""

    def close(self) -> None:  # noqa: B027
        """Close the connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _key_of(name: str) -> int:
    if not name:
        return secrets.randbits(64)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


_NO_HISTORY = UserHistory(np.zeros(0, np.int64), np.zeros(0), 0)


class EmbeddedEvents(EventStore):
    """Event histories in a folder, for any number of processes of one machine.

    Events that :meth:`append` has written survive a killed process.

    Parameters
    ----------
    path : str or path-like
        Folder; it is created if it does not exist.
    most : int, default 1000
        Number of events to keep per user.

    Raises
    ------
    UsageError
        If the folder cannot be used.

    Examples
    --------
    >>> from bigdl.friesian.serving import EmbeddedEvents, Event
    >>> with EmbeddedEvents("events") as events:
    ...     clicks = [Event(1, 7, 30.0, "a"), Event(1, 5, 10.0, "b"), Event(1, 7, 30.0, "a")]
    ...     print(events.append(clicks))
    ...     events.read([1])[0].items.tolist()
    Appended(added=2, repeated=1, late=0)
    [5, 7]
    """

    def __init__(self, path: str | os.PathLike, most: int = DEFAULT_EVENTS):
        super().__init__(most)
        self._path = Path(path)
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._opening = threading.Lock()
        self._has_ended = False
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._connection().execute(
                "CREATE TABLE IF NOT EXISTS histories "
                "(user INTEGER PRIMARY KEY, total INTEGER NOT NULL, events BLOB NOT NULL)"
            )
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise UsageError(
                f"The events at {self._path} cannot be read or written: {one_line(error)}",
                code="path-unusable",
                path=str(self._path),
            ) from error

    def __repr__(self) -> str:
        return f"<EmbeddedEvents {str(self._path)!r}>"

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise self._outage(str(self._path), error) from error

    def _connection(self) -> sqlite3.Connection:
        """Return the connection of this thread."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            with self._opening:
                if self._has_ended:
                    raise UsageError("The events are closed; open them again", code="state")
                connection = sqlite3.connect(
                    self._path / _FILE,
                    timeout=EVENTS_WRITE_S,
                    isolation_level=None,
                    check_same_thread=False,  # close() may run in another thread
                )
                self._connections.append(connection)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            self._local.connection = connection
        return connection

    def _append(self, rows: Mapping[int, np.ndarray]) -> Appended:
        with self._errors():
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                counts = np.zeros(3, np.int64)
                for users in _batches(list(rows)):
                    known = self._rows(connection, users)
                    changed = []
                    for user in users:
                        total, old = known.get(user, (0, np.zeros(0, _ROW)))
                        kept, total, result = _merged(old, total, rows[user], self.most)
                        counts += result
                        if result[0]:
                            changed.append((user, total, kept.tobytes()))
                    connection.executemany(
                        "INSERT OR REPLACE INTO histories VALUES (?, ?, ?)", changed
                    )
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite ends it if the disk is full
                    connection.execute("ROLLBACK")
                raise
        return Appended(*counts.tolist())

    def read(self, users: Ids) -> list[UserHistory]:
        ids = ids_of(users, "the users").tolist()
        known: dict[int, UserHistory] = {}
        with self._errors():
            connection = self._connection()
            for part in _batches(list(dict.fromkeys(ids))):
                for user, (total, rows) in self._rows(connection, part).items():
                    known[user] = UserHistory(rows["item"].copy(), rows["time"].copy(), total)
        return [known.get(user, _NO_HISTORY) for user in ids]

    @staticmethod
    def _rows(
        connection: sqlite3.Connection, users: Sequence[int]
    ) -> dict[int, tuple[int, np.ndarray]]:
        marks = ",".join("?" * len(users))
        stored = connection.execute(
            f"SELECT user, total, events FROM histories WHERE user IN ({marks})", users
        )
        return {user: (total, np.frombuffer(blob, _ROW)) for user, total, blob in stored}

    def size(self) -> int:
        with self._errors():
            return int(self._connection().execute("SELECT COUNT(*) FROM histories").fetchone()[0])

    def close(self) -> None:
        """Close the connections of all threads."""
        with self._opening:
            self._has_ended = True
            while self._connections:
                self._connections.pop().close()
        self._local = threading.local()


def _batches(users: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(users), _USERS_AT_ONCE):
        yield users[start : start + _USERS_AT_ONCE]


def _merged(
    old: np.ndarray, total: int, new: np.ndarray, most: int
) -> tuple[np.ndarray, int, tuple[int, int, int]]:
    """Insert new rows into the rows of a user.

    Returns
    -------
    kept : ndarray
        Newest rows, in order.
    total : int
    counts : (int, int, int)
        Number of added, repeated and late rows.
    """
    known = set(zip(old["item"].tolist(), old["key"].tolist(), strict=True))
    oldest = (float(old["time"][0]), int(old["item"][0])) if total > len(old) else None
    added: list[int] = []
    late = 0
    for row, (when, item, key) in enumerate(new.tolist()):
        if (item, key) in known:
            continue
        if oldest is not None and (when, item) < oldest:
            late += 1
            continue
        known.add((item, key))
        added.append(row)
    rows = np.concatenate([old, new[added]])
    if added:
        rows = rows[np.lexsort((rows["item"], rows["time"]))][-most:]
    counts = len(added), len(new) - len(added) - late, late
    return rows, total + len(added), counts


_SCRIPT = """
local added, repeated, late = 0, 0, 0
local most = tonumber(ARGV[1])
local total = tonumber(redis.call('GET', KEYS[2]) or '0')
local oldest = {}
if total > redis.call('ZCARD', KEYS[1]) then
    oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
end
for i = 2, #ARGV, 2 do
    local score, member = ARGV[i], ARGV[i + 1]
    if redis.call('ZSCORE', KEYS[1], member) then
        repeated = repeated + 1
    elseif oldest[1] and (tonumber(score) < tonumber(oldest[2]) or
            (tonumber(score) == tonumber(oldest[2]) and member < oldest[1])) then
        late = late + 1
    else
        redis.call('ZADD', KEYS[1], score, member)
        added = added + 1
    end
end
if added > 0 then
    redis.call('INCRBY', KEYS[2], added)
    redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -most - 1)
end
return {added, repeated, late}
"""


class RedisEvents(EventStore):
    """Event histories in Redis; appending is atomic, or atomic per user in a Redis cluster.

    Parameters
    ----------
    url : str
        As for :class:`RedisStore`.
    prefix : str, default ""
        Prefix of all keys.
    most : int, default 1000
        Number of events to keep per user.
    timeout : float, default 2.0
        Seconds to wait for an answer of Redis.

    Examples
    --------
    >>> from bigdl.friesian.serving import Event, RedisEvents
    >>> try:
    ...     RedisEvents("redis://127.0.0.1:1/0").append([Event(1, 7, 30.0)])
    ... except RuntimeError as error:  # no Redis runs here
    ...     print(error)
    The event store does not work now; try again later
    """

    def __init__(
        self, url: str, prefix: str = "", most: int = DEFAULT_EVENTS, timeout: float = 2.0
    ):
        super().__init__(most)
        check_number("timeout", timeout, above=0)
        options = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        self._prefix = prefix
        self._shown = url.rpartition("@")[2].rpartition("//")[2]
        self._redis, self._is_cluster = connected_redis(url, options)
        self._error = require("redis", "serving").RedisError

    def __repr__(self) -> str:
        return f"<RedisEvents {self._shown!r}, prefix {self._prefix!r}>"

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise self._outage(self._shown, error) from error

    def _keys(self, user: int) -> tuple[str, str]:
        # The braces keep both keys in one slot of a cluster.
        return f"{self._prefix}events:{{{user}}}", f"{self._prefix}events-total:{{{user}}}"

    def _append(self, rows: Mapping[int, np.ndarray]) -> Appended:
        with self._errors():
            pipeline = self._redis.pipeline(transaction=not self._is_cluster)
            for user, new in rows.items():
                values: list[Any] = [self.most]
                for when, item, key in new.tolist():
                    values += [repr(when), struct.pack(">QQ", item + _OLDEST, key)]
                pipeline.eval(_SCRIPT, 2, *self._keys(user), *values)
            counts = np.array(pipeline.execute(), np.int64).reshape(-1, 3).sum(0)
        return Appended(*counts.tolist())

    def read(self, users: Ids) -> list[UserHistory]:
        ids = ids_of(users, "the users").tolist()
        with self._errors():
            pipeline = self._redis.pipeline(transaction=not self._is_cluster)
            for user in ids:
                events, total = self._keys(user)
                pipeline.zrange(events, 0, -1, withscores=True)
                pipeline.get(total)
            answers = pipeline.execute()
        histories = []
        for rows, total in zip(answers[::2], answers[1::2], strict=True):
            items = [struct.unpack(">Q", member[:8])[0] - _OLDEST for member, _ in rows]
            times = np.array([score for _, score in rows], np.float64)
            histories.append(UserHistory(np.array(items, np.int64), times, int(total or 0)))
        return histories

    def size(self) -> int:
        with self._errors():
            return sum(1 for _ in self._redis.scan_iter(f"{self._prefix}events-total:*"))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def open_events(location: str, prefix: str = "", most: int = DEFAULT_EVENTS) -> EventStore:
    """Open the EmbeddedEvents in a folder or the RedisEvents at a URL.

    Parameters
    ----------
    location : str
        Folder, or Redis URL.
    prefix : str, default ""
        Prefix of the keys in Redis.
    most : int, default 1000
        Number of events to keep per user.

    Returns
    -------
    EventStore

    Examples
    --------
    >>> from bigdl.friesian.serving import open_events
    >>> with open_events("events") as events:
    ...     events.size()
    0
    """
    if "://" in location:
        return RedisEvents(location, prefix, most)
    if prefix:
        raise UsageError(
            "A prefix applies to keys in Redis; events in a folder have none",
            code="argument-conflict",
            argument="prefix",
        )
    return EmbeddedEvents(location, most)
