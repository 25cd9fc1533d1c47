"""Programs of the workers that train and evaluate trees of LightGBM.

LightGBM bins the float32 rows of a memory-mapped file, and keeps one byte per value in memory. The
workers sum their histograms through sockets that LightGBM opens between them.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.trees import LGBMTrees, read_lightgbm
from bigdl.orca.learn.trees.matrix import ShardMatrix, TreeColumns, dense_rows, shard_matrices
from bigdl.orca.learn.trees.program import (
    Metric,
    TreeFit,
    best_round,
    check_unencrypted,
    check_width,
    matrix_folder,
    monitored_metric,
    send_trees,
    shared_model,
    whole_groups,
)
from bigdl.runtime.engine import PeerLost

if TYPE_CHECKING:
    import lightgbm
    from lightgbm.callback import CallbackEnv

    from bigdl.runtime.worker import Worker

Scores = dict[str, tuple[float, bool]]
"""Metrics by name: the value, and whether a larger one is better."""
Sizes = dict[str, tuple[float, float]]
"""Total weight of the rows, and of the groups, by dataset."""
_NO_ROWS = (0.0, 0.0)

_SEEDS = (
    *("seed", "bagging_seed", "feature_fraction_seed", "drop_seed", "extra_seed"),
    "objective_seed",
)
_NETWORK = re.compile(
    r"^\[(machines|num_machines|local_listen_port|time_out|pre_partition|num_threads): .*\]\n", re.M
)
_SOCKET = re.compile(r"socket|network|connect|machine|bind|port \d|listen", re.I)
_OF_GROUPS = ("ndcg", "map")
_ROOTS = ("rmse", "root_mean_squared_error", "l2_root")


@dataclass(frozen=True)
class LGBMFit(TreeFit):
    """Settings of a fit of LightGBM for its workers."""

    def _train(
        self,
        worker: Worker,
        matrices: dict[str, ShardMatrix],
        folder: str,
        data: bytes | None,
        facts: dict[str, Any],
    ) -> None:
        """Grow trees; between two checkpoints, or in the whole fit, by one call of LightGBM."""
        import lightgbm

        if worker.world_size > 1:
            check_unencrypted(worker, "LightGBM")
        for matrix in matrices.values():
            matrix.check_labels(self.params)
        _check_rows(worker, matrices["data"])
        datasets, sizes = _datasets(matrices, folder, self.missing)
        first, rounds = int(worker.options["first"]), _Rounds(self, worker, sizes)
        booster = None if data is None else read_lightgbm(data)
        while rounds.number < self.stop_at and not rounds.has_stopped:
            count = min(self.checkpoint_rounds or self.stop_at, self.stop_at - rounds.number)
            with _lightgbm_errors(worker):
                booster = lightgbm.train(
                    self._settings(worker, rounds.number),
                    datasets["train"],
                    count,
                    valid_sets=list(datasets.values()),
                    valid_names=list(datasets),
                    feval=self._feval(),
                    init_model=booster,
                    callbacks=[rounds.after_round],
                )
                booster.free_network()
            is_last = rounds.has_stopped or rounds.number >= self.stop_at
            if worker.rank == 0 and not is_last:
                send_trees(worker, _bytes_of(booster), facts, rounds.history)
        if worker.rank == 0 and booster is not None:
            kept = None if rounds.best is None else first + rounds.best + 1
            trees = _bytes_of(booster, kept)
            send_trees(worker, trees, facts, rounds.history, is_complete=True)

    def _settings(self, worker: Worker, rounds: int) -> dict[str, Any]:
        """Return LightGBM's parameters for the rounds after `rounds`."""
        settings: dict[str, Any] = {"verbosity": -1, **self.params, "num_threads": worker.threads}
        if "force_row_wise" not in settings and "force_col_wise" not in settings:
            # otherwise LightGBM selects the layout by time, and the sums differ in the last digits
            settings = {"force_col_wise": True, "deterministic": True, **settings}
        if self.objective is not None:
            settings["objective"] = self.objective
        if rounds:  # else each call would draw the same rows and features
            settings.setdefault("seed", 0)
            settings.update(
                {name: int(settings[name]) + rounds for name in _SEEDS if name in settings}
            )
        if worker.world_size > 1:
            settings.update(_network(worker, rounds))
        return settings

    def _feval(self) -> Callable[..., Any] | None:
        metric = self.metric
        return None if metric is None else lambda scores, rows: metric_result(metric(scores, rows))


class _Rounds:
    """Rounds of a fit: their metrics over all workers, and the decision to stop early."""

    def __init__(self, fit: LGBMFit, worker: Worker, sizes: Sizes):
        self._fit, self._worker, self._sizes = fit, worker, sizes
        self.history: list[dict[str, float]] = list(worker.options["history"])
        self.number = int(worker.options["first"]) + len(self.history)
        self.best: int | None = None
        self.has_stopped = False
        self._iterations = self.number

    def after_round(self, env: CallbackEnv) -> None:
        """Record the metrics of a round; raise EarlyStopException to end the fit."""
        from lightgbm.callback import EarlyStopException

        iterations = cast("lightgbm.Booster", env.model).current_iteration()
        if iterations == self._iterations:  # no leaf can be split
            self.has_stopped = True
            raise EarlyStopException(env.iteration, [])
        self._iterations = iterations
        results = env.evaluation_result_list or ()
        local = {f"{each[0]}_{each[1]}": (float(each[2]), bool(each[3])) for each in results}
        self.number += 1
        merged = merged_metrics(self._worker, f"metrics/{self.number}", local, self._sizes)
        values = {name: value for name, (value, _) in merged.items()}
        self.history.append({"round": self.number, **values})
        self._worker.progress(round=self.number)
        limit = self._fit.early_stopping_rounds
        if limit is None:
            return
        monitored = monitored_metric(values, "metric")
        maximize = merged[monitored][1] if self._fit.maximize is None else self._fit.maximize
        self.best = best_round(self.history, monitored, maximize)
        self.has_stopped = len(self.history) - 1 - self.best >= limit
        if self.has_stopped:
            raise EarlyStopException(env.iteration, [])


@dataclass(frozen=True)
class LGBMEvaluation:
    """Evaluation of trees of LightGBM on the rows of all workers.

    Attributes
    ----------
    columns : TreeColumns
    missing : float
    metrics : list of str or None
        Metrics of LightGBM; default those of the fit.
    metric : callable or None
    has_objective : bool
        Whether the trees were trained with a custom objective, so that predictions are margins.
    """

    columns: TreeColumns
    missing: float
    metrics: list[str] | None = None
    metric: Metric | None = None
    has_objective: bool = False
    imports_torch: ClassVar[bool] = False

    def __call__(self, worker: Worker) -> dict[str, float]:
        """Return the metrics, which are equal on all workers."""
        data = shared_model(worker)
        assert data is not None
        trees = LGBMTrees(data, worker.threads)
        known = trees.read_facts().get("categories", {})
        with matrix_folder(worker) as folder:
            shards = whole_groups(worker, self.columns, folder)
            matrices, _ = shard_matrices(worker, shards, self.columns, known)
            rows = matrices["data"]
            check_width(rows, trees.width)
            local, size = {}, _NO_ROWS
            if rows.rows:
                arguments = dense_rows(rows, folder, self.missing)
                size = _size(arguments)
                with _lightgbm_errors(worker):
                    local = self._local(trees, rows, arguments)
        merged = merged_metrics(worker, "metrics", local, {"data": size})
        return {name.removeprefix("data_"): value for name, (value, _) in merged.items()}

    def _local(self, trees: LGBMTrees, rows: ShardMatrix, arguments: dict[str, Any]) -> Scores:
        """Return the metrics of this worker's rows.

        LightGBM evaluates the rows of a Dataset. Its scores are those of the trees, and it has one
        constant feature.
        """
        import lightgbm

        block = arguments.pop("data")
        margins = [
            trees.predict(np.asarray(block[low:high]), "margin") for low, high in rows.batches()
        ]
        scores = np.concatenate(margins)
        if "init_score" in arguments:
            scores = scores + arguments["init_score"].reshape(scores.shape)
        arguments["init_score"] = scores.ravel(order="F")
        loaded = {name: value for name, value in trees.booster.params.items() if name in _KEPT}
        settings = {**loaded, "verbosity": -1, "num_threads": trees.threads}
        if self.metrics is not None:
            settings["metric"] = self.metrics
        if self.has_objective:
            settings["objective"] = "none"
        dataset = lightgbm.Dataset(
            np.arange(rows.rows, dtype=np.float32)[:, None],
            free_raw_data=False,
            params={"verbosity": -1},
            **arguments,
        )
        booster = lightgbm.Booster(settings, dataset)
        metric = self.metric
        feval = None if metric is None else lambda s, d: metric_result(metric(s, d))
        results = booster.eval(dataset, "data", feval)
        return {f"data_{each[1]}": (float(each[2]), bool(each[3])) for each in results}


_KEPT = (
    *("objective", "num_class", "sigmoid", "alpha", "fair_c", "poisson_max_delta_step", "metric"),
    *("tweedie_variance_power", "eval_at", "label_gain", "lambdarank_truncation_level"),
    *("reg_sqrt", "is_unbalance", "scale_pos_weight", "multi_error_top_k", "auc_mu_weights"),
)
"""Parameters that metrics depend on."""


def merged_metrics(worker: Worker, key: str, local: Scores, sizes: Sizes) -> Scores:
    """Return metrics over the rows of all workers, from those of each worker's rows.

    The mean over rows, or over groups for ``ndcg`` and ``map``, is exact for metrics that are such
    means, and for their roots. ``auc`` is the mean of the workers' areas.

    Parameters
    ----------
    worker : Worker
    key : str
        Name of this exchange.
    local : dict
        Metrics by ``dataset_metric``.
    sizes : mapping of str to tuple
        Total weight of the worker's rows, and of their groups, of each dataset; without weights
        their numbers.
    """
    if worker.world_size == 1:
        return local
    counted = {
        name: [value, larger, _size_of(name, sizes)] for name, (value, larger) in local.items()
    }
    gathered = worker.channel.all_gather(key, worker.rank, counted, worker.world_size)
    merged: Scores = {}
    longest = max(gathered, key=len)
    for name, (_, larger, _) in longest.items():
        power = 2 if name.partition("_")[2] in _ROOTS else 1
        entries = [each[name] for each in gathered if name in each]
        total = sum(value**power * size for value, _, size in entries)
        mean = total / sum(size for *_, size in entries)
        merged[name] = (math.sqrt(mean) if power == 2 else mean, bool(larger))
    return merged


def _size_of(name: str, sizes: Sizes) -> float:
    dataset, _, metric = name.partition("_")
    weight, groups = sizes[dataset]
    return groups if groups and metric.partition("@")[0] in _OF_GROUPS else weight


def _size(arguments: Mapping[str, Any]) -> tuple[float, float]:
    """Return the total weight of rows, and of their groups, from the result of dense_rows."""
    rows, weight, groups = len(arguments["label"]), arguments.get("weight"), arguments.get("group")
    if weight is None:
        return float(rows), 0.0 if groups is None else float(len(groups))
    weight = weight.astype(np.float64)
    firsts = [] if groups is None else np.cumsum(groups) - groups  # the rows of a group weigh alike
    return float(weight.sum()), 0.0 if groups is None else float(weight[firsts].sum())


def metric_result(returned: object) -> tuple[str, float, bool]:
    """Return the result of a custom metric: its name, value, and whether larger is better."""
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise UsageError(
            "A custom metric must return (name, value, is_higher_better), got "
            f"{type(returned).__name__}",
            code="function-result",
            argument="metric",
        )
    name, value, larger = returned
    return str(name), float(value), bool(larger)


def _datasets(
    matrices: dict[str, ShardMatrix], folder: str, missing: float
) -> tuple[dict[str, lightgbm.Dataset], Sizes]:
    """Return the datasets of a fit and their sizes; without validation rows, one dataset only."""
    import lightgbm

    rows = matrices["data"]
    names: Any = "auto" if rows.names_are_positions else rows.names
    categories: Any = [i for i, type_name in enumerate(rows.types) if type_name == "c"]
    arguments = dense_rows(rows, folder, missing)
    train = lightgbm.Dataset(
        **arguments,
        feature_name=names,
        categorical_feature=categories,
        free_raw_data=False,
    )
    datasets, sizes = {"train": train}, {"train": _size(arguments), "validation": _NO_ROWS}
    validation = matrices.get("validation")
    if validation is not None and validation.rows:
        arguments = dense_rows(validation, folder, missing)
        datasets["validation"] = train.create_valid(**arguments)
        sizes["validation"] = _size(arguments)
    return datasets, sizes


def _check_rows(worker: Worker, matrix: ShardMatrix) -> None:
    """Raise a UsageError on all workers if one has no rows, which LightGBM cannot train on."""
    if worker.world_size == 1:
        return
    counts = worker.channel.all_gather("lightgbm/rows", worker.rank, matrix.rows, worker.world_size)
    if 0 in counts:
        raise UsageError(
            f"LightGBM needs rows on each of the {worker.world_size} workers, got {counts}; "
            "use fewer workers, or distribute the rows over more partitions or groups",
            code="data-size",
        )


def _network(worker: Worker, rounds: int) -> dict[str, Any]:
    """Return LightGBM's parameters of the connections between the workers."""
    with socket.socket() as listener:  # LightGBM needs the numbers of free ports
        listener.bind(("", 0))  # as LightGBM does, but without listening
        port = listener.getsockname()[1]
    key, address = f"machines/{rounds}", f"{worker.host}:{port}"
    machines = worker.channel.all_gather(key, worker.rank, address, worker.world_size)
    return {
        "machines": ",".join(machines),
        "num_machines": worker.world_size,
        "local_listen_port": port,
        "time_out": max(1, math.ceil(worker.timeout / 60)),  # minutes
        "pre_partition": True,
        "tree_learner": "data",
    }


def _bytes_of(booster: lightgbm.Booster, rounds: int | None = None) -> bytes:
    """Return the trees of a booster, without the settings of its workers."""
    text = booster.model_to_string(num_iteration=-1 if rounds is None else rounds)
    return _NETWORK.sub("", text).encode()


@contextlib.contextmanager
def _lightgbm_errors(worker: Worker) -> Iterator[None]:
    """Context manager that converts LightGBM's errors to PeerLost or UsageError."""
    from lightgbm.basic import LightGBMError

    try:
        yield
    except LightGBMError as error:
        text = " ".join(str(error).split())
        if worker.world_size > 1 and _SOCKET.search(text):
            raise PeerLost(text) from error
        raise UsageError(
            f"LightGBM refuses the data or the parameters: {text}", code="argument-value"
        ) from error
