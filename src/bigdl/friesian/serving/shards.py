"""Items on several machines: each shard has the items of a range of ids, and replicas of it.

A :class:`ShardedRecall` asks all shards and merges what they find; :class:`ShardedFeatures` reads
each row from the shard that has it.  What a lost shard has is left out, never made up: candidates
are then marked as partial, and rows that cannot be read are an error or named.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import ArrayLike

from bigdl.common.errors import UsageError, one_line, require
from bigdl.common.timeouts import REPLICA_AWAY_S
from bigdl.friesian.serving.clients import (
    ClientOptions,
    RemoteFeatures,
    RemoteRecall,
    joined_features,
)
from bigdl.friesian.serving.errors import LostShardError
from bigdl.friesian.serving.index import Candidates, best_first
from bigdl.friesian.serving.rows import Features, Ids
from bigdl.nano.serving.metrics import ServingMetrics

logger = logging.getLogger(__name__)

_REFUSALS = {"INVALID_ARGUMENT", "UNAUTHENTICATED", "OUT_OF_RANGE", "FAILED_PRECONDITION"}


@dataclass(frozen=True)
class Shard:
    """One range of ids, and where its services are.

    Attributes
    ----------
    items : (int, int)
        The first and the last id of the items that it has.
    recall, features : tuple of str
        Addresses of its replicas, as ``host:port``.
    users : (int, int) or None
        The first and the last id of its users; None: it has all users.

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

    def has(self, kind: str, ids: Ids) -> np.ndarray:
        """Return True for each id of a ``"user"`` or an ``"item"`` that is of this shard."""
        numbers = np.asarray(ids, np.int64)
        span = self.users if kind == "user" else self.items
        if span is None:
            return np.ones(len(numbers), bool)
        return (numbers >= span[0]) & (numbers <= span[1])


def check_shards(shards: Sequence[Shard]) -> list[Shard]:
    """Return shards in the order of their items; raises where ranges overlap or addresses lack."""
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
            "Either all shards name their users, or none does and each has all",
            code="argument-conflict",
            argument="users",
        )
    spans = {"items": [each.items for each in ordered]}
    spans["users"] = sorted(each.users for each in with_users if each.users is not None)
    for name, named in spans.items():
        for one, two in itertools.pairwise(named):
            if two[0] <= one[1]:
                raise UsageError(
                    f"Two shards have {name} {two[0]}; ranges must not overlap",
                    code="argument-conflict",
                    argument=name,
                )
    return ordered


@dataclass
class _ShardReplica:
    """A client of one replica, and until when it is asked last."""

    client: Any
    away_until: float = 0.0


@dataclass
class _ReplicaSet:
    """The replicas of one service of a shard, of which one answers a request."""

    name: str
    each: list[_ShardReplica]
    metrics: ServingMetrics
    turn: itertools.count = field(default_factory=itertools.count)

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the clients in turn until one answers."""
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
    """The base of both stages: clients of all shards, threads to ask them, and the end of both."""

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
        self._complaint = 0.0
        self._complaining = threading.Lock()

    def _asked(self, calls: dict[int, Callable[[Any], Any]]) -> dict[int, Any]:
        """Call some shards at the same time; a lost one is missing in the result."""
        futures = {
            place: self._pool.submit(self._replicas[place].call, function)
            for place, function in calls.items()
        }
        answers = {}
        for place, future in futures.items():
            try:
                answers[place] = future.result()
            except LostShardError as error:
                self._complain(error)
        return answers

    def _complain(self, error: LostShardError) -> None:
        with self._complaining:
            if time.monotonic() < self._complaint:
                return
            self._complaint = time.monotonic() + 10
        logger.warning("%s; answers are partial", error)

    def close(self) -> None:
        """End the threads and the lines."""
        self._pool.shutdown()
        for each in self._replicas:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ShardedRecall(_Sharded):
    """Candidates from the indexes of several shards, merged.

    Parameters
    ----------
    shards : sequence of Shard
    metrics : ServingMetrics, optional
        Counts the calls for which no replica of a shard answered.
    **options
        Of :class:`RemoteRecall`.

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
    >>> places = [(f"127.0.0.1:{each.port}",) for each in servers]
    >>> shards = [Shard((0, 29), places[0], ()), Shard((30, 99), places[1], ())]
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
        super().__init__(shards, "recall", lambda place: RemoteRecall(place, **options), metrics)

    def candidates(self, user_ids: np.ndarray, k: int) -> Candidates:
        """See :class:`CandidateGenerator`; raises a LostShardError if no shard answers."""
        calls: dict[int, Callable[[Any], Any]] = {
            place: lambda client: client.candidates(user_ids, k)
            for place in range(len(self.shards))
        }
        answers = self._asked(calls)
        if not answers:
            raise LostShardError("No shard of the recall answers")
        merged = []
        for parts in zip(*(each.split() for each in answers.values()), strict=True):
            ids = np.concatenate([part[0] for part in parts])
            scores = np.concatenate([part[1] for part in parts])
            order = best_first(ids, scores, k)
            merged.append((ids[order], scores[order]))
        is_partial = len(answers) < len(calls) or any(each.partial for each in answers.values())
        return Candidates.joined(merged, is_partial)

    def add_item(self, item_id: int, vector: ArrayLike) -> None:
        """Add an item to all replicas of the shard that has its id."""
        for shard, replicas in zip(self.shards, self._replicas, strict=True):
            if shard.has("item", [item_id])[0]:
                for replica in replicas.each:
                    replica.client.add_item(item_id, vector)
                return
        raise UsageError(
            f"No shard has the item {item_id}; give its range to one", code="data-value"
        )


class ShardedFeatures(_Sharded):
    """Features from the stores of several shards.

    Parameters
    ----------
    shards : sequence of Shard
    user_table : str, default "user"
        All others are of items.
    metrics : ServingMetrics, optional
    **options
        Of :class:`RemoteFeatures`.

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
    >>> places = [(f"127.0.0.1:{each.port}",) for each in servers]
    >>> shards = [Shard((0, 9), (), places[0]), Shard((10, 99), (), places[1])]
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
        def make(place: str) -> RemoteFeatures:
            return RemoteFeatures(place, user_table=user_table, **options)

        super().__init__(shards, "features", make, metrics)
        self._user_table = user_table
        self._turn = itertools.count()
        self._names: dict[str, list[str]] = {}

    def names(self, table: str) -> list[str]:
        """Return the columns of a table."""
        if table not in self._names:
            self._names[table] = self._from_any(lambda client: list(client.names(table)))
        return self._names[table]

    def read(self, table: str, ids: Ids, columns: Sequence[str] | None = None) -> Features:
        """Return the rows of ids, in their order; raises a LostShardError if one is lost."""
        features, lost = self.read_found(table, ids, columns)
        if lost.any():
            raise LostShardError(f"{int(lost.sum())} rows of {table} are of shards that are lost")
        return features

    def read_found(
        self, table: str, ids: Ids, columns: Sequence[str] | None = None
    ) -> tuple[Features, np.ndarray]:
        """Return the rows of ids, and True for each that is of a lost shard and has no values."""
        numbers = np.asarray(ids, np.int64)
        kind = "user" if table == self._user_table else "item"
        if kind == "user" and self.shards[0].users is None:
            features = self._from_any(lambda client: client.read(table, numbers, columns))
            return features, np.zeros(len(numbers), bool)
        owner = np.full(len(numbers), -1)
        for place, shard in enumerate(self.shards):
            owner[shard.has(kind, numbers)] = place
        wanted = {place: np.flatnonzero(owner == place) for place in np.unique(owner[owner >= 0])}
        calls: dict[int, Callable[[Any], Any]] = {
            int(place): partial(_read, table=table, ids=numbers[at], columns=columns)
            for place, at in wanted.items()
        }
        answers = self._asked(calls)
        lost = np.zeros(len(numbers), bool)
        for place, at in wanted.items():
            lost[at] = int(place) not in answers
        nowhere = np.flatnonzero((owner < 0) | lost)
        parts = [answers[int(place)] for place in wanted if int(place) in answers]
        order = [at for place, at in wanted.items() if int(place) in answers]
        if len(nowhere) or not parts:  # defaults, from whoever answers
            unknown = np.full(len(nowhere), self._unowned(kind), np.int64)
            parts.append(self._from_any(lambda client: client.read(table, unknown, columns)))
            order.append(nowhere)
        features = joined_features(parts)
        back = np.argsort(np.concatenate(order), kind="stable")
        taken = features.take(back)
        found = taken.found.copy()
        found[nowhere] = False
        shown = dict(taken.columns)
        id_column = self.names(table)[0]
        if id_column in shown:
            shown[id_column] = numbers.astype(np.asarray(shown[id_column]).dtype)
        return Features(numbers, found, shown), lost

    def _unowned(self, kind: str) -> int:
        """Return an id that no shard has, whose row has the defaults."""
        spans = [each.users if kind == "user" else each.items for each in self.shards]
        first = min(span[0] for span in spans if span is not None)
        last = max(span[1] for span in spans if span is not None)
        return first - 1 if first > -(1 << 31) else last + 1

    def _from_any(self, function: Callable[[Any], Any]) -> Any:
        """Ask one shard after the other until one answers."""
        first = next(self._turn)
        for step in range(len(self.shards)):
            place = (first + step) % len(self.shards)
            answers = self._asked({place: function})
            if place in answers:
                return answers[place]
        raise LostShardError("No shard of the features answers")


def _read(client: Any, table: str, ids: np.ndarray, columns: Sequence[str] | None) -> Features:
    return client.read(table, ids, columns)
