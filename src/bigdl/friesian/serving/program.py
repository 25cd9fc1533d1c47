"""Program ``bigdl-friesian-serve``, which serves recommendations as configured in a YAML file.

    bigdl-friesian-serve init --config serving.yaml     # load the store, build the index
    bigdl-friesian-serve serve --config serving.yaml
    bigdl-friesian-serve serve --config serving.yaml --shard 0    # one shard of the items
    bigdl-friesian-serve client --address 127.0.0.1:8980 --users 1,2,3

``serve`` starts the services that have a port in the section ``server``. SIGTERM stops it after the
running requests. A new version of the store is used at once, a new index and a new model within two
seconds. If one of them cannot be read, the old one stays in use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_integer
from bigdl.common.cpu import core_count
from bigdl.common.errors import BigDLError, UsageError, one_line, require
from bigdl.common.memory import freeze_modules
from bigdl.common.timeouts import DELTA_LOOK_S, RECOMMENDER_CLOSE_S, RECOMMENDER_END_S, SILENCE_S
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.serving.attributes import StoreAttributes
from bigdl.friesian.serving.clients import (
    RecommenderClient,
    RemoteFeatures,
    RemoteRanker,
    RemoteRecall,
)
from bigdl.friesian.serving.config import SERVICES, Config, read_config
from bigdl.friesian.serving.deltas import DeltaFollower, ModelVersion, apply_tables, delay_of
from bigdl.friesian.serving.drift import MEASURES, DriftMonitor, FeatureProfile
from bigdl.friesian.serving.events import DEFAULT_EVENTS, EventStore, open_events
from bigdl.friesian.serving.http import HttpServer
from bigdl.friesian.serving.index import ItemIndex
from bigdl.friesian.serving.rankers import IndexRecall, ServedRanker
from bigdl.friesian.serving.recommender import Recommender
from bigdl.friesian.serving.redis_store import open_store
from bigdl.friesian.serving.rows import ids_of, table_of
from bigdl.friesian.serving.sequences import MODEL_FILE, SequenceRecall, newest_model
from bigdl.friesian.serving.services import (
    FeatureService,
    Limits,
    RankingService,
    RecallService,
    RecommenderService,
    Service,
)
from bigdl.friesian.serving.shards import Shard, ShardedFeatures, ShardedRecall
from bigdl.friesian.serving.stages import DEFAULT_STAGES, Stage, function_of, load_stage
from bigdl.nano.serving.access import Security, Tokens, changes_allowed, read_token
from bigdl.nano.serving.batching import BatchingOptions
from bigdl.nano.serving.grpc_server import GrpcServer, GrpcService
from bigdl.nano.serving.grpc_service import InferenceHandlers
from bigdl.nano.serving.metrics import ServingMetrics
from bigdl.nano.serving.process_exit import exit_within, print_line
from bigdl.nano.serving.repository import ModelRepository
from bigdl.nano.serving.service import InferenceService
from bigdl.nano.serving.workers import PeerWorkers, ServerWorker, Workers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from bigdl.friesian.models.sequences import SavedSequenceModel
    from bigdl.friesian.serving.rankers import Ranker
    from bigdl.friesian.serving.stages import FeatureReader
    from bigdl.friesian.serving.store import FeatureStore

logger = logging.getLogger("bigdl.friesian.serving")

_SWITCH = 0.0005  # thread switch interval in seconds
_WAITING_THREADS = 8  # threads of a recommender whose stages wait for other services
_POLL_INTERVAL = 2.0  # seconds between checks for new index and model files
_BATCHING = ("max_batch_size", "max_delay_ms", "instances")

PartT = TypeVar("PartT")


class Serving:
    """Context manager that runs all services of one configuration, and stops them on exit.

    Parameters
    ----------
    config : Config
    shard, replica : int, optional
        Serve this shard of the items instead of the section ``server``.
    worker : ServerWorker, optional
        Set if this process is one of several workers that share the ports.
    listens : bool, default True
        False opens no ports; see :attr:`recommender`.

    Attributes
    ----------
    ports : dict of str to int
        Port by service name, and of ``http``.

    Raises
    ------
    UsageError
        If something cannot be read or started. Everything is stopped then.
    """

    def __init__(
        self,
        config: Config,
        shard: int | None = None,
        replica: int = 0,
        worker: ServerWorker | None = None,
        listens: bool = True,
    ):
        self._is_shard = shard is not None
        config = config if shard is None else config.of_shard(shard, replica)
        if worker is not None:
            config = replace(config, values={**config.values, **worker.ports})
        self.config, self._worker = config, worker
        prometheus = require("prometheus_client", "serving")
        self.metrics = ServingMetrics(prometheus.CollectorRegistry())
        self.ports: dict[str, int] = {}
        self._closing: list[Callable[[], Any]] = []
        self._servers: list[Callable[[], Any]] = []  # stopped before the resources in _closing
        self._peers: PeerWorkers | None = None
        self._added: dict[int, list[float]] = {}  # vectors of items that clients added to the index
        self._watcher: threading.Thread | None = None
        self._following: threading.Thread | None = None
        self._ended = threading.Event()
        self._parts: dict[str, Any] = {}
        self._follower: DeltaFollower | None = None
        self._newest_event: float | None = None
        try:
            if listens:
                self._start()
            self._begin_watching()
        except BaseException:
            self.stop()
            raise

    @property
    def recommender(self) -> Recommender:
        """Recommender that the configuration defines, even if no port serves it."""
        recommender = self._recommender
        self._begin_watching()
        return recommender

    def _start(self) -> None:
        config = self.config
        server = config.section("server")
        wanted = [name for name in SERVICES if f"{name}_port" in server]
        if not wanted:
            listed = ", ".join(f"{name}_port" for name in SERVICES)
            raise UsageError(
                f"{config.path}: the section server should have a port: {listed}",
                code="argument-missing",
                path=str(config.path),
            )
        security = _security(config)
        limits = limits_of(config)
        threads = server.get("threads", 16)
        shares_port = self._worker is not None
        self._join_peers()
        for name in wanted:
            services: list[GrpcService] = [getattr(self, f"_{name}_service")(limits)]
            if name == "ranking":
                services.append(InferenceHandlers(self._models))
            started = config.checked(
                f"server.{name}_port",
                _start_server,
                services,
                server[f"{name}_port"],
                security,
                limits,
                threads,
                shares_port,
            )
            self.ports[name] = started.port
            self._servers.append(partial(started.stop, server.get("grace_s", RECOMMENDER_END_S)))
        if "http_port" in server:
            recommender = self._recommender if "recommender" in wanted else None
            web = config.checked(
                "server.http_port",
                lambda: HttpServer(
                    recommender,
                    server["http_port"],
                    security,
                    limits,
                    self.metrics,
                    threads,
                    self._models,
                    shares_port,
                ),
            )
            self.ports["http"] = web.port
            self._servers.append(partial(web.stop, server.get("grace_s", RECOMMENDER_END_S)))

    def _begin_watching(self) -> None:
        """Start the thread that watches files for replacement, if there are files to watch."""
        if self._follower is not None and self._following is None:
            self._following = threading.Thread(target=self._follow, name="follow", daemon=True)
            self._following.start()
        if self._watcher is None and self._watched():
            self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._watcher.start()

    def _join_peers(self) -> None:
        """Connect to the other workers of this server, and accept their calls."""
        if self._worker is None:
            return
        functions = {"add": self._add_from_peer, "added": lambda _: self._all_added()}
        peers = PeerWorkers(self._worker, self._models, functions)
        self._closing.append(peers.close)
        self._peers = peers

    def _add_from_peer(self, content: bytes) -> bytes:
        self._add({int(item): vector for item, vector in json.loads(content).items()})
        return b""

    def _all_added(self) -> bytes:
        return json.dumps(dict(self._added)).encode()  # copy, because other threads may add items

    def _add(self, items: dict[int, list[float]]) -> None:
        if items:
            self._index.add_items(list(items), list(items.values()))
            self._added.update(items)

    def _copy_items_of_peers(self, peers: PeerWorkers) -> None:
        """Add the items that other workers received before this worker started."""
        for items in peers.ask("added").values():
            self._add_from_peer(items)
            break

    # -- services ---------------------------------------------------------------------------------

    def _feature_service(self, limits: Limits) -> Service:
        features = self._features if self._is_routed else self._store
        columns = self.config.get("features.user_columns"), self.config.get("features.item_columns")
        return FeatureService(features, *self._tables, *columns, self.metrics, limits)

    def _recall_service(self, limits: Limits) -> Service:
        if self._is_routed:
            return RecallService(self._recall, self._recall, self.metrics, limits)
        if self._has_sequences:
            return RecallService(self._sequences, None, self.metrics, limits)
        index: Any = self._index
        if self._peers is not None:
            self._copy_items_of_peers(self._peers)
            index = _SharedIndex(self._add, self._peers)
        return RecallService(self._local_recall, index, self.metrics, limits)

    def _ranking_service(self, limits: Limits) -> Service:
        return RankingService(self._local_ranker, self.metrics, limits)

    def _recommender_service(self, limits: Limits) -> Service:
        return RecommenderService(self._recommender, self.metrics, limits)

    # -- parts, each created once -----------------------------------------------------------------

    def _once(self, name: str, make: Callable[[], PartT]) -> PartT:
        if name not in self._parts:
            self._parts[name] = part = make()
            if hasattr(part, "close"):
                self._closing.append(part.close)
        return self._parts[name]

    @property
    def _tables(self) -> tuple[str, str]:
        get = self.config.get
        return get("features.user_table", "user"), get("features.item_table", "item")

    @property
    def _is_routed(self) -> bool:
        """True if remote shards hold the items."""
        return bool(self.config.shards) and not self._is_shard

    @property
    def _client_options(self) -> dict[str, Any]:
        """Keyword arguments for the clients of other services."""
        config = self.config
        return {
            "timeout": config.get("recommender.deadline_ms", 10_000.0) / 1000,
            "token": _token(config),
            "admin_token": _token(config, "admin_token"),
            "authority": config.get("server.authority"),
        }

    def _remote(self, section: str, client: Callable[..., PartT], **options: Any) -> PartT:
        url = self.config.get(f"{section}.url")
        return self._once(
            f"{section} at {url}", lambda: client(url, **self._client_options, **options)
        )

    @property
    def _sharded_features(self) -> ShardedFeatures:
        return self._once(
            "features of shards",
            lambda: ShardedFeatures(
                self.config.shards, self._tables[0], self.metrics, **self._client_options
            ),
        )

    @property
    def _store(self) -> FeatureStore:
        config = self.config
        location = config.needed("store.location", "the feature service")
        prefix, keep = config.get("store.prefix", ""), config.get("store.keep", 2)

        def make() -> FeatureStore:
            store = config.checked("store.location", open_store, location, prefix, keep)
            for table in self._tables:
                if table not in store.tables():
                    raise config.error(
                        "store.location",
                        f"the store at {location} has no table {table!r}; load it by: "
                        f"bigdl-friesian-serve init --config {config.path}",
                    )
            self.metrics.watch("store_version", lambda: store.version)
            if "://" not in location:  # counting rows in Redis is slow
                for table in self._tables:
                    self.metrics.watch(f"rows_{table}", partial(store.size, table))
            return store

        return self._once("store", make)

    @property
    def _features(self) -> FeatureReader:
        if self._is_routed:
            return self._sharded_features
        if "features.url" in self.config.values:
            return self._remote("features", RemoteFeatures, user_table=self._tables[0])
        return self._store

    @property
    def _index(self) -> ItemIndex:
        config = self.config
        path = config.needed("recall.index", "the recall service")
        options = config.get("recall.threads", 1), config.get("recall.rebuild_after", 4096)

        def make() -> ItemIndex:
            index = config.checked("recall.index", ItemIndex.load, path, *options)
            self.metrics.watch("index_items", lambda: len(index))
            if attributes := self._attributes_of(lambda: index.ids):
                index.attributes = attributes
            return index

        return self._once("index", make)

    @property
    def _has_sequences(self) -> bool:
        return bool({"history.model", "history.deltas"} & self.config.values.keys())

    @property
    def _events(self) -> EventStore | None:
        config = self.config
        if "history.events" not in config.values:
            return None
        options = (
            config.get("history.events"),
            config.get("history.prefix", ""),
            config.get("history.most", DEFAULT_EVENTS),
        )

        def make() -> EventStore:
            events = config.checked("history.events", open_events, *options)
            if "://" not in options[0]:
                self.metrics.watch("users_with_events", events.size)
            return events

        return self._once("events", make)

    @property
    def _sequences(self) -> SequenceRecall:
        config = self.config
        config.needed("history.events", "a sequence model")
        events = self._events
        assert events is not None
        if config.shards:
            raise config.error("history.events", "a sequence model cannot have shards of items")

        def make() -> SequenceRecall:
            model, version = self._first_model()
            recall = config.checked(
                "history",
                lambda: SequenceRecall(
                    events,
                    model,
                    index_type=config.get("history.kind", "flat"),
                    filter_seen=config.get("history.seen", True),
                    cache_bytes=config.get("history.cache_mb", 256) << 20,
                    threads=config.get("recall.threads", 1),
                    version=version,
                ),
            )
            if attributes := self._attributes_of(lambda: recall.index.ids):
                recall.attributes = attributes
            self.metrics.watch("model_version", lambda: recall.version)
            for name in ("users", "bytes", "same", "extended", "whole"):
                self.metrics.watch(f"history_cache_{name}", partial(_cached, recall, name))
            return recall

        return self._once("sequences", make)

    def _first_model(self) -> tuple[str | SavedSequenceModel, int]:
        """Return the model to start with and its version; start to follow deltas."""
        config = self.config
        if "history.deltas" not in config.values:
            path = config.get("history.model")
            return config.checked("history.model", newest_model, path)
        if "history.model" in config.values:
            raise config.error("history.deltas", "pass either model or deltas")
        path = config.get("history.deltas")
        self._follower = config.checked("history.deltas", DeltaFollower, path)
        newest = config.checked("history.deltas", self._follower.poll)
        if newest is None:
            raise config.error(
                "history.deltas",
                f"{path} has no version yet; start bigdl-friesian-train run first",
            )
        config.checked("history.deltas", self._apply_tables, newest)
        self._follower.acknowledge(newest)
        self._newest_event = newest.newest_event
        self.metrics.watch("model_age_seconds", self._model_age)
        return newest.model, newest.number

    def _apply_tables(self, version: ModelVersion) -> None:
        """Write the rows of a version to the store, if this process has one."""
        if "store.location" in self.config.values:
            apply_tables(self._store, version)
        elif version.tables:
            logger.warning(
                "Version %s changes the tables %s, but this server has no store",
                version.number,
                sorted(version.tables),
            )

    def _model_age(self) -> float:
        """Return the seconds since the newest event that the model was trained on."""
        return float("nan") if self._newest_event is None else time.time() - self._newest_event

    @property
    def _drift(self) -> DriftMonitor | None:
        config = self.config
        if "drift.profile" not in config.values:
            return None
        profile = config.checked("drift.profile", FeatureProfile.load, config.get("drift.profile"))
        limits = config.section("drift")
        return config.checked(
            "drift.profile",
            lambda: DriftMonitor(
                profile,
                limits.get("window", 1000),
                limits.get("every", 10),
                {name: limits[name] for name in MEASURES if name in limits},
                self.metrics,
            ),
        )

    def _attributes_of(self, ids: Callable[[], np.ndarray]) -> StoreAttributes | None:
        config, columns = self.config, self.config.get("recall.attributes")
        if columns is None:
            return None
        return config.checked(
            "recall.attributes", StoreAttributes, self._store, self._tables[1], columns, ids
        )

    @property
    def _local_recall(self) -> IndexRecall | SequenceRecall:
        config = self.config
        if self._has_sequences:
            return self._sequences
        vector, seen = config.get("recall.user_vector", "prediction"), config.get("recall.seen")
        features, table = self._features, self._tables[0]
        names = features.names(table)
        if self._is_shard and self.config.shards[0].users is not None:
            features = self._sharded_features  # the user may be on another shard
        for key, name in (("recall.user_vector", vector), ("recall.seen", seen)):
            if name is not None and name not in names:
                raise config.error(
                    key if key in config.lines else "recall.index",
                    f"the table {table} has no column {name!r}, only {names}",
                )
        return self._once("recall", lambda: IndexRecall(features, self._index, vector, seen, table))

    @property
    def _recall(self) -> Any:
        if self._is_routed:
            return self._once(
                "recall of shards",
                lambda: ShardedRecall(self.config.shards, self.metrics, **self._client_options),
            )
        if "recall.url" in self.config.values:
            return self._remote("recall", RemoteRecall)
        return self._local_recall

    @property
    def _models(self) -> InferenceService:
        """Ranking models, which are also served over the Open Inference Protocol."""
        config = self.config

        def make() -> InferenceService:
            repository = ModelRepository()
            if "ranking.model" in config.values:
                path = config.get("ranking.model")
                if not Path(path).exists():
                    raise config.error("ranking.model", f"the model {path} does not exist")
                options = {name: config.get(f"ranking.{name}") for name in _BATCHING}
                batching = {name: each for name, each in options.items() if each is not None}
                repository = config.checked(
                    "ranking",
                    lambda: ModelRepository(
                        path,
                        name=config.get("ranking.name", "ranker"),
                        batching=BatchingOptions(**batching),
                        thread_num=config.get("ranking.threads"),
                        input_names=config.get("ranking.inputs"),
                        inputs=config.get("ranking.tensors"),
                        trust=config.get("ranking.trust", False),
                    ),
                )
                self._closing.append(repository.close)
                config.checked("ranking.model", repository.load_all)
                repository.watch(_POLL_INTERVAL)
            return InferenceService(
                repository,
                limits_of(config),
                tokens=_tokens(config),
                changes=False,
                metrics=self.metrics,
                needs_models=False,
            )

        return self._once("models", make)

    @property
    def _local_ranker(self) -> ServedRanker:
        config = self.config
        config.needed("ranking.model", "the ranking service")

        def make() -> ServedRanker:
            repository = self._models.repository
            name = config.get("ranking.name", "ranker")
            ranker = config.checked("ranking.name", ServedRanker, repository, name)
            shares, shadow = config.get("ranking.shares"), config.get("ranking.shadow")
            shadow = None if shadow is None else str(shadow)
            if shares is not None or shadow is not None:
                key = "ranking.shares" if shares is not None else "ranking.shadow"
                config.checked(key, repository.set_traffic, name, shares, shadow)
            return ranker

        return self._once("ranker", make)

    @property
    def _ranker(self) -> Ranker:
        if "ranking.url" in self.config.values:
            return self._remote("ranking", RemoteRanker)
        return self._local_ranker

    @property
    def _computing_threads(self) -> int:
        """Number of requests to process at once: one per core, or more if requests mostly wait."""
        keys = self.config.values
        waits = ("features.url", "recall.url", "ranking.url", "ranking.max_batch_size")
        calls = ("recommender.prepare", "recommender.rerank")
        if (
            self._is_routed
            or "://" in self.config.get("store.location", "")
            or any(key in keys for key in (*waits, *calls))
            or self.config.stages is not None
        ):
            return _WAITING_THREADS
        cores = core_count() // self.config.get("server.workers", 1)
        return min(max(cores, 1), _WAITING_THREADS)

    @property
    def _recommender(self) -> Recommender:
        config = self.config

        def make() -> Recommender:
            functions: dict[str, Any] = {}
            for name in ("prepare", "rerank"):
                if f"recommender.{name}" in config.values:
                    key = f"recommender.{name}"
                    functions[name] = config.checked(key, function_of, config.get(key))
            pipeline = None
            if "features.pipeline" in config.values:
                path = config.get("features.pipeline")
                pipeline = config.checked("features.pipeline", FeaturePipeline.load, path)
            deadline = config.get("recommender.deadline_ms")
            names: Sequence[str | Stage] = DEFAULT_STAGES
            if config.stages is not None:
                names = [config.checked("stages", _stage, *each) for each in config.stages]
            has_store = self._is_routed or config.values.keys() & {"store.location", "features.url"}
            recommender = config.checked(
                "recommender",
                lambda: Recommender(
                    self._features if has_store or "features" in names else None,
                    self._recall if "recall" in names else None,
                    self._ranker if "ranking" in names else None,
                    config.get("ranking.inputs"),
                    pipeline=pipeline,
                    user_table=self._tables[0],
                    item_table=self._tables[1],
                    candidates=config.get("recommender.candidates", 500),
                    output=config.get("ranking.output"),
                    popular=config.get("recommender.popular", ()),
                    deadline=None if deadline is None else deadline / 1000,
                    threads=config.get("recommender.threads", self._computing_threads),
                    metrics=self.metrics,
                    split=config.get("ranking.split", True),
                    item_memory=config.get("ranking.item_memory_mb", 1024) << 20,
                    user_memory=config.get("ranking.user_memory_mb", 64) << 20,
                    stages=names,
                    events=self._events,
                    drift=self._drift,
                    **functions,
                ),
            )
            if "features.url" not in config.values and not self._is_routed:
                config.checked("ranking.inputs", recommender.check)
                recommender.warm_up()
            return recommender

        return self._once("recommender", make)

    # -- replacement while serving ----------------------------------------------------------------

    def _watched(self) -> dict[str, str]:
        """Return the files to watch for a new index."""
        watched = {}
        if "index" in self._parts:
            watched["index"] = os.path.join(self.config.get("recall.index"), "index.json")
        if "sequences" in self._parts and self._follower is None:
            with contextlib.suppress(UsageError):  # while the folder is replaced
                folder, _ = newest_model(self.config.get("history.model"))
                watched["model"] = os.path.join(folder, MODEL_FILE)
        return watched

    def _follow(self) -> None:
        """Apply new versions of a model, and of rows of the store, as they are published."""
        assert self._follower is not None
        recall, shown, wait = self._parts["sequences"], "", DELTA_LOOK_S
        while not self._ended.wait(wait):
            try:
                version = self._follower.poll()
                if version is None:
                    wait = DELTA_LOOK_S
                    continue
                self._apply_tables(version)
                recall.swap(version.model, version.number)
                self._follower.acknowledge(version)
            except Exception as error:
                wait = _POLL_INTERVAL  # the next poll returns the version again
                if shown != (shown := one_line(error)):
                    logger.error("A new version cannot be used; the old one stays: %s", shown)
            else:
                self._newest_event, shown, wait = version.newest_event, "", DELTA_LOOK_S
                if (delay := delay_of(version)) is not None:
                    self.metrics.freshness("weights", delay)

    def _watch(self) -> None:
        stamps = {name: _stamp(path) for name, path in self._watched().items()}
        while not self._ended.wait(_POLL_INTERVAL):
            for name, path in self._watched().items():
                stamp = _stamp(path)
                if stamp is None or stamp == stamps.get(name):
                    continue
                if stamp != _stamp(path):
                    continue  # still being written
                stamps[name] = stamp
                try:
                    self._reload(name)
                except Exception as error:
                    logger.error(
                        "The new %s cannot be used; the old one stays in use: %s",
                        name,
                        one_line(error),
                    )
                else:
                    logger.warning("The new %s is now in use", name)

    def _reload(self, name: str) -> None:
        if name == "model":
            recall = self._parts["sequences"]
            folder, version = newest_model(self.config.get("history.model"))
            recall.swap(folder, version if version > recall.version else None)
            return
        self._parts[name].swap(ItemIndex.load(self.config.get("recall.index")))
        self._added.clear()

    def stop(self) -> None:
        """Finish running requests, and stop all servers and clients."""
        self._ended.set()
        # Stop all at once, so that no server accepts requests while another finishes.
        ending = [threading.Thread(target=each) for each in self._servers]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()
        self._servers.clear()
        while self._closing:
            self._closing.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class _SharedIndex:
    """Item index whose additions reach all workers of a server."""

    def __init__(self, add: Callable[[dict[int, list[float]]], None], peers: PeerWorkers):
        self._add, self._peers = add, peers

    def add_item(self, item_id: int, vector: ArrayLike) -> None:
        items = {int(item_id): np.asarray(vector, np.float32).tolist()}
        self._add(items)
        self._peers.ask("add", json.dumps(items).encode())


def _cached(recall: SequenceRecall, name: str) -> int:
    return recall.cache_info()[name]


def _start_server(
    services: list[GrpcService],
    port: int,
    security: Security,
    limits: Limits,
    threads: int,
    shares_port: bool,
) -> GrpcServer:
    return GrpcServer(services, port, security, limits, threads, shares_port)


def _stage(name: str, options: dict[str, object]) -> str | Stage:
    """Load a custom stage with its options, or return the name of a built-in stage."""
    if name not in DEFAULT_STAGES:
        return load_stage(name, options)
    if options:
        raise UsageError(
            f"The stage {name} is configured in its section, not by options; got {options!r}",
            code="argument-conflict",
            argument=name,
        )
    return name


def _stamp(path: str) -> tuple | None:
    """Return a value that changes with the files at a path, or None if they cannot be read."""
    try:
        names = [path, *(str(each) for each in sorted(Path(path).rglob("*")))]
        return tuple((name, os.stat(name).st_mtime_ns, os.stat(name).st_ino) for name in names)
    except OSError:
        return None


def limits_of(config: Config) -> Limits:
    """Return the request limits of a configuration."""
    server = config.section("server")
    names = ("max_ids", "max_k", "max_pairs", "max_bytes", "max_requests")
    limits = {name: server[name] for name in names if name in server}
    return config.checked("server", lambda: Limits(**limits))


def _token(config: Config, name: str = "token") -> str | None:
    key = f"server.{name}_file"
    if key not in config.values:
        return None
    return config.checked(key, read_token, config.get(key))


def _tokens(config: Config) -> Tokens:
    names = ("token", "admin_token", "metrics_token")
    tokens = [_token(config, name) for name in names]
    return config.checked("server.admin_token_file", Tokens, *tokens)


def _security(config: Config) -> Security:
    keys = ("host", "expose", "certificate", "key", "changes")
    options = {
        name: config.get(f"server.{name}") for name in keys if f"server.{name}" in config.values
    }
    tokens = _tokens(config)
    config.checked("server.changes", changes_allowed, options.get("changes"), tokens)
    key_of_errors = "server.host" if "server.host" in config.lines else "server.certificate"
    return config.checked(
        key_of_errors,
        lambda: Security(
            **options,
            token=tokens.infer,
            admin_token=tokens.admin,
            metrics_token=tokens.metrics,
        ),
    )


# -- near-line loading -----------------------------------------------------------------------------


def initialise(config: Config, number: int | None = None) -> dict[str, Any]:
    """Load the store and build the index as configured in ``init``, ``store`` and ``recall``.

    Parameters
    ----------
    config : Config
    number : int, optional
        Shard to load; only its items are loaded.

    Returns
    -------
    dict
        Written rows by table, version of the store, number of items in the index.
    """
    written: dict[str, Any] = {}
    shard = None
    if number is not None:
        config = config.of_shard(number)
        shard = config.shards[number]
    tables, id_cols = {}, {}
    names = (
        ("users", "user_id", config.get("features.user_table", "user")),
        ("items", "item_id", config.get("features.item_table", "item")),
    )
    for source, column, table in names:
        if f"init.{source}" in config.values:
            id_cols[table] = config.get(f"init.{column}", table)
            tables[table] = config.checked(
                f"init.{source}",
                _rows_of_shard,
                config.get(f"init.{source}"),
                id_cols[table],
                shard,
                source[:-1],
            )
    if not tables and not {"init.vectors", "init.events"} & config.values.keys():
        raise UsageError(
            f"{config.path}: the section init should have users and items, vectors, or events",
            code="argument-missing",
            path=str(config.path),
        )
    if tables:
        location = config.needed("store.location", "init")
        prefix, keep = config.get("store.prefix", ""), config.get("store.keep", 2)
        with config.checked("store.location", open_store, location, prefix, keep) as store:
            written["version"] = config.checked("init", store.replace, tables, id_cols)
            written |= {table: store.size(table) for table in tables}
    if "init.vectors" in config.values:
        path = config.needed("recall.index", "init")
        item = config.get("init.item_id", config.get("features.item_table", "item"))
        options = {
            "id_col": config.get("init.vector_id", item),
            "vector_col": config.get("init.vector", "prediction"),
            "kind": config.get("init.kind", "flat"),
            "metric": config.get("init.metric", "inner_product"),
        }
        source = config.checked(
            "init.vectors",
            _rows_of_shard,
            config.get("init.vectors"),
            options["id_col"],
            shard,
            "item",
        )
        index = config.checked("init.vectors", lambda: ItemIndex.from_table(source, **options))
        config.checked("recall.index", index.save, path)
        written["index"] = len(index)
    if "init.events" in config.values:
        location = config.needed("history.events", "init")
        options = {
            f"{name}_col": config.get(f"init.event_{name}", name)
            for name in ("user", "item", "time")
        }
        with config.checked(
            "history.events",
            open_events,
            location,
            config.get("history.prefix", ""),
            config.get("history.most", DEFAULT_EVENTS),
        ) as events:
            added = config.checked(
                "init.events", lambda: events.append_table(config.get("init.events"), **options)
            )
            written["events"] = added.added
    return written


def _rows_of_shard(
    source: str, id_column: str, shard: Shard | None, id_type: str
) -> str | pa.Table:
    """Return the Parquet path itself, or only the rows of a shard if `shard` is set."""
    if shard is None:
        return source
    table = table_of(source, f"the {id_type}s")
    if id_column not in table.column_names:
        raise UsageError(
            f"{source} has no column {id_column!r}, only {table.column_names}",
            code="column-missing",
            column=id_column,
            allowed=list(table.column_names),
        )
    return table.filter(pa.array(shard.has(id_type, ids_of(table[id_column], f"the {id_type}s"))))


# -- programs --------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
    config = read_config(options.config)
    for note in config.notes:
        print(f"{config.path}, {note}", file=sys.stderr)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    # A thread that returns from Faiss or OpenVINO waits up to this long for the GIL.
    sys.setswitchinterval(_SWITCH)
    workers = config.checked(
        "server.workers", check_integer, "workers", config.get("server.workers", 1), 1, 256
    )
    if options.worker is None and workers > 1:
        return _serve_by_workers(config, workers, options, ending)
    worker = None if options.worker is None else ServerWorker.from_json(options.worker)
    with Serving(config, options.shard, options.replica, worker) as serving:
        freeze_modules()  # avoids rare requests that wait for a full garbage collection
        listed = ", ".join(f"{name} {port}" for name, port in serving.ports.items())
        print(f"ready on {config.get('server.host', '127.0.0.1')}: {listed}", flush=True)
        ending.wait()
        print_line("ending")
        grace = config.get("server.grace_s", RECOMMENDER_END_S)
        exit_within(grace + RECOMMENDER_CLOSE_S, "bigdl-friesian-serve")
    return 0


def _serve_by_workers(
    config: Config, count: int, options: argparse.Namespace, ending: threading.Event
) -> int:
    more: list[str] = []
    if options.shard is not None:
        config = config.of_shard(options.shard, options.replica)
        more = ["--shard", str(options.shard), "--replica", str(options.replica)]
    names = {f"server.{name}_port": name for name in (*SERVICES, "http")}
    ports = {key: config.get(key) for key in names if key in config.values}
    host = _security(config).host
    program = [sys.executable, "-m", "bigdl.friesian.serving.program", "serve"]
    command = [*program, "--config", str(options.config), *more]
    grace = config.get("server.grace_s", RECOMMENDER_END_S)
    silence = config.get("server.worker_timeout_s", SILENCE_S)
    with Workers(command, count, host, ports, grace, silence) as workers:
        listed = ", ".join(f"{names[key]} {port}" for key, port in workers.ports.items())
        print(f"ready on {host}: {listed}; {count} workers", flush=True)
        ending.wait()
        print("ending", flush=True)
    return 0


def _init(options: argparse.Namespace) -> int:
    config = read_config(options.config)
    for note in config.notes:
        print(f"{config.path}, {note}", file=sys.stderr)
    if not config.shards:
        numbers: list[int | None] = [None]
    elif options.shard is None:
        numbers = list(range(len(config.shards)))
    else:
        numbers = [options.shard]
    for number in numbers:
        written = initialise(config, number)
        begin = "" if number is None else f"shard {number}: "
        print(begin + ", ".join(f"{name} {value}" for name, value in written.items()))
    return 0


def _client(options: argparse.Namespace) -> int:
    token = None if options.token_file is None else read_token(options.token_file)
    try:
        users = [int(each) for each in options.users.split(",")]
    except ValueError:
        raise UsageError(
            f"--users should be integers such as 1,2,3, got {options.users!r}",
            code="argument-value",
            argument="--users",
        ) from None
    grpc = require("grpc", "serving")
    with RecommenderClient(options.address, options.timeout, token, options.authority) as client:
        try:
            if options.requests:
                print(json.dumps(_load(client, users, options)))
                return 0
            for each in client.recommend(users, options.k, options.candidates):
                scored = zip(each.item_ids.tolist(), each.scores.tolist(), strict=True)
                shown = " ".join(f"{item}:{score:.4f}" for item, score in scored)
                print(f"user {each.user_id} ({each.source}) {shown}")
        except grpc.RpcError as error:
            raise UsageError(
                f"The recommender at {options.address} does not answer: {error.code().name}: "
                f"{error.details()}",
                code="cluster-unreachable",
                address=options.address,
            ) from None
    return 0


def _load(
    client: RecommenderClient, users: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Send many concurrent requests; return throughput, and latencies in milliseconds."""

    def timed_request(number: int) -> float:
        begin = time.perf_counter()
        client.recommend([users[number % len(users)]], options.k, options.candidates)
        return time.perf_counter() - begin

    begin = time.perf_counter()
    with ThreadPoolExecutor(options.threads) as pool:
        times = np.array(list(pool.map(timed_request, range(options.requests)))) * 1000
    rate = options.requests / (time.perf_counter() - begin)
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "requests": options.requests,
        "requests_per_s": round(rate, 1),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="bigdl-friesian-serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("serve", "start the services of a configuration"),
        ("init", "load the store and build the index"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--config", "-c", required=True, help="YAML configuration file")
        command.add_argument("--shard", type=int, help="index in the section shards, from 0")
        if name == "serve":
            command.add_argument(
                "--replica", type=int, default=0, help="index of the replica of the shard, from 0"
            )
            command.add_argument("--worker", help=argparse.SUPPRESS)
    client = commands.add_parser("client", help="send one or many requests to a recommender")
    client.add_argument("--address", default="127.0.0.1:8980")
    client.add_argument("--users", default="1", help="user ids, such as 1,2,3")
    client.add_argument("-k", type=int, default=10, help="maximum number of items per user")
    client.add_argument(
        "--candidates",
        type=int,
        default=0,
        help="number of items to rank per user; 0 for the server default",
    )
    client.add_argument("--requests", type=int, default=0, help="measure this number of requests")
    client.add_argument("--threads", type=int, default=8, help="concurrent requests")
    client.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for an answer")
    client.add_argument("--token-file", help="file with the bearer token")
    client.add_argument(
        "--authority", help="PEM file that verifies the certificate of the server; enables TLS"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    work = {"serve": _serve, "init": _init, "client": _client}[options.command]
    try:
        return work(options)
    except BigDLError as error:
        print(f"bigdl-friesian-serve: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
