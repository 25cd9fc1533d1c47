"""Sharded recall and features: each shard holds a range of item ids, with replicas.

A :class:`ShardedRecall` queries all shards and merges their candidates. :class:`ShardedFeatures`
reads each row from the shard that holds it. Data of a lost shard is left out and never replaced:
candidates are marked as partial, and missing rows are an error or reported.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar, Unpack

import numpy as np
from numpy.typing import ArrayLike

from bigdl.common.errors import UsageError, one_line, require
from bigdl.common.timeouts import REPLICA_AWAY_S
from bigdl.friesian.serving.clients import (
    ClientOptions,
    RemoteFeatures,
    RemoteRecall,
    concat_features,
)
from bigdl.friesian.serving.errors import LogRateLimit, LostShardError
from bigdl.friesian.serving.filters import ItemFilter
from bigdl.friesian.serving.index import Candidates, best_first
from bigdl.friesian.serving.rows import Features, Ids
from bigdl.nano.serving.metrics import ServingMetrics

T = TypeVar("T")

logger = logging.getLogger(__name__)

_REFUSALS = {"INVALID_ARGUMENT", "UNAUTHENTICATED", "OUT_OF_RANGE", "FAILED_PRECONDITION"}


@dataclass(frozen=True)
class Shard:
    """Range of ids, and the addresses of the services that hold the rows of these ids.

    Attributes
    ----------
    items : (int, int)
        First and last item id.
    recall, features : tuple of str
        Addresses of its replicas, as ``host:port``.
    users : (int, int) or None
        First and last user id; None if it holds all users.

    Examples
    --------
    >>> from bigdl.friesian.serving import Shard
    >>> Shard((0, 9), ("a:1",), ("a:2",)).has("item", [3, 12]).tolist()
    [True, False]
    """

    items: tuple[int, int]
    recall: tuple[str, ...]
    features: tuple[str, ...]
    users: tuple[int, int] | None = None

    def has(self, id_type: str, ids: Ids) -> np.ndarray:
        """Return a mask of the `ids` in this shard; `id_type` is ``"user"`` or ``"item"``."""
        numbers = np.asarray(ids, np.int64)
        span = self.users if id_type == "user" else self.items
        if span is None:
            return np.ones(len(numbers), bool)
        return (numbers >= span[0]) & (numbers <= span[1])


def check_shards(shards: Sequence[Shard]) -> list[Shard]:
    """Return shards sorted by item ids; raise a UsageError if their ranges overlap."""
    if not shards:
        raise UsageError(
            "There should be at least one shard", code="argument-missing", argument="shards"
        )
    ordered = sorted(shards, key=lambda each: each.items)
    for each in ordered:
        for name, span in (("items", each.items), ("users", each.users)):
            if span is not None and span[0] > span[1]:
                raise UsageError(
                    f"{name} should be the first and the last id, got {list(span)}",
                    code="argument-value",
                    argument=name,
                )
    with_users = [each for each in ordered if each.users is not None]
    if with_users and len(with_users) < len(ordered):
        raise UsageError(
            "Either all shards declare users, or none does and each holds all users",
            code="argument-conflict",
            argument="users",
        )
    spans = {"items": [each.items for each in ordered]}
    spans["users"] = sorted(each.users for each in with_users if each.users is not None)
    for name, named in spans.items():
        for one, two in itertools.pairwise(named):
            if two[0] <= one[1]:
                raise UsageError(
                    f"Two shards contain {name} {two[0]}; ranges must not overlap",
                    code="argument-conflict",
                    argument=name,
                )
    return ordered


@dataclass
class _ShardReplica:
    """Client of one replica; after a failure, the replica is tried last until `away_until`."""

    client: Any
    away_until: float = 0.0


@dataclass
class _ReplicaSet:
    """Replicas of one service of a shard; any replica can answer a request."""

    name: str
    each: list[_ShardReplica]
    metrics: ServingMetrics
    turn: itertools.count = field(default_factory=itertools.count)

    def call(self, function: Callable[[Any], T]) -> T:
        """Call a function with each replica's client in rotation until a replica answers."""
        rpc_error = require("grpc", "serving").RpcError
        first, now = next(self.turn), time.monotonic()
        order = [self.each[(first + i) % len(self.each)] for i in range(len(self.each))]
        order.sort(key=lambda replica: replica.away_until > now)
        reasons = []
        for replica in order:
            try:
                answer = function(replica.client)
            except rpc_error as error:
                if error.code().name in _REFUSALS:
                    raise
                replica.away_until = time.monotonic() + REPLICA_AWAY_S
                reasons.append(one_line(error))
            else:
                replica.away_until = 0.0
                return answer
        self.metrics.lost(self.name)
        raise LostShardError(f"{self.name} does not answer: {reasons[-1]}")

    def close(self) -> None:
        for replica in self.each:
            replica.client.close()


class _Sharded:
    """Base class of the sharded stages, with the clients of all shards and worker threads."""

    def __init__(
        self,
        shards: Sequence[Shard],
        service: str,
        make: Callable[[str], Any],
        metrics: ServingMetrics | None,
    ):
        self.shards = check_shards(shards)
        metrics = metrics or ServingMetrics()
        self._replicas = []
        for each in self.shards:
            addresses = getattr(each, service)
            if not addresses:
                raise UsageError(
                    f"The shard of the items {list(each.items)} has no {service}",
                    code="argument-missing",
                    argument=service,
                )
            name = f"{service} of {each.items[0]}-{each.items[1]}"
            clients = [_ShardReplica(make(address)) for address in addresses]
            self._replicas.append(_ReplicaSet(name, clients, metrics))
        self._pool = ThreadPoolExecutor(8 * len(self.shards), "shards")
        self._log_limit = LogRateLimit()

    def _call_shards(self, calls: dict[int, Callable[[Any], Any]]) -> dict[int, Any]:
        """Call the shards in `calls` concurrently; lost shards are missing from the result."""
        futures = {
            index: self._pool.submit(self._replicas[index].call, function)
            for index, function in calls.items()
        }
        answers = {}
        for index, future in futures.items():
            try:
                answers[index] = future.result()
            except LostShardError as error:
                if self._log_limit.allows():
                    logger.warning("%s; answers are partial", error)
        return answers

    def close(self) -> None:
        """Stop the threads and close the connections."""
        self._pool.shutdown()
        for each in self._replicas:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ShardedRecall(_Sharded):
    """Candidate generator that merges the candidates from the indexes of several shards.

    Parameters
    ----------
    shards : sequence of Shard
    metrics : ServingMetrics, optional
        Counts the calls that no replica of a shard answered.
    **options
        Keywords of :class:`RemoteRecall`.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore, GrpcServer, IndexRecall, ItemIndex
    >>> from bigdl.friesian.serving import RecallService, Shard, ShardedRecall
    >>> store = EmbeddedStore("features")
    >>> _ = store.replace({"user": pd.DataFrame({"user": [3], "prediction": [[1.0, 2.0]]})})
    >>> first, second = ItemIndex([10, 20], np.eye(2)), ItemIndex([30], np.ones((1, 2)))
    >>> stages = [IndexRecall(store, each) for each in (first, second)]
    >>> servers = [GrpcServer([RecallService(each)]) for each in stages]
    >>> addresses = [(f"127.0.0.1:{each.port}",) for each in servers]
    >>> shards = [Shard((0, 29), addresses[0], ()), Shard((30, 99), addresses[1], ())]
    >>> with servers[0], servers[1], ShardedRecall(shards) as recall:
    ...     recall.candidates(np.array([3]), 2).ids.tolist()
    [30, 20]
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        metrics: ServingMetrics | None = None,
        **options: Unpack[ClientOptions],
    ):
        super().__init__(
            shards, "recall", lambda address: RemoteRecall(address, **options), metrics
        )

    def check_filter(self, item_filter: ItemFilter) -> None:
        """Do nothing: the shards check the filter in each search."""

    def accepts(self, items: np.ndarray, item_filter: ItemFilter) -> np.ndarray:
        """Return a mask as :meth:`RemoteRecall.accepts` does."""
        mask: np.ndarray = self._replicas[0].each[0].client.accepts(items, item_filter)
        return mask

    def candidates(
        self, user_ids: np.ndarray, k: int, item_filter: ItemFilter | None = None
    ) -> Candidates:
        """Return up to `k` items per user; raise a LostShardError if no shard answers."""
        calls: dict[int, Callable[[Any], Any]] = {
            index: lambda client: client.candidates(user_ids, k, item_filter)
            for index in range(len(self.shards))
        }
        answers = self._call_shards(calls)
        if not answers:
            raise LostShardError("No recall shard answers")
        merged = []
        for parts in zip(*(each.split() for each in answers.values()), strict=True):
            ids = np.concatenate([part[0] for part in parts])
            scores = np.concatenate([part[1] for part in parts])
            order = best_first(ids, scores, k)
            merged.append((ids[order], scores[order]))
        is_partial = len(answers) < len(calls) or any(each.partial for each in answers.values())
        return Candidates.joined(merged, is_partial)

    def add_item(self, item_id: int, vector: ArrayLike) -> None:
        """Add an item to all replicas of its shard."""
        for shard, replicas in zip(self.shards, self._replicas, strict=True):
            if shard.has("item", [item_id])[0]:
                for replica in replicas.each:
                    replica.client.add_item(item_id, vector)
                return
        raise UsageError(
            f"No shard has a range with the item {item_id}; extend the range of a shard",
            code="data-value",
        )


class ShardedFeatures(_Sharded):
    """Feature source that reads from the stores of several shards.

    Parameters
    ----------
    shards : sequence of Shard
    user_table : str, default "user"
        Name of the user table; all other names mean item tables.
    metrics : ServingMetrics, optional
    **options
        Keywords of :class:`RemoteFeatures`.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore, FeatureService, GrpcServer
    >>> from bigdl.friesian.serving import Shard, ShardedFeatures
    >>> stores = [EmbeddedStore("first"), EmbeddedStore("second")]
    >>> for store, number in zip(stores, (1, 50)):
    ...     _ = store.replace({"item": pd.DataFrame({"item": [number], "price": [2 * number]})})
    >>> servers = [GrpcServer([FeatureService(each)]) for each in stores]
    >>> addresses = [(f"127.0.0.1:{each.port}",) for each in servers]
    >>> shards = [Shard((0, 9), (), addresses[0]), Shard((10, 99), (), addresses[1])]
    >>> with servers[0], servers[1], ShardedFeatures(shards) as features:
    ...     features.read("item", [50, 1, 7])["price"].tolist()
    [100, 2, 0]
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        user_table: str = "user",
        metrics: ServingMetrics | None = None,
        **options: Unpack[ClientOptions],
    ):
        def make(address: str) -> RemoteFeatures:
            return RemoteFeatures(address, user_table=user_table, **options)

        super().__init__(shards, "features", make, metrics)
        self._user_table = user_table
        self._turn = itertools.count()
        self._names: dict[str, list[str]] = {}

    def names(self, table: str) -> list[str]:
        """Return the column names of a table."""
        if table not in self._names:
            self._names[table] = self._from_any(lambda client: list(client.names(table)))
        return self._names[table]

    def read(self, table: str, ids: Ids, columns: Sequence[str] | None = None) -> Features:
        """Return the rows of `ids`, in order; raise a LostShardError if a shard is lost."""
        features, lost = self.read_found(table, ids, columns)
        if lost.any():
            raise LostShardError(f"{int(lost.sum())} rows of {table} are on lost shards")
        return features

    def read_found(
        self, table: str, ids: Ids, columns: Sequence[str] | None = None
    ) -> tuple[Features, np.ndarray]:
        """Return the rows of `ids`, and a mask of ids on lost shards, whose rows have defaults."""
        numbers = np.asarray(ids, np.int64)
        id_type = "user" if table == self._user_table else "item"
        if id_type == "user" and self.shards[0].users is None:
            features = self._from_any(lambda client: client.read(table, numbers, columns))
            return features, np.zeros(len(numbers), bool)
        owner = np.full(len(numbers), -1)
        for shard_index, shard in enumerate(self.shards):
            owner[shard.has(id_type, numbers)] = shard_index
        wanted = {
            shard_index: np.flatnonzero(owner == shard_index)
            for shard_index in np.unique(owner[owner >= 0])
        }
        calls: dict[int, Callable[[Any], Any]] = {
            int(shard_index): partial(_read, table=table, ids=numbers[at], columns=columns)
            for shard_index, at in wanted.items()
        }
        answers = self._call_shards(calls)
        lost = np.zeros(len(numbers), bool)
        for shard_index, at in wanted.items():
            lost[at] = int(shard_index) not in answers
        missing = np.flatnonzero((owner < 0) | lost)
        parts = [answers[int(shard_index)] for shard_index in wanted if int(shard_index) in answers]
        order = [at for shard_index, at in wanted.items() if int(shard_index) in answers]
        if len(missing) or not parts:  # default rows, from any shard
            unknown = np.full(len(missing), self._unassigned_id(id_type), np.int64)
            parts.append(self._from_any(lambda client: client.read(table, unknown, columns)))
            order.append(missing)
        features = concat_features(parts)
        inverse = np.argsort(np.concatenate(order), kind="stable")
        taken = features.take(inverse)
        is_known = taken.found.copy()
        is_known[missing] = False
        shown = dict(taken.columns)
        id_column = self.names(table)[0]
        if id_column in shown:
            shown[id_column] = numbers.astype(np.asarray(shown[id_column]).dtype)
        return Features(numbers, is_known, shown), lost

    def _unassigned_id(self, id_type: str) -> int:
        """Return an id outside of all shards, whose row has the defaults."""
        spans = [each.users if id_type == "user" else each.items for each in self.shards]
        first = min(span[0] for span in spans if span is not None)
        last = max(span[1] for span in spans if span is not None)
        return first - 1 if first > -(1 << 31) else last + 1

    def _from_any(self, function: Callable[[Any], T]) -> T:
        """Call one shard after another until one answers."""
        first = next(self._turn)
        for step in range(len(self.shards)):
            index = (first + step) % len(self.shards)
            answers = self._call_shards({index: function})
            if index in answers:
                return answers[index]
        raise LostShardError("No features shard answers")


def _read(client: Any, table: str, ids: np.ndarray, columns: Sequence[str] | None) -> Features:
    return client.read(table, ids, columns)
