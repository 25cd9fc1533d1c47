"""Feature store in Redis, for servers on several machines.

The keys are those of BigDL 2.x: ``<prefix><table>:<id>`` holds a row, ``<prefix><table>`` the
column names. Versions after the first have ``v<number>_`` after the prefix. ``<prefix>version``
holds the current version; readers read it in the same command as the rows.

====================================  ============================================================
URL                                   is
====================================  ============================================================
``redis://host:6379/0``               one server; ``rediss://`` with TLS
``redis+sentinel://a:26379,b/name``   the master of this name, by these sentinels
``redis+cluster://host:7000``         a cluster, by one or several of its nodes; user and password
                                      go before the first node, as ``user:password@``
====================================  ============================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError, one_line, require
from bigdl.common.timeouts import WRITER_LOCK_S
from bigdl.friesian.serving.rows import Features, Layout, StoredRows, gather_features
from bigdl.friesian.serving.store import FeatureStore, missing_table_error

if TYPE_CHECKING:
    from types import ModuleType

    from redis import Redis
    from redis.retry import Retry

_AT_ONCE = 1000  # rows per command when a version is written


class RedisStore(FeatureStore):
    """Feature store in Redis; an update is atomic, or atomic per row in a Redis cluster.

    Parameters
    ----------
    url : str
        See the module.
    prefix : str, default ""
        Prefix of all keys.
    keep : int, default 2
        Number of versions to keep.
    timeout : float, default 2.0
        Seconds to wait for an answer of Redis.

    Raises
    ------
    UsageError
        If the URL is invalid, or Redis does not answer.

    Examples
    --------
    >>> from bigdl.friesian.serving import RedisStore
    >>> try:
    ...     store = RedisStore("redis://127.0.0.1:1/0", prefix="2tower_")
    ... except ValueError as error:  # no Redis runs here
    ...     print(str(error)[:40])
    Redis at redis://127.0.0.1:1/0 does not
    """

    def __init__(self, url: str, prefix: str = "", keep: int = 2, timeout: float = 2.0):
        self._prefix = prefix
        self._keep = check_integer("keep", keep, 1)
        options = {
            "socket_timeout": check_number("timeout", timeout, above=0),
            "socket_connect_timeout": timeout,
        }
        self._shown = url.rpartition("@")[2]
        self._redis, self._is_cluster = connected_redis(url, options)
        self._error = require("redis", "serving").RedisError
        self._version = 0
        self._layouts: dict[str, Layout] = {}
        try:
            self._load_layouts()
        except self._error as error:
            raise UsageError(
                f"Redis at {self._shown} does not answer: {one_line(error)}",
                code="cluster-unreachable",
                address=self._shown,
            ) from error

    def __repr__(self) -> str:
        return f"<RedisStore {self._shown!r}, prefix {self._prefix!r}>"

    # -- keys -----------------------------------------------------------------------------------

    def _begin(self, version: int) -> str:
        return self._prefix if version <= 1 else f"{self._prefix}v{version}_"

    def _row_keys(self, version: int, table: str, ids: np.ndarray) -> list[str]:
        begin = f"{self._begin(version)}{table}:"
        return [f"{begin}{each}" for each in ids.tolist()]

    # -- reading --------------------------------------------------------------------------------

    def _load_layouts(self) -> dict[str, Layout]:
        """Read the current version and the layouts of its tables."""
        version = int(self._redis.get(f"{self._prefix}version") or 0)
        content = self._redis.get(f"{self._begin(version)}layouts")
        known = json.loads(content) if version and content else {}
        layouts = {name: Layout.from_json(each) for name, each in known.items()}
        self._version, self._layouts = version, layouts
        return layouts

    def _layout_of(self, table: str) -> Layout:
        layouts = self._layouts
        if table not in layouts:
            layouts = self._load_layouts()
        if table not in layouts:
            raise missing_table_error(table, list(layouts))
        return layouts[table]

    def _read(self, table: str, ids: np.ndarray, columns: Sequence[str] | None) -> Features:
        for _ in range(10):
            layout, version = self._layout_of(table), self._version
            distinct, inverse = np.unique(ids, return_inverse=True)
            keys = [f"{self._prefix}version", *self._row_keys(version, table, distinct)]
            get = self._redis.mget_nonatomic if self._is_cluster else self._redis.mget
            counts, *values = get(keys)
            if int(counts or 0) == version:
                break
            self._load_layouts()
        else:
            raise UsageError(
                f"The version of the store at {self._shown} changed during 10 reads",
                code="cluster-refused",
                address=self._shown,
            )
        is_known = np.array([value is not None for value in values], bool)
        rows = StoredRows.from_bytes(
            distinct[is_known], [value for value in values if value is not None], layout
        )
        return gather_features(layout, [rows], distinct[inverse], columns)

    @property
    def version(self) -> int:
        self._load_layouts()
        return self._version

    def versions(self) -> list[int]:
        return json.loads(self._redis.get(f"{self._prefix}versions") or "[]")

    def layout(self, table: str) -> Layout:
        return self._layout_of(table)

    def tables(self) -> list[str]:
        return list(self._load_layouts())

    def size(self, table: str) -> int:
        self._load_layouts()
        self._layout_of(table)
        pattern = f"{_escaped(self._begin(self._version))}{table}:*"
        return sum(1 for _ in self._redis.scan_iter(pattern, count=_AT_ONCE))

    # -- writing --------------------------------------------------------------------------------

    @contextmanager
    def _writer(self) -> Iterator[None]:
        lock = self._redis.lock(f"{self._prefix}lock", timeout=WRITER_LOCK_S)
        try:
            lock.acquire()
            try:
                yield
            finally:
                if lock.owned():
                    lock.release()
        except self._error as error:
            raise UsageError(
                f"The store at {self._shown} cannot be written: {one_line(error)}",
                code="cluster-refused",
                address=self._shown,
            ) from error

    def _replace(self, tables: dict[str, tuple[Layout, StoredRows]]) -> int:
        with self._writer():
            known = self.versions()
            version = max(known, default=0) + 1
            self._remove(version)  # remove leftovers of a writer that was killed
            for name, (layout, rows) in tables.items():
                self._write(version, name, layout, rows)
            begin = self._begin(version)
            layouts = {name: layout.to_json() for name, (layout, _) in tables.items()}
            self._redis.set(f"{begin}layouts", json.dumps(layouts))
            for name, (layout, _) in tables.items():
                self._redis.set(f"{begin}{name}", ",".join([layout.id_column, *layout.names]))
            kept = [*known, version][-self._keep :]
            self._redis.set(f"{self._prefix}versions", json.dumps(kept))
            self._redis.set(f"{self._prefix}version", version)  # activates the version
            for old in set(known) - set(kept):
                self._remove(old)
        self._load_layouts()
        return version

    def _write(self, version: int, name: str, layout: Layout, rows: StoredRows) -> None:
        pairs = zip(self._row_keys(version, name, rows.ids), rows.to_bytes(layout), strict=True)
        while part := dict(islice(pairs, _AT_ONCE)):
            (self._redis.mset_nonatomic if self._is_cluster else self._redis.mset)(part)

    def _update(self, changes: Mapping[str, Any]) -> None:
        with self._writer():
            self._load_layouts()
            ready = []
            for name, table in changes.items():
                layout = self._layout_of(name)
                ready.append((name, layout, StoredRows.of(table, layout, f"the table {name}")))
            pairs: dict[str, bytes] = {}
            for name, layout, rows in ready:
                keys = self._row_keys(self._version, name, rows.ids)
                pairs.update(zip(keys, rows.to_bytes(layout), strict=True))
            if pairs:  # one command is atomic
                (self._redis.mset_nonatomic if self._is_cluster else self._redis.mset)(pairs)

    def _delete(self, table: str, ids: np.ndarray) -> None:
        with self._writer():
            self._load_layouts()
            self._layout_of(table)
            self._unlink(self._row_keys(self._version, table, ids))

    def activate(self, version: int) -> None:
        with self._writer():
            known = self.versions()
            if version not in known:
                raise UsageError(
                    f"The store has no version {version}, only {known}",
                    code="argument-value",
                    argument="version",
                    version=version,
                    allowed=list(known),
                )
            self._redis.set(f"{self._prefix}version", version)
        self._load_layouts()

    def _remove(self, version: int) -> None:
        """Remove all keys of a version."""
        begin = _escaped(self._begin(version))
        content = self._redis.get(f"{self._begin(version)}layouts")
        patterns = [f"{begin}{name}:*" for name in json.loads(content or "{}")]
        if version > 1:
            patterns = [f"{begin}*"]
        for pattern in patterns:
            keys = self._redis.scan_iter(pattern, count=_AT_ONCE)
            while part := list(islice(keys, _AT_ONCE)):
                self._unlink(part)
        for name in [*json.loads(content or "{}"), "layouts"]:
            self._redis.unlink(f"{self._begin(version)}{name}")

    def _unlink(self, keys: Sequence[str]) -> None:
        """Remove keys atomically, or one by one in a cluster."""
        if self._is_cluster:
            for key in keys:
                self._redis.unlink(key)
        elif keys:
            self._redis.unlink(*keys)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def _escaped(text: str) -> str:
    """Escape a string for a Redis pattern that matches it literally."""
    return "".join(f"\\{each}" if each in "*?[]\\^-" else each for each in text)


def connected_redis(url: str, options: dict[str, Any]) -> tuple[Any, bool]:
    """Connect to a Redis URL; return the client, and True if it is a cluster."""
    redis = require("redis", "serving")
    scheme, mark, address = url.partition("://")
    if not mark or scheme not in (
        "redis",
        "rediss",
        "unix",
        "redis+sentinel",
        "redis+cluster",
        "rediss+cluster",
    ):
        raise UsageError(
            "A Redis URL begins with redis://, rediss://, redis+sentinel:// or "
            f"redis+cluster://, got {url!r}",
            code="argument-value",
            argument="url",
        )
    try:
        if scheme == "redis+sentinel":
            return _by_sentinels(redis, url, address, options), False
        if scheme.endswith("+cluster"):
            account, _, hosts = address.strip("/").rpartition("@")
            if account:
                user, _, password = account.partition(":")
                options = {
                    "username": unquote(user) or None,
                    "password": unquote(password),
                } | options
            nodes = [_host_and_port(each, 6379) for each in hosts.split(",")]
            startup = [redis.cluster.ClusterNode(host, port) for host, port in nodes]
            is_secure = scheme.startswith("rediss")
            return redis.cluster.RedisCluster(startup_nodes=startup, ssl=is_secure, **options), True
        return redis.Redis.from_url(url, retry=_few_retries(), **options), False
    except (redis.RedisError, ValueError) as error:
        shown = url.rpartition("@")[2]
        raise UsageError(
            f"Redis at {shown} cannot be used: {one_line(error)}",
            code="cluster-unreachable",
            address=shown,
        ) from error


def _few_retries() -> Retry:
    """Return a retry policy with few retries and short delays."""
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    return Retry(ExponentialBackoff(cap=0.05, base=0.01), 2)


def _by_sentinels(redis: ModuleType, url: str, address: str, options: dict[str, Any]) -> Redis:
    hosts, _, path = address.partition("/")
    master, _, database = path.partition("/")
    if not master:
        raise UsageError(
            f"A sentinel URL ends with the name of the master, such as /mymaster, got {url!r}",
            code="argument-value",
            argument="url",
        )
    secret, at, hosts = hosts.rpartition("@")
    password = secret.partition(":")[2] if at else None
    sentinels = [_host_and_port(each, 26379) for each in hosts.split(",")]
    sentinel = redis.sentinel.Sentinel(sentinels, retry=_few_retries(), **options)
    return sentinel.master_for(master, db=int(database or 0), password=password)


def _host_and_port(text: str, port: int) -> tuple[str, int]:
    host, mark, number = text.rpartition(":")
    return (host, int(number)) if mark else (text, port)


def open_store(location: str, prefix: str = "", keep: int = 2) -> FeatureStore:
    """Open the EmbeddedStore in a folder or the RedisStore at a URL.

    Parameters
    ----------
    location : str
        Folder, or Redis URL.
    prefix : str, default ""
        Prefix of the keys in Redis.
    keep : int, default 2
        Number of versions to keep.

    Returns
    -------
    FeatureStore

    Examples
    --------
    >>> from bigdl.friesian.serving import open_store
    >>> open_store("features").version
    0
    """
    from bigdl.friesian.serving.store import EmbeddedStore

    if "://" in location:
        return RedisStore(location, prefix, keep)
    if prefix:
        raise UsageError(
            "A prefix applies to keys in Redis; a store in a folder has none",
            code="argument-conflict",
            argument="prefix",
        )
    return EmbeddedStore(location, keep)
