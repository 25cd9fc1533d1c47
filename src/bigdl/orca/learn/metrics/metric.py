"""A metric as the user gives it to an Estimator: one of ours, of torchmetrics, or a function."""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.metrics.state import TensorState, TorchMetric, check_keys, row_count
from bigdl.training.device import to_cpu

if TYPE_CHECKING:
    import torch

    from bigdl.orca.learn.metrics.state import Reduction, State

__all__ = ["CustomizedMetric", "MergedMetric", "Metric"]


class Metric(ABC):
    """A metric by name and parameters; it holds no data.

    The Estimator keeps it on the driver, sends it to the workers, and calls :meth:`get_metric`
    once per evaluation and worker.  A subclass stores its parameters in the constructor and
    implements :meth:`_torch_metric`.
    """

    def get_name(self) -> str:
        """Return the name under which the figure is reported."""
        return type(self).__name__

    def get_metric(self, backend: str | None = None) -> TorchMetric:
        """Make a fresh state for one evaluation.

        Parameters
        ----------
        backend : {None, "pytorch"}
            The framework whose tensors will be fed.

        Returns
        -------
        TorchMetric

        Raises
        ------
        UsageError
            If `backend` is another one.
        """
        if backend not in (None, "pytorch"):
            raise UsageError(
                f'{self.get_name()} exists for the backend "pytorch", but {backend!r} was asked for'
            )
        return self._torch_metric()

    @abstractmethod
    def _torch_metric(self) -> TorchMetric:
        """Make the torch state; called on every worker."""

    @staticmethod
    def convert_metrics_list(metrics: Any, backend: str | None = None) -> list[TorchMetric]:
        """Make fresh states from whatever a user may pass as ``metrics=``.

        Parameters
        ----------
        metrics : object, sequence of object, or None
            Each object is a :class:`Metric`, the name of one (``"accuracy"``, ``"mse"``, ...;
            case and underscores do not matter), a ``torchmetrics.Metric`` instance (copied, never
            touched), a function ``fn(preds, targets)`` (see :class:`CustomizedMetric`), or an
            object that follows the contract of :class:`TorchMetric`.
        backend : {None, "pytorch"}
            The framework whose tensors will be fed.

        Returns
        -------
        list of TorchMetric
            In the order metric; names are unique, also when case is ignored (a second
            ``Precision`` becomes ``Precision_2``).

        Raises
        ------
        UsageError
            If an object is none of these, or its state cannot be merged across workers.
        """
        if metrics is None:
            metrics = []
        elif not isinstance(metrics, list | tuple):
            metrics = [metrics]
        states = [_to_state(metric, backend) for metric in metrics]
        taken: set[str] = set()
        for state in states:
            state.name = _unused(state.name, taken)
            taken.add(state.name.lower())
        return states

    @staticmethod
    def convert_metrics_dict(metrics: Any, backend: str | None = None) -> dict[str, TorchMetric]:
        """Do as :meth:`convert_metrics_list`, keyed by name.

        Parameters
        ----------
        metrics : object, sequence of object, or None
            See :meth:`convert_metrics_list`.
        backend : {None, "pytorch"}
            The framework whose tensors will be fed.

        Returns
        -------
        dict of str to TorchMetric

        Raises
        ------
        UsageError
            As :meth:`convert_metrics_list`.
        """
        return {metric.name: metric for metric in Metric.convert_metrics_list(metrics, backend)}


class MergedMetric(Metric):
    """Base of the metrics whose state is a few tensors; as it is, a total and a count of terms."""

    reductions: Mapping[str, Reduction] = {"total": "sum", "count": "sum"}
    takes_weights = True

    def _torch_metric(self) -> TorchMetric:
        return TensorState(self)

    @abstractmethod
    def _batch_state(self, preds: Any, targets: Any, weights: Any = None) -> State:
        """Return the state of a worker that has seen this batch only.

        Weights of the rows are handed in where ``takes_weights`` says so and there are any.
        """

    def _figure(self, state: State) -> torch.Tensor:
        """Return the figure of a state; its tensors are empty when there was no row."""
        return (state["total"].sum() / state["count"].sum()).float()


class CustomizedMetric(MergedMetric):
    """The mean over batches of a function of the user, weighted by rows.

    For a function that is itself a mean over rows, such as a loss, this is the mean over all rows.
    For any other (a quantile, a correlation) the figure depends on how rows were cut into batches,
    and so on the batch size and the number of workers: write those as a ``torchmetrics.Metric``.

    Parameters
    ----------
    fn : callable
        ``fn(preds, targets) -> number`` or tensor with one element; it receives the batch as the
        model returned it, on the model's device, without gradients.
    name : str, optional
        The name under which the figure is reported; by default that of the function, or
        ``"CustomizedMetric"`` for a lambda.

    Raises
    ------
    UsageError
        If `fn` is not callable.
    """

    takes_weights = False

    def __init__(self, fn: Callable[[Any, Any], Any], name: str | None = None):
        if not callable(fn):
            raise UsageError(
                f"CustomizedMetric expects a function fn(preds, targets), got {fn!r} "
                f"({type(fn).__name__})"
            )
        self.fn = fn
        self.name = name

    def get_name(self) -> str:
        """Return the name under which the figure is reported."""
        if self.name is not None:
            return self.name
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return "CustomizedMetric" if name == "<lambda>" else name

    def _batch_state(self, preds, targets, weights=None):
        import torch

        value = self.fn(preds, targets)
        try:
            value = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"the function of the metric {self.get_name()} must return one number per batch, "
                f"got {value!r}"
            ) from error
        rows = row_count(self.get_name(), preds, targets)
        total = torch.tensor(value * rows, dtype=torch.float64)
        return {"total": total, "count": torch.tensor(rows)}


def is_torchmetrics(value: Any) -> bool:
    """Tell whether `value` is a ``torchmetrics.Metric``, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


class TorchmetricsState(TorchMetric):
    """The contract of TorchMetric on an empty copy of a ``torchmetrics.Metric``.

    Tensor states that merge by sum, max or min and list states (joined) are supported, so the
    figure is as exact as torchmetrics' own sums.  It is what the object's ``compute()`` returns.

    Parameters
    ----------
    metric : torchmetrics.Metric
        It is copied, never fed.

    Raises
    ------
    UsageError
        If a state merges in another way (by a mean, by a function of its own, not at all), so that
        the figure would depend on the number of workers.
    """

    def __init__(self, metric: Any):
        self._metric = metric.clone().cpu()
        self.reductions = _torchmetrics_reductions(self._metric)
        for part in _metrics_within(self._metric).values():
            # compute() must not start a collective of its own: only some ranks may call it
            part.sync_on_compute = part._to_sync = part.dist_sync_on_step = False
        super().__init__(type(metric).__name__)

    def update(self, preds, targets):
        self._metric.update(to_cpu(preds), to_cpu(targets))
        self._updates += 1

    def reset(self):
        self._metric.reset()
        self._updates = 0

    def compute(self):
        import torch

        if not self._updates:
            return torch.tensor(float("nan"))
        with torch.no_grad():
            return self._metric.compute()

    def _attributes(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the key of each state, the metric that has it, and the attribute's name."""
        for prefix, part in _metrics_within(self._metric).items():
            for attribute in part._defaults:
                yield prefix + attribute, part, attribute

    def state(self):
        import torch

        state: dict[str, Any] = {_UPDATES: torch.tensor(self._updates)}
        for key, part, attribute in self._attributes():
            value = getattr(part, attribute)
            if self.reductions[key] == "cat":
                entries = value if isinstance(value, list) else [value]
                state[key] = [_plain(entry) for entry in entries]
            else:  # without rows it takes no part in a merge: its shape may depend on the rows
                state[key] = _plain(value) if self._updates else torch.zeros(0)
        return state

    def load_state(self, state):
        check_keys(state, self.reductions)
        self.reset()
        self._updates = int(state[_UPDATES])
        if not self._updates:
            return
        for key, part, attribute in self._attributes():
            part._update_count = self._updates
            value = state[key]
            is_list = isinstance(value, list)
            setattr(part, attribute, [v.clone() for v in value] if is_list else value.clone())


_UPDATES = ".updates"  # no attribute of a torchmetrics object


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy without a gradient, on the CPU."""
    return tensor.detach().cpu().clone()


def _metrics_within(metric: Any) -> dict[str, Any]:
    """Return the metric and those it is composed of (``a + b``) by the prefix of their states."""
    import torchmetrics

    return {
        f"{path}." if path else "": module
        for path, module in metric.named_modules()
        if isinstance(module, torchmetrics.Metric)
    }


def _torchmetrics_reductions(metric: Any) -> dict[str, Reduction]:
    """Return how every state merges; ``"cat"`` is a list of tensors."""
    from torchmetrics.utilities import data
    from torchmetrics.wrappers.abstract import WrapperMetric

    known: dict[tuple[bool, Any], Reduction] = {
        (False, data.dim_zero_sum): "sum",
        (False, data.dim_zero_max): "max",
        (False, data.dim_zero_min): "min",
        (True, data.dim_zero_cat): "cat",
        (True, None): "cat",
    }
    reductions: dict[str, Reduction] = {_UPDATES: "sum"}
    for prefix, part in _metrics_within(metric).items():
        for attribute, default in part._defaults.items():
            reduction = isinstance(default, list), part._reductions[attribute]
            if isinstance(part, WrapperMetric) or reduction not in known:
                raise UsageError(
                    f"the torchmetrics metric {type(part).__name__} cannot be merged across "
                    "workers without changing its figure; its states must be lists, or tensors "
                    "that merge by sum, max or min"
                )
            reductions[prefix + attribute] = known[reduction]
    if len(reductions) == 1:
        raise UsageError(
            f"the torchmetrics metric {type(metric).__name__} has no state made by add_state(), so "
            "nothing of it can be merged across workers"
        )
    return reductions


_ALIASES = {
    "acc": "accuracy",
    "auroc": "auc",
    "f1": "f1score",
    "meanabsoluteerror": "mae",
    "meansquarederror": "mse",
}
_CONTRACT = ("__call__", "compute", "reset", "state", "load_state", "merge", "reductions")


def _unused(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate.lower() in taken:  # fit reports val_<name in lower case>
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _to_state(metric: Any, backend: str | None) -> TorchMetric:
    if isinstance(metric, Metric):
        return metric.get_metric(backend)
    if isinstance(metric, str):
        return _by_name(metric).get_metric(backend)
    if isinstance(metric, type):
        raise UsageError(f"{metric.__name__} is a class; as a metric pass an instance of it")
    if is_torchmetrics(metric):
        return TorchmetricsState(metric)
    if all(hasattr(metric, attribute) for attribute in _CONTRACT):
        state = copy.deepcopy(metric)
        state.reset()
        state.name = getattr(metric, "name", type(metric).__name__)
        return state
    if not callable(metric):
        raise UsageError(
            f"a metric is expected to be an Orca Metric, the name of one, a torchmetrics.Metric or "
            f"a function fn(preds, targets), got {metric!r} ({type(metric).__name__})"
        )
    if hasattr(metric, "compute"):
        raise UsageError(
            f"{type(metric).__name__} has a compute() but no state that can be merged across "
            "workers; pass an Orca Metric, a torchmetrics.Metric or a function fn(preds, targets), "
            "or give it the methods of bigdl.orca.learn.metrics.TorchMetric"
        )
    return CustomizedMetric(metric).get_metric(backend)


def _by_name(name: str) -> Metric:
    from bigdl.orca.learn.metrics import named

    key = name.lower().replace("_", "").replace("-", "").replace(" ", "")
    classes = {each.lower(): getattr(named, each) for each in named.__all__}
    cls = classes.get(_ALIASES.get(key, key))
    if cls is None:
        raise UsageError(
            f"there is no metric of the name {name!r}; known names are: {', '.join(named.__all__)}"
        )
    return cls()
