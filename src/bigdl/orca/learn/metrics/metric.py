"""A metric as the user gives it to an Estimator: one of ours, of torchmetrics, or a function."""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.metrics.state import (
    TensorMetric,
    TorchMetric,
    batch_to_cpu,
    check_keys,
    row_count,
)

if TYPE_CHECKING:
    import torch

    from bigdl.orca.learn.metrics.state import Reduction

__all__ = ["METRICS_BY_NAME", "CustomizedMetric", "Metric"]


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

        return _convert_metrics(metrics, backend)

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


class CustomizedMetric(Metric):
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

    def _torch_metric(self) -> TorchMetric:
        return _WeightedMean(self.get_name(), self.fn)


class _WeightedMean(TensorMetric):
    reductions: Mapping[str, Reduction] = {"total": "sum", "rows": "sum"}

    def __init__(self, name: str, fn: Callable[[Any, Any], Any]):
        self._fn = fn
        super().__init__(name)

    def _initial_state(self):
        import torch

        return {"total": torch.tensor(0.0, dtype=torch.float64), "rows": torch.tensor(0)}

    def _batch_state(self, preds, targets):
        import torch

        value = self._fn(preds, targets)
        try:
            value = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"the function of the metric {self.name} must return one number per batch, "
                f"got {value!r}"
            ) from error
        rows = row_count(self.name, preds, targets)
        total = torch.tensor(value * rows, dtype=torch.float64)
        return {"total": total, "rows": torch.tensor(rows)}

    def compute(self):
        state = self.state()
        return (state["total"] / state["rows"]).float()


def is_torchmetrics(value: Any) -> bool:
    """Tell whether `value` is a ``torchmetrics.Metric``, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


class TorchmetricsMetric(Metric):
    """A ``torchmetrics.Metric`` instance, of which every worker gets its own empty copy.

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
        self.metric = metric
        _torchmetrics_reductions(metric)

    def get_name(self) -> str:
        """Return the class name of the torchmetrics object."""
        return type(self.metric).__name__

    def _torch_metric(self) -> TorchMetric:
        return _Torchmetrics(self.get_name(), self.metric)


_UPDATES = ".updates"  # no attribute of a torchmetrics object


class _Torchmetrics(TorchMetric):
    """The contract of TorchMetric on a torchmetrics object.

    A list state ``x`` becomes two 1-D tensors, ``x`` with all elements and ``x.shapes`` with
    (ndim, size, size, ...) of each entry, so that it comes back entry by entry.
    """

    def __init__(self, name: str, metric: Any):
        self._metric = metric.clone().cpu()
        self._lists, self.reductions = _torchmetrics_reductions(self._metric)
        for part in _metrics_within(self._metric).values():
            # compute() must not start a collective of its own: only some ranks may call it
            part.sync_on_compute = part._to_sync = part.dist_sync_on_step = False
        super().__init__(name)

    def update(self, preds, targets):
        self._metric.update(batch_to_cpu(preds), batch_to_cpu(targets))
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

    def state(self):
        import torch

        state = {_UPDATES: torch.tensor(self._updates)}
        for prefix, part in _metrics_within(self._metric).items():
            for attribute in part._defaults:
                key, value = prefix + attribute, getattr(part, attribute)
                if key in self._lists:
                    state[key], state[key + ".shapes"] = _pack(self.name, attribute, value)
                elif self._updates:
                    state[key] = value.detach().cpu().clone()
                else:  # takes no part in a merge: its shape may depend on the rows
                    state[key] = torch.zeros(0)
        return state

    def load_state(self, state):
        check_keys(state, self.reductions)
        self.reset()
        self._updates = int(state[_UPDATES])
        if not self._updates:
            return
        for prefix, part in _metrics_within(self._metric).items():
            part._update_count = self._updates
            for attribute in part._defaults:
                key = prefix + attribute
                if key in self._lists:
                    setattr(part, attribute, _unpack(state[key], state[key + ".shapes"]))
                else:
                    setattr(part, attribute, state[key].clone())


def _metrics_within(metric: Any) -> dict[str, Any]:
    """Return the metric and those it is composed of (``a + b``) by the prefix of their states."""
    import torchmetrics

    return {
        f"{path}." if path else "": module
        for path, module in metric.named_modules()
        if isinstance(module, torchmetrics.Metric)
    }


def _torchmetrics_reductions(metric: Any) -> tuple[set[str], dict[str, Reduction]]:
    """Return the keys of list states, and how every tensor of the state merges."""
    from torchmetrics.utilities import data
    from torchmetrics.wrappers.abstract import WrapperMetric

    known: dict[Any, Reduction] = {
        data.dim_zero_sum: "sum",
        data.dim_zero_max: "max",
        data.dim_zero_min: "min",
    }
    lists: set[str] = set()
    reductions: dict[str, Reduction] = {_UPDATES: "sum"}
    for prefix, part in _metrics_within(metric).items():
        refuse = UsageError(
            f"the torchmetrics metric {type(part).__name__} cannot be merged across workers "
            "without changing its figure; its states must be lists, or tensors that merge by sum, "
            "max or min"
        )
        if isinstance(part, WrapperMetric):
            raise refuse
        for attribute, default in part._defaults.items():
            key, reduction = prefix + attribute, part._reductions[attribute]
            if isinstance(default, list) and reduction in (None, data.dim_zero_cat):
                lists.add(key)
                reductions[key] = reductions[key + ".shapes"] = "cat"
            elif not isinstance(default, list) and reduction in known:
                reductions[key] = known[reduction]
            else:
                raise refuse
    if len(reductions) == 1:
        raise UsageError(
            f"the torchmetrics metric {type(metric).__name__} has no state made by add_state(), so "
            "nothing of it can be merged across workers"
        )
    return lists, reductions


def _pack(name: str, attribute: str, entries: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    entries = [entries] if isinstance(entries, torch.Tensor) else entries
    if not all(isinstance(entry, torch.Tensor) for entry in entries):
        raise UsageError(
            f"the state {attribute!r} of the torchmetrics metric {name} does not consist of "
            "tensors, so it cannot be merged across workers"
        )
    shapes = [size for entry in entries for size in (entry.ndim, *entry.shape)]
    flat = [entry.detach().cpu().flatten() for entry in entries if entry.numel()]
    return torch.cat(flat) if flat else torch.zeros(0), torch.tensor(shapes, dtype=torch.int64)


def _unpack(flat: torch.Tensor, shapes: torch.Tensor) -> list[torch.Tensor]:
    entries, start, sizes = [], 0, iter(shapes.tolist())
    for ndim in sizes:
        shape = [next(sizes) for _ in range(ndim)]
        stop = start + math.prod(shape)
        entries.append(flat[start:stop].clone().reshape(shape))
        start = stop
    return entries


METRICS_BY_NAME: dict[str, type[Metric]] = {}
"""Classes by their names in lower case; the modules that define metrics add theirs."""
_ALIASES = {
    "acc": "accuracy",
    "auroc": "auc",
    "f1": "f1score",
    "meanabsoluteerror": "mae",
    "meansquarederror": "mse",
}
_CONTRACT = ("__call__", "compute", "reset", "state", "load_state", "merge", "reductions")


def _convert_metrics(metrics: Any, backend: str | None) -> list[TorchMetric]:
    """Do the work of :meth:`Metric.convert_metrics_list`."""
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


def _unused(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate.lower() in taken:  # fit reports val_<name in lower case>
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _to_state(metric: Any, backend: str | None) -> TorchMetric:
    if _follows_contract(metric):
        state = copy.deepcopy(metric)
        state.reset()
        state.name = getattr(metric, "name", type(metric).__name__)
        return state
    return _to_metric(metric).get_metric(backend)


def _follows_contract(metric: Any) -> bool:
    if isinstance(metric, type) or is_torchmetrics(metric):
        return False
    return all(hasattr(metric, attribute) for attribute in _CONTRACT)


def _to_metric(metric: Any) -> Metric:
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        return _by_name(metric)
    if isinstance(metric, type):
        raise UsageError(f"{metric.__name__} is a class; as a metric pass an instance of it")
    if is_torchmetrics(metric):
        return TorchmetricsMetric(metric)
    if callable(metric) and not hasattr(metric, "compute"):
        return CustomizedMetric(metric)
    if callable(metric):
        raise UsageError(
            f"{type(metric).__name__} has a compute() but no state that can be merged across "
            "workers; pass an Orca Metric, a torchmetrics.Metric or a function fn(preds, targets), "
            "or give it the methods of bigdl.orca.learn.metrics.TorchMetric"
        )
    raise UsageError(
        f"a metric is expected to be an Orca Metric, the name of one, a torchmetrics.Metric or a "
        f"function fn(preds, targets), got {metric!r} ({type(metric).__name__})"
    )


def _by_name(name: str) -> Metric:
    key = name.lower().replace("_", "").replace("-", "").replace(" ", "")
    key = _ALIASES.get(key, key)
    if key not in METRICS_BY_NAME:
        known = ", ".join(sorted(cls.__name__ for cls in METRICS_BY_NAME.values()))
        raise UsageError(f"there is no metric of the name {name!r}; known names are: {known}")
    return METRICS_BY_NAME[key]()
