"""Programs of the workers that train and evaluate trees of XGBoost.

The workers of a job are in one group of XGBoost's collective. Its tracker is in the driver. Each
worker grows the same trees from the summed histograms of all workers.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.trees import XGBTrees
from bigdl.orca.learn.trees.matrix import (
    ShardMatrix,
    TreeColumns,
    exact_matrix,
    is_external,
    quantile_matrix,
    shard_matrices,
)
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
    import xgboost

    from bigdl.runtime.worker import Worker

TRACKER = "tracker"
"""Option of an attempt: the arguments that join XGBoost's collective, or None."""
_COLLECTIVE = re.compile(
    r"allreduce|allgather|broadcast|comm(_group)?\.(cc|h)|socket\.(cc|h)|Socket error|tracker",
    re.I,
)
_ORIGIN = re.compile(r"^\[[0-9:]+\] \S+?\.(?:cc|h|cu|cuh):[0-9]+: ?")
_NAME_BYTES = 128
_MAXIMIZED = ("auc", "aucpr", "pre", "ndcg", "map")


@dataclass(frozen=True)
class XGBFit(TreeFit):
    """Settings of a fit of XGBoost for its workers.

    Attributes
    ----------
    external_memory : bool or None
        Whether binned values are in a file; by default as the available memory requires.
    """

    external_memory: bool | None = None

    def _train(
        self,
        worker: Worker,
        matrices: dict[str, ShardMatrix],
        folder: str,
        data: bytes | None,
        facts: dict[str, Any],
    ) -> None:
        """Build XGBoost's matrices, grow the trees, and release the matrices."""
        workers_here = max(1, core_count() // max(1, worker.threads))
        external = self.external_memory
        if external is None:
            external = is_external(list(matrices.values()), workers_here)
        with _collective(worker):
            for matrix in matrices.values():
                matrix.check_labels(self.params)
            params = {**self.params, "nthread": worker.threads}
            options = (folder if external else None, params, self.missing, worker.threads)
            train = quantile_matrix(matrices["data"], *options)
            evals = [(train, "train")]
            if "validation" in matrices:
                validation = quantile_matrix(matrices["validation"], *options, train)
                evals.append((validation, "validation"))
            self._grow(worker, params, data, evals, facts)

    def _grow(
        self,
        worker: Worker,
        params: dict[str, Any],
        data: bytes | None,
        evals: list[tuple[xgboost.DMatrix, str]],
        facts: dict[str, Any],
    ) -> None:
        history: list[dict[str, float]] = list(worker.options["history"])
        first = int(worker.options["first"])
        train = evals[0][0]
        booster = _booster(params, data, evals)
        rounds = booster.num_boosted_rounds()
        best = self._best(history) if self._stops_early else None
        while rounds < self.stop_at and not self._has_stopped(best, rounds - first):
            booster.update(train, rounds, self.objective)
            rounds += 1
            history.append({"round": rounds, **self._metrics(booster, evals, rounds)})
            if self._stops_early:
                best = self._best(history)
            is_due = self.checkpoint_rounds and (rounds - first) % self.checkpoint_rounds == 0
            if is_due and rounds < self.stop_at:
                if worker.rank == 0:
                    send_trees(worker, _bytes_of(booster), facts, history)
                # the same random numbers follow in a fit that resumes here
                booster = _booster(params, _bytes_of(booster), evals)
            worker.progress(round=rounds)
        if best is not None:
            booster = booster[: first + best + 1]
        if worker.rank == 0:
            send_trees(worker, _bytes_of(booster), facts, history, is_complete=True)

    @property
    def _stops_early(self) -> bool:
        return self.early_stopping_rounds is not None

    def _has_stopped(self, best: int | None, rounds: int) -> bool:
        limit = self.early_stopping_rounds
        return best is not None and limit is not None and rounds - 1 - best >= limit

    def _best(self, history: list[dict[str, float]]) -> int | None:
        """Return the index of the best round, by the last metric of the validation data."""
        if not history:
            return None
        monitored = monitored_metric(history[0], "eval_metric")
        maximize = self.maximize
        if maximize is None:
            name = monitored.removeprefix("validation_").partition("@")[0]
            maximize = name in _MAXIMIZED
        return best_round(history, monitored, maximize)

    def _metrics(
        self,
        booster: xgboost.Booster,
        evals: list[tuple[xgboost.DMatrix, str]],
        rounds: int,
    ) -> dict[str, float]:
        metrics = {}
        if not self.params.get("disable_default_eval_metric"):
            metrics = parse_metrics(booster.eval_set(evals, rounds - 1))
        if self.metric is not None:
            for matrix, name in evals:
                metric, value = custom_value(self.metric, booster, matrix, self.objective)
                metrics[f"{name}_{metric}"] = value
        return metrics


@dataclass(frozen=True)
class XGBEvaluation:
    """Evaluation of a booster on the rows of all workers.

    Attributes
    ----------
    columns : TreeColumns
    missing : float
    metrics : list of str or None
        Metrics of XGBoost; default those of the objective.
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
        trees = XGBTrees(data, worker.threads)
        known = trees.read_facts().get("categories", {})
        with matrix_folder(worker) as folder:
            shards = whole_groups(worker, self.columns, folder)
            matrices, _ = shard_matrices(worker, shards, self.columns, known)
            check_width(matrices["data"], trees.width)
            with _collective(worker):
                metrics = self._evaluate(worker, trees.booster, matrices["data"], folder)
        metrics = {name.removeprefix("data_"): value for name, value in metrics.items()}
        if self.metrics:
            # metrics of the fit come first
            metrics = {k: v for k, v in metrics.items() if k in self.metrics or "@" in k} | {
                name: metrics[name] for name in list(metrics)[-1:] if self.metric is not None
            }
        return metrics

    def _evaluate(
        self, worker: Worker, booster: xgboost.Booster, rows: ShardMatrix, folder: str
    ) -> dict[str, float]:
        matrix = exact_matrix(rows, folder, self.missing, worker.threads)
        if self.metrics:
            booster.set_param([("eval_metric", name) for name in self.metrics])
        metrics = parse_metrics(booster.eval_set([(matrix, "data")], 0))
        if self.metric is not None:
            objective = len if self.has_objective else None
            name, value = custom_value(self.metric, booster, matrix, objective)
            metrics[f"data_{name}"] = value
        return metrics


def _booster(
    params: dict[str, Any], data: bytes | None, evals: list[tuple[xgboost.DMatrix, str]]
) -> xgboost.Booster:
    """Return a booster for more rounds; its random numbers depend on the number of rounds."""
    import xgboost

    matrices = [matrix for matrix, _ in evals]
    if data is None:
        return xgboost.Booster(params, matrices)
    booster = xgboost.Booster(params, matrices, model_file=bytearray(data))
    seed = int(params.get("seed", params.get("random_state", 0)))
    booster.set_param("seed", str(seed + booster.num_boosted_rounds()))
    return booster


def parse_metrics(text: str) -> dict[str, float]:
    """Parse the text of ``Booster.eval_set``; the name of a metric starts with its dataset."""
    metrics = {}
    for part in text.split("\t")[1:]:
        name, _, value = part.rpartition(":")
        dataset, _, metric = name.partition("-")
        metrics[f"{dataset}_{metric}"] = float(value)
    return metrics


def custom_value(
    metric: Metric,
    booster: xgboost.Booster,
    matrix: xgboost.DMatrix,
    objective: Callable[..., Any] | None,
) -> tuple[str, float]:
    """Return a custom metric's name and its mean over the rows of all workers.

    The mean is exact for metrics that are means over rows.
    """
    from xgboost import collective

    rows = matrix.num_row()
    if not collective.is_distributed():
        return _called(metric, booster, matrix, objective)
    name, value = _called(metric, booster, matrix, objective) if rows else ("", 0.0)
    letters = np.zeros(_NAME_BYTES, np.uint8)  # workers without rows do not know the name
    encoded = name.encode()[:_NAME_BYTES]
    letters[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    letters = collective.allreduce(letters, collective.Op.MAX)
    total = collective.allreduce(np.array([value * rows, rows], np.float64), collective.Op.SUM)
    return letters.tobytes().rstrip(b"\0").decode(), float(total[0] / total[1])


def _called(
    metric: Metric,
    booster: xgboost.Booster,
    matrix: xgboost.DMatrix,
    objective: Callable[..., Any] | None,
) -> tuple[str, float]:
    returned = metric(booster.predict(matrix, output_margin=objective is not None), matrix)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UsageError(
            f"A custom metric must return (name, value), got {type(returned).__name__}",
            code="function-result",
            argument="eval_metric",
        )
    return str(returned[0]), float(returned[1])


def _bytes_of(booster: xgboost.Booster) -> bytes:
    return bytes(booster.save_raw("ubj"))


@contextlib.contextmanager
def _collective(worker: Worker) -> Iterator[None]:
    """Context manager that joins the workers' group of XGBoost's collective."""
    if worker.world_size == 1:
        with _xgboost_errors(worker):
            yield
        return
    from xgboost import collective

    check_unencrypted(worker, "XGBoost")
    arguments = {
        **worker.options[TRACKER],
        "dmlc_task_id": f"{worker.rank:06d}",
        "dmlc_timeout": int(worker.timeout),
    }

    is_joined = True

    def leave() -> None:
        if is_joined:
            with contextlib.suppress(Exception):  # peers are lost
                collective.finalize()

    worker.at_exit(leave)
    with _xgboost_errors(worker):
        with contextlib.redirect_stdout(io.StringIO()):  # a line for each worker
            collective.init(**arguments)
        yield
        collective.finalize()
    is_joined = False


@contextlib.contextmanager
def _xgboost_errors(worker: Worker) -> Iterator[None]:
    """Context manager that converts XGBoost's errors to PeerLost or UsageError."""
    from xgboost.core import XGBoostError

    try:
        yield
    except XGBoostError as error:
        text = str(error)
        if worker.world_size > 1 and _COLLECTIVE.search(text):
            raise PeerLost(message_of(text)) from error
        raise UsageError(
            f"XGBoost refuses the data or the parameters: {message_of(text)}",
            code="argument-value",
        ) from error


def message_of(text: str) -> str:
    """Return the sentence of an error message of XGBoost."""
    text = text.replace("Objective candidate:", ";", 1).replace("Objective candidate:", ",")
    lines = [line for line in text.partition("Stack trace")[0].splitlines() if line.strip()]
    message = _ORIGIN.sub("", " ".join(lines)).replace(" ,", ",").strip()
    return message.removeprefix("Check failed: ") or "unknown reason"
