"""The program ``bigdl-friesian-serve``.

    bigdl-friesian-serve init --config serving.yaml     # load the store, build the index
    bigdl-friesian-serve serve --config serving.yaml
    bigdl-friesian-serve serve --config serving.yaml --shard 0    # a part of the items
    bigdl-friesian-serve client --address 127.0.0.1:8980 --users 1,2,3

``serve`` starts the services that have a port in the section ``server``.  It ends at SIGTERM, after
the requests that run.  A new version of the store is read as soon as it is there, a new index and a
new model within two seconds; what cannot be read is refused, and the old one is used on.
"""

from __future__ import annotations

import argparse
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
from typing import Any, Self

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_integer
from bigdl.common.cpu import core_count
from bigdl.common.errors import BigDLError, UsageError, one_line, require
from bigdl.common.memory import freeze_modules
from bigdl.common.timeouts import RECOMMENDER_CLOSE_S, RECOMMENDER_END_S, SILENCE_S
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.serving.clients import (
    RecommenderClient,
    RemoteFeatures,
    RemoteRanker,
    RemoteRecall,
)
from bigdl.friesian.serving.config import SERVICES, Config, read_config
from bigdl.friesian.serving.http import HttpServer
from bigdl.friesian.serving.index import ItemIndex
from bigdl.friesian.serving.rankers import IndexRecall, ServedRanker
from bigdl.friesian.serving.recommender import Recommender
from bigdl.friesian.serving.redis_store import open_store
from bigdl.friesian.serving.rows import ids_of, table_of
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

logger = logging.getLogger("bigdl.friesian.serving")

_SWITCH = 0.0005  # seconds
_WAITING_THREADS = 8  # of a recommender whose stages wait for others
_LOOK = 2.0  # seconds between looks at the files of index and models
_BATCHING = ("max_batch_size", "max_delay_ms", "instances")


class Serving:
    """All that one configuration starts; a context manager that ends it.

    Parameters
    ----------
    config : Config
    shard, replica : int, optional
        Serve a shard of the items instead of what the section ``server`` says.
    worker : ServerWorker, optional
        This process is one of several that share the ports.
    listens : bool, default True
        False opens no port; see :attr:`recommender`.

    Attributes
    ----------
    ports : dict of str to int
        By the name of the service, and ``http``.

    Raises
    ------
    UsageError
        If something cannot be read or started.  Nothing is left running then.
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
        self._servers: list[Callable[[], Any]] = []  # that are stopped first
        self._peers: PeerWorkers | None = None
        self._added: dict[int, list[float]] = {}  # items that clients added to the index
        self._watcher: threading.Thread | None = None
        self._ended = threading.Event()
        self._made: dict[str, Any] = {}
        try:
            if listens:
                self._start()
            self._begin_watching()
        except BaseException:
            self.stop()
            raise

    @property
    def recommender(self) -> Recommender:
        """The recommender of the configuration, whether a port answers for it or not."""
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
                _started,
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
        """Look for new files from now on, if there are some that can be replaced."""
        if self._watcher is None and self._watched():
            self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._watcher.start()

    def _join_peers(self) -> None:
        """Let the other workers of this server ask, and ask them."""
        if self._worker is None:
            return
        functions = {"add": self._added_elsewhere, "added": lambda _: self._all_added()}
        peers = PeerWorkers(self._worker, self._models, functions)
        self._closing.append(peers.close)
        self._peers = peers

    def _added_elsewhere(self, content: bytes) -> bytes:
        self._add({int(item): vector for item, vector in json.loads(content).items()})
        return b""

    def _all_added(self) -> bytes:
        return json.dumps(dict(self._added)).encode()  # a copy: others go on adding

    def _add(self, items: dict[int, list[float]]) -> None:
        if items:
            self._index.add_items(list(items), list(items.values()))
            self._added.update(items)

    def _take_over_items(self, peers: PeerWorkers) -> None:
        """Add the items that other workers were told of before this one began."""
        for items in peers.ask("added").values():
            self._added_elsewhere(items)
            break

    # -- services -------------------------------------------------------------------------------

    def _feature_service(self, limits: Limits) -> Service:
        features = self._features if self._is_routed else self._store
        columns = self.config.get("features.user_columns"), self.config.get("features.item_columns")
        return FeatureService(features, *self._tables, *columns, self.metrics, limits)

    def _recall_service(self, limits: Limits) -> Service:
        if self._is_routed:
            return RecallService(self._recall, self._recall, self.metrics, limits)
        index: Any = self._index
        if self._peers is not None:
            self._take_over_items(self._peers)
            index = _SharedIndex(self._add, self._peers)
        return RecallService(self._local_recall, index, self.metrics, limits)

    def _ranking_service(self, limits: Limits) -> Service:
        return RankingService(self._local_ranker, self.metrics, limits)

    def _recommender_service(self, limits: Limits) -> Service:
        return RecommenderService(self._recommender, self.metrics, limits)

    # -- stages, each made once ------------------------------------------------------------------

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = made = make()
            if hasattr(made, "close"):
                self._closing.append(made.close)
        return self._made[name]

    @property
    def _tables(self) -> tuple[str, str]:
        get = self.config.get
        return get("features.user_table", "user"), get("features.item_table", "item")

    @property
    def _is_routed(self) -> bool:
        """True if the items are in shards elsewhere."""
        return bool(self.config.shards) and not self._is_shard

    @property
    def _line(self) -> dict[str, Any]:
        """Return the options of every client of another service."""
        config = self.config
        return {
            "timeout": config.get("recommender.deadline_ms", 10_000.0) / 1000,
            "token": _token(config),
            "admin_token": _token(config, "admin_token"),
            "authority": config.get("server.authority"),
        }

    def _remote(self, section: str, client: Any, **options: Any) -> Any:
        url = self.config.get(f"{section}.url")
        return self._once(f"{section} at {url}", lambda: client(url, **self._line, **options))

    @property
    def _sharded_features(self) -> ShardedFeatures:
        return self._once(
            "features of shards",
            lambda: ShardedFeatures(
                self.config.shards, self._tables[0], self.metrics, **self._line
            ),
        )

    @property
    def _store(self) -> Any:
        config = self.config
        location = config.needed("store.location", "the feature service")
        prefix, keep = config.get("store.prefix", ""), config.get("store.keep", 2)

        def make() -> Any:
            store = config.checked("store.location", open_store, location, prefix, keep)
            for table in self._tables:
                if table not in store.tables():
                    raise config.error(
                        "store.location",
                        f"the store at {location} has no table {table!r}; load it by: "
                        f"bigdl-friesian-serve init --config {config.path}",
                    )
            self.metrics.watch("store_version", lambda: store.version)
            if "://" not in location:  # counting rows in Redis would take long
                for table in self._tables:
                    self.metrics.watch(f"rows_{table}", partial(store.size, table))
            return store

        return self._once("store", make)

    @property
    def _features(self) -> Any:
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
            return index

        return self._once("index", make)

    @property
    def _local_recall(self) -> IndexRecall:
        config = self.config
        vector, seen = config.get("recall.user_vector", "prediction"), config.get("recall.seen")
        features, table = self._features, self._tables[0]
        names = features.names(table)
        if self._is_shard and self.config.shards[0].users is not None:
            features = self._sharded_features  # the user may be of another shard
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
                lambda: ShardedRecall(self.config.shards, self.metrics, **self._line),
            )
        if "recall.url" in self.config.values:
            return self._remote("recall", RemoteRecall)
        return self._local_recall

    @property
    def _models(self) -> InferenceService:
        """The ranking models, which answer the Open Inference Protocol, too."""
        config = self.config

        def make() -> InferenceService:
            repository = ModelRepository()
            if "ranking.model" in config.values:
                path = config.get("ranking.model")
                if not Path(path).exists():
                    raise config.error("ranking.model", f"there is no model at {path}")
                given = {name: config.get(f"ranking.{name}") for name in _BATCHING}
                batching = {name: each for name, each in given.items() if each is not None}
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
                repository.watch(_LOOK)
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
    def _ranker(self) -> Any:
        if "ranking.url" in self.config.values:
            return self._remote("ranking", RemoteRanker)
        return self._local_ranker

    @property
    def _computing_threads(self) -> int:
        """The requests that are computed at a time; more than cores would wait for each other."""
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
                    **functions,
                ),
            )
            if "features.url" not in config.values and not self._is_routed:
                config.checked("ranking.inputs", recommender.check)
                recommender.warm_up()
            return recommender

        return self._once("recommender", make)

    # -- what changes while it serves -----------------------------------------------------------

    def _watched(self) -> dict[str, str]:
        """Return the files whose change means a new index."""
        watched = {}
        if "index" in self._made:
            watched["index"] = os.path.join(self.config.get("recall.index"), "index.json")
        return watched

    def _watch(self) -> None:
        stamps = {name: _stamp(path) for name, path in self._watched().items()}
        while not self._ended.wait(_LOOK):
            for name, path in self._watched().items():
                stamp = _stamp(path)
                if stamp is None or stamp == stamps.get(name):
                    continue
                if stamp != _stamp(path):
                    continue  # it is being written
                stamps[name] = stamp
                try:
                    self._renew(name)
                except Exception as error:
                    logger.error("The new %s is refused: %s", name, one_line(error))
                else:
                    logger.warning("The new %s is used from now on", name)

    def _renew(self, name: str) -> None:
        self._made[name].swap(ItemIndex.load(self.config.get("recall.index")))
        self._added.clear()

    def stop(self) -> None:
        """Answer what was asked, and end all servers and clients."""
        self._ended.set()
        # Together: none takes requests while another one answers its last.
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
    """The index of all workers of a server, for items that come one by one."""

    def __init__(self, add: Callable[[dict[int, list[float]]], None], peers: PeerWorkers):
        self._add, self._peers = add, peers

    def add_item(self, item_id: int, vector: Any) -> None:
        items = {int(item_id): np.asarray(vector, np.float32).tolist()}
        self._add(items)
        self._peers.ask("add", json.dumps(items).encode())


def _started(
    services: list[GrpcService],
    port: int,
    security: Security,
    limits: Limits,
    threads: int,
    shares_port: bool,
) -> GrpcServer:
    return GrpcServer(services, port, security, limits, threads, shares_port)


def _stage(name: str, options: dict[str, object]) -> str | Stage:
    """Return a stage of a configuration; the name alone of one that the recommender makes."""
    if name not in DEFAULT_STAGES:
        return load_stage(name, options)
    if options:
        raise UsageError(
            f"The stage {name} takes no options here, but keys of its section; got {options!r}",
            code="argument-conflict",
            argument=name,
        )
    return name


def _stamp(path: str) -> tuple | None:
    """Return what changes with the files at a path."""
    try:
        names = [path, *(str(each) for each in sorted(Path(path).rglob("*")))]
        return tuple((name, os.stat(name).st_mtime_ns, os.stat(name).st_ino) for name in names)
    except OSError:
        return None


def limits_of(config: Config) -> Limits:
    """Return what one request may ask for."""
    server = config.section("server")
    names = ("max_ids", "max_k", "max_pairs", "max_bytes", "max_requests")
    given = {name: server[name] for name in names if name in server}
    return config.checked("server", lambda: Limits(**given))


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
    given = {
        name: config.get(f"server.{name}") for name in keys if f"server.{name}" in config.values
    }
    tokens = _tokens(config)
    config.checked("server.changes", changes_allowed, given.get("changes"), tokens)
    place = "server.host" if "server.host" in config.lines else "server.certificate"
    return config.checked(
        place,
        lambda: Security(
            **given,
            token=tokens.infer,
            admin_token=tokens.admin,
            metrics_token=tokens.metrics,
        ),
    )


# -- near the line ---------------------------------------------------------------------------------


def initialise(config: Config, number: int | None = None) -> dict[str, Any]:
    """Load the store and build the index, as the sections ``init``, ``store`` and ``recall`` say.

    Parameters
    ----------
    config : Config
    number : int, optional
        Of a shard, whose items alone are loaded.

    Returns
    -------
    dict
        What was written: rows by table, the version of the store, items of the index.
    """
    done: dict[str, Any] = {}
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
                _part,
                config.get(f"init.{source}"),
                id_cols[table],
                shard,
                source[:-1],
            )
    if not tables and "init.vectors" not in config.values:
        raise UsageError(
            f"{config.path}: the section init should name users and items, vectors, or all",
            code="argument-missing",
            path=str(config.path),
        )
    if tables:
        location = config.needed("store.location", "init")
        prefix, keep = config.get("store.prefix", ""), config.get("store.keep", 2)
        with config.checked("store.location", open_store, location, prefix, keep) as store:
            done["version"] = config.checked("init", store.replace, tables, id_cols)
            done |= {table: store.size(table) for table in tables}
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
            "init.vectors", _part, config.get("init.vectors"), options["id_col"], shard, "item"
        )
        index = config.checked("init.vectors", lambda: ItemIndex.from_table(source, **options))
        config.checked("recall.index", index.save, path)
        done["index"] = len(index)
    return done


def _part(source: str, id_column: str, shard: Shard | None, kind: str) -> Any:
    """Return a table of Parquet files, or those rows of it that are of a shard."""
    if shard is None:
        return source
    table = table_of(source, f"the {kind}s")
    if id_column not in table.column_names:
        raise UsageError(
            f"{source} has no column {id_column!r}, only {table.column_names}",
            code="column-missing",
            column=id_column,
            allowed=list(table.column_names),
        )
    return table.filter(pa.array(shard.has(kind, ids_of(table[id_column], f"the {kind}s"))))


# -- programs --------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
    config = read_config(options.config)
    for note in config.notes:
        print(f"{config.path}, {note}", file=sys.stderr)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    # A thread that comes back from Faiss or OpenVINO waits for so long for another one in Python.
    sys.setswitchinterval(_SWITCH)
    workers = config.checked(
        "server.workers", check_integer, "workers", config.get("server.workers", 1), 1, 256
    )
    if options.worker is None and workers > 1:
        return _serve_by_workers(config, workers, options, ending)
    worker = None if options.worker is None else ServerWorker.from_json(options.worker)
    with Serving(config, options.shard, options.replica, worker) as serving:
        freeze_modules()  # else a request in thousands waits for a collection of all of them
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
        done = initialise(config, number)
        begin = "" if number is None else f"shard {number}: "
        print(begin + ", ".join(f"{name} {value}" for name, value in done.items()))
    return 0


def _client(options: argparse.Namespace) -> int:
    token = None if options.token_file is None else read_token(options.token_file)
    try:
        users = [int(each) for each in options.users.split(",")]
    except ValueError:
        raise UsageError(
            f"--users should be numbers as in 1,2,3, got {options.users!r}",
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
    """Ask many times, with several requests at a time; returns figures in milliseconds."""

    def ask(number: int) -> float:
        begin = time.perf_counter()
        client.recommend([users[number % len(users)]], options.k, options.candidates)
        return time.perf_counter() - begin

    begin = time.perf_counter()
    with ThreadPoolExecutor(options.threads) as pool:
        times = np.array(list(pool.map(ask, range(options.requests)))) * 1000
    rate = options.requests / (time.perf_counter() - begin)
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "requests": options.requests,
        "requests_per_s": round(rate, 1),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the status that it ends with."""
    parser = argparse.ArgumentParser(
        prog="bigdl-friesian-serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("serve", "serve what a configuration says"),
        ("init", "load the store and build the index"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--config", "-c", required=True, help="a file of YAML")
        command.add_argument("--shard", type=int, help="one of the section shards, from 0")
        if name == "serve":
            command.add_argument("--replica", type=int, default=0, help="of the shard, from 0")
            command.add_argument("--worker", help=argparse.SUPPRESS)
    client = commands.add_parser("client", help="ask a recommender, once or many times")
    client.add_argument("--address", default="127.0.0.1:8980")
    client.add_argument("--users", default="1", help="numbers, as in 1,2,3")
    client.add_argument("-k", type=int, default=10, help="items of an answer")
    client.add_argument("--candidates", type=int, default=0, help="items that are ranked")
    client.add_argument("--requests", type=int, default=0, help="measure so many requests")
    client.add_argument("--threads", type=int, default=8, help="requests at a time")
    client.add_argument("--timeout", type=float, default=10.0, help="seconds")
    client.add_argument("--token-file", help="file with the bearer token")
    client.add_argument("--authority", help="file in PEM to check the certificate by; means TLS")
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
