"""Parts of the programs of the workers that train and evaluate boosted trees of any library."""

from __future__ import annotations

import contextlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.trees import read_trees
from bigdl.orca.learn.trees.matrix import ShardMatrix, TreeColumns, shard_matrices

if TYPE_CHECKING:
    from bigdl.runtime.shards.shard import Shard
    from bigdl.runtime.worker import Worker

Metric = Callable[[np.ndarray, Any], tuple]
Objective = Callable[[np.ndarray, Any], tuple[np.ndarray, np.ndarray]]

CHECKPOINT = "trees"
"""Topic of the messages with the trees."""
_MODEL = "trees/model"


@dataclass(frozen=True)
class TreeFit(ABC):
    """Settings of a fit for its workers.

    Attributes
    ----------
    params : dict
        Parameters of the library.
    stop_at : int
        Number of boosting rounds of the final model, including those of earlier fits.
    columns : TreeColumns
    missing : float
    objective, metric : callable or None
    early_stopping_rounds : int or None
    maximize : bool or None
        Whether the last metric of the validation data is maximized; by default the library's rule.
    checkpoint_rounds : int or None
    """

    params: dict[str, Any]
    stop_at: int
    columns: TreeColumns
    missing: float
    _: KW_ONLY
    objective: Objective | None = None
    metric: Metric | None = None
    early_stopping_rounds: int | None = None
    maximize: bool | None = None
    checkpoint_rounds: int | None = None
    imports_torch: ClassVar[bool] = False

    def __call__(self, worker: Worker) -> None:
        """Train; rank 0 sends the trees at each checkpoint and at the end."""
        data = shared_model(worker)
        facts = {} if data is None else read_trees(data).read_facts()
        with matrix_folder(worker) as folder:
            shards = whole_groups(worker, self.columns, folder)
            known = facts.get("categories")
            matrices, categories = shard_matrices(worker, shards, self.columns, known)
            facts = {
                "categories": categories,
                "features": self.columns.features,
                "widths": matrices["data"].widths,
                "labels": self.columns.labels,
                "categorical": self.columns.categorical,
                "missing": None if np.isnan(self.missing) else self.missing,
            }
            self._train(worker, matrices, folder, data, facts)

    @abstractmethod
    def _train(
        self,
        worker: Worker,
        matrices: dict[str, ShardMatrix],
        folder: str,
        data: bytes | None,
        facts: dict[str, Any],
    ) -> None:
        """Grow the trees, after those of `data`, and send them."""


def send_trees(
    worker: Worker,
    data: bytes,
    facts: dict[str, Any],
    history: list[dict[str, float]],
    *,
    is_complete: bool = False,
) -> None:
    """Send the trees and the history of their rounds to the driver."""
    doc = {"history": history, "is_complete": is_complete}
    worker.send(CHECKPOINT, doc, read_trees(data).with_facts(facts))


def monitored_metric(entry: Mapping[str, float], argument: str) -> str:
    """Return the name of the metric that stops a fit early: the last of the validation data.

    Parameters
    ----------
    entry : mapping of str to float
        Metrics of a round.
    argument : str
        Parameter of the library with the metrics, for the message.
    """
    names = [name for name in entry if name.startswith("validation_")]
    if not names:
        raise UsageError(
            f"early_stopping_rounds needs a metric of validation_data; pass {argument}=",
            code="argument-missing",
            argument=argument,
        )
    return names[-1]


def best_round(history: Sequence[Mapping[str, float]], metric: str, maximize: bool) -> int:
    """Return the index of the round with the best metric; NaN is worse than any number."""
    scores = np.array([entry[metric] for entry in history], np.float64)
    scores[np.isnan(scores)] = -np.inf if maximize else np.inf
    return int(np.argmax(scores) if maximize else np.argmin(scores))


def shared_model(worker: Worker) -> bytes | None:
    """Return the trees that the driver sent to rank 0, on all workers; None without any."""
    if not worker.options["has_model"]:
        return None
    if worker.rank == 0:
        data = worker.state()
        if worker.world_size > 1:
            worker.channel.put_bytes(_MODEL, data)
        return data
    return worker.channel.take_bytes(_MODEL, delete=False)


def check_width(matrix: ShardMatrix, expected: int) -> None:
    """Raise a UsageError if rows have another number of features than the trees."""
    if matrix.width != expected:
        raise UsageError(
            f"The trees were trained with {expected} features, got {matrix.width}; pass the "
            "columns of the fit",
            code="model-input",
        )


def whole_groups(worker: Worker, columns: TreeColumns, folder: str) -> dict[str, Shard]:
    """Return the shards of a worker, with whole groups of a ranking."""
    if columns.group is None or worker.world_size == 1:
        return worker.shards
    from bigdl.orca.learn.trees.groups import exchange_groups

    return exchange_groups(worker, columns.group, folder)


@contextlib.contextmanager
def matrix_folder(worker: Worker) -> Iterator[str]:
    """Context manager that yields a folder in the spool, which is removed with it at the latest."""
    parent = worker.shards["data"].spool.path
    with tempfile.TemporaryDirectory(
        dir=parent, prefix="matrix-", ignore_cleanup_errors=True
    ) as folder:
        yield folder


def check_unencrypted(worker: Worker, library: str) -> None:
    """Raise a UsageError if the cluster encrypts, which the sockets of a library do not.

    Parameters
    ----------
    worker : Worker
    library : str
        Name of the library, for the message.
    """
    if worker.certificate is not None:
        raise UsageError(
            f"This cluster asks for encryption, but {library} cannot encrypt the traffic between "
            "workers (histograms of the training); use one worker, or, where the network between "
            "the workers is trusted, set BIGDL_CLEAR_COLLECTIVES=1 for the driver",
            code="unsupported",
        )
