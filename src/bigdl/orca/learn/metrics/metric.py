"""Metric base classes, their mergeable states, and the registry of metric names.

A metric is a :class:`Metric`, a torchmetrics object, a function or a registered name.
"""

from __future__ import annotations

import copy
import difflib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from bigdl.common.errors import LazyModule, UsageError
from bigdl.common.plugins import Registry
from bigdl.training.state import to_cpu

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]
    Reduction = Literal["sum", "cat", "max", "min"]
    import torchmetrics

    from bigdl.common.types import Tensors
else:
    torch = LazyModule("torch", "orca")


class TorchMetric(ABC):
    """Mergeable state of one metric on one worker.

    A worker calls the object once per batch and returns :meth:`state` at the end.
    :func:`merge_states` merges the states of all workers in rank order. An object of the same class
    and parameters loads the merged state and computes the metric. A merged state can be updated and
    merged further.

    Parameters
    ----------
    name : str
        Name under which the metric is reported.

    Attributes
    ----------
    reductions : dict of str to {"sum", "cat", "max", "min"}
        Merge operation of each state tensor, see :func:`merge_states`.
    takes_weights : bool
        Whether row weights are supported. If so, a row of weight 2 counts as two rows, a row of
        weight 0 is ignored, and :meth:`update` takes the weights as its third argument.
    takes : {"", "probability", "distribution", "score"}
        Form of the predictions, for an Estimator whose loss implies that the model returns logits:
        "probability" is their sigmoid (``nn.BCEWithLogitsLoss``), "distribution" their softmax,
        and "score" the difference of two columns (``nn.CrossEntropyLoss``, ``nn.NLLLoss``). ""
        is the unchanged output.

    Examples
    --------
    A custom metric that is not a mean, here the largest error:

    >>> import torch
    >>> from bigdl.orca.learn.metrics import TorchMetric, merge_states
    >>> class LargestError(TorchMetric):
    ...     reductions = {"largest": "max"}
    ...     def reset(self):
    ...         self.largest = torch.tensor(0.0)
    ...     def update(self, preds, targets):
    ...         self.largest = torch.maximum(self.largest, (preds - targets).abs().max())
    ...     def compute(self):
    ...         return self.largest
    ...     def state(self):
    ...         return {"largest": self.largest.clone()}
    ...     def load_state(self, state):
    ...         self.largest = state["largest"].clone()
    >>> metric = LargestError("largest_error")
    >>> metric.reset()
    >>> metric(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 5.0]))
    >>> metric.compute()
    tensor(3.)
    """

    reductions: Mapping[str, Reduction] = {}
    takes_weights = False
    takes: Literal["", "probability", "distribution", "score"] = ""

    def __init__(self, name: str):
        self.name = name
        self.reset()

    def __call__(self, preds: Tensors, targets: Tensors, weights: Tensors | None = None) -> None:
        """Update the state with one batch.

        Parameters
        ----------
        preds, targets : torch.Tensor
            Model output and targets, with any number of rows (including 0), on any device. They are
            not modified.
        weights : torch.Tensor, shape (rows,) or (rows, 1), optional
            Weight of each row, >= 0; default 1.

        Raises
        ------
        UsageError
            If `weights` is passed and the metric does not support weights.
        """
        if weights is not None and not self.takes_weights:
            raise UsageError(
                f"The metric {self.name} does not support row weights; remove it, or remove "
                "weight_col",
                code="metric-unsupported",
                metric=self.name,
            )
        with torch.no_grad():
            if row_count(self.name, preds, targets):
                self.update(preds, targets, *(() if weights is None else (weights,)))

    @abstractmethod
    def update(self, preds: object, targets: object) -> None:
        """Update the state with a batch of at least one row; gradients are disabled."""

    @abstractmethod
    def compute(self) -> torch.Tensor:
        """Return the metric as a 0-D float32 tensor, or nan if there were no rows."""

    @abstractmethod
    def reset(self) -> None:
        """Clear the state."""

    @abstractmethod
    def state(self) -> State:
        """Return a copy of the state with all tensors on the CPU."""

    @abstractmethod
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state with a copy of another state.

        Raises
        ------
        UsageError
            If its keys differ from this metric's keys.
        """

    def merge(self, other_state: Mapping[str, torch.Tensor]) -> None:
        """Merge another state into this one; append the other state's rows after this state's."""
        self.load_state(merge_states([self.state(), other_state], self.reductions))


class TensorState(TorchMetric):
    """State of a MergedMetric: a few tensors that are merged over batches and workers.

    Parameters
    ----------
    metric : MergedMetric
    """

    def __init__(self, metric: MergedMetric):
        self._metric, self.reductions = metric, metric.reductions
        self.takes_weights, self.takes = metric.takes_weights, metric.takes
        self.drops_ignored_labels = metric.drops_ignored_labels
        super().__init__(metric.get_name())

    def __call__(
        self,
        preds: Any,
        targets: Tensors,
        weights: Tensors | None = None,
        *,
        threshold: float | None = None,
    ) -> None:
        """Update the state with one batch.

        Parameters
        ----------
        preds, targets, weights
            See :meth:`TorchMetric.__call__`.
        threshold : float, optional
            Binarize the predictions: values above the threshold become 1, others 0.
        """
        if threshold is not None:
            preds = (preds > threshold).to(preds.dtype)
        super().__call__(preds, targets, weights)

    def update(self, preds: Tensors, targets: Tensors, *weights: Tensors) -> None:
        """Update the state with a batch of at least one row; gradients are disabled."""
        for key, tensor in self._metric._batch_state(preds, targets, *weights).items():
            parts = [*self._parts[key], tensor]
            # concatenate once, in state(), instead of once per batch
            is_joined = self.reductions[key] == "cat"
            self._parts[key] = (
                parts if is_joined else [merge_tensors(key, parts, self.reductions[key])]
            )

    def compute(self) -> torch.Tensor:
        """Return the value of the metric."""
        return self._metric._value(self.state())

    def reset(self) -> None:
        """Clear the state."""
        self._parts: dict[str, list[torch.Tensor]] = {key: [] for key in self.reductions}

    def state(self) -> State:
        """Return a copy of the state with all tensors on the CPU."""
        return {
            key: merge_tensors(key, self._parts[key], how) for key, how in self.reductions.items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state with a copy of another state."""
        check_keys(state, self.reductions)
        self._parts = {key: [state[key].clone()] for key in self.reductions}


def merge_states(
    states: Sequence[Mapping[str, torch.Tensor]], reductions: Mapping[str, Reduction]
) -> State:
    """Merge the states of all workers into the state of a single worker with all rows.

    Parameters
    ----------
    states : sequence of dict of str to torch.Tensor
        One state per worker, in rank order.
    reductions : dict of str to {"sum", "cat", "max", "min"}
        ``TorchMetric.reductions``. "cat" concatenates 1-D tensors, or lists of tensors for
        torchmetrics, in the order of `states`. The others reduce tensors of equal shape
        elementwise. Empty tensors come from workers without rows and are skipped, whatever their
        shape and dtype.

    Returns
    -------
    dict of str to torch.Tensor

    Raises
    ------
    UsageError
        If `states` is empty, or the states belong to different metrics.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import MSE, merge_states
    >>> one, two = MSE().get_metric(), MSE().get_metric()
    >>> one(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]))
    >>> two(torch.tensor([1.0]), torch.tensor([5.0]))
    >>> one.load_state(merge_states([one.state(), two.state()], one.reductions))
    >>> one.compute()  # over four rows; the mean of both workers' values would be 8
    tensor(4.)
    """
    if not states:
        raise UsageError(
            "merge_states expects the state of at least one worker, got none", code="data-empty"
        )
    for state in states:
        check_keys(state, reductions)
    return {
        key: merge_tensors(key, [s[key] for s in states], how) for key, how in reductions.items()
    }


def check_keys(state: Mapping[str, Any], reductions: Mapping[str, Any]) -> None:
    """Raise a UsageError unless `state` has exactly the keys of `reductions`."""
    if set(state) != set(reductions):
        raise UsageError(
            f"a metric state should have the keys {sorted(reductions)}, got {sorted(state)}",
            code="data-structure",
        )


_OPERATIONS = {"sum": "sum", "max": "amax", "min": "amin"}


@overload
def merge_tensors(
    key: str, values: Sequence[torch.Tensor], reduction: Reduction
) -> torch.Tensor: ...
@overload
def merge_tensors(
    key: str, values: Sequence[list[torch.Tensor]], reduction: Reduction
) -> list[torch.Tensor]: ...
def merge_tensors(
    key: str, values: Sequence, reduction: Reduction
) -> torch.Tensor | list[torch.Tensor]:
    """Merge the values of one state key from several states: reduce tensors, or join lists."""
    if any(isinstance(value, list) for value in values):
        return [tensor for tensors in values for tensor in tensors]
    filled = [tensor for tensor in values if tensor.numel()]
    if not filled:
        return torch.zeros(0)
    if reduction == "cat":
        return torch.cat(filled)
    shapes = {tuple(tensor.shape) for tensor in filled}
    if len(shapes) > 1:
        raise UsageError(
            f"the state tensors {key!r} have different shapes {sorted(shapes)}; every batch must "
            "have "
            "the same number of classes",
            code="data-shape",
        )
    return getattr(torch, _OPERATIONS[reduction])(torch.stack(filled), dim=0)


# -- metrics ---------------------------------------------------------------------------------------


class Metric(ABC):
    """Base class of metrics, which hold a name and parameters but no state.

    The Estimator keeps it on the driver, ships it to the workers, and calls :meth:`get_metric` once
    per evaluation and worker.  A subclass stores its parameters in the constructor and implements
    :meth:`_torch_metric`.

    Examples
    --------
    >>> from bigdl.orca.learn.metrics import AUC, Metric
    >>> [metric.name for metric in Metric.convert_metrics_list([AUC(), "accuracy"])]
    ['AUC', 'Accuracy']
    """

    def get_name(self) -> str:
        """Return the name under which the metric is reported."""
        return type(self).__name__

    def get_metric(self, backend: str | None = None) -> TorchMetric:
        """Create an empty state for one evaluation.

        Parameters
        ----------
        backend : {None, "pytorch"}
            Framework of the batches' tensors.

        Returns
        -------
        TorchMetric

        Raises
        ------
        UsageError
            If `backend` is not supported.
        """
        if backend not in (None, "pytorch"):
            raise UsageError(
                f"{self.get_name()} supports backend='pytorch' only, got {backend!r}",
                code="unsupported",
            )
        return self._torch_metric()

    @abstractmethod
    def _torch_metric(self) -> TorchMetric:
        """Create the metric's TorchMetric state; called on every worker."""

    @staticmethod
    def convert_metrics_list(metrics: object, backend: str | None = None) -> list[TorchMetric]:
        """Create empty states from the ``metrics=`` argument of an Estimator.

        Parameters
        ----------
        metrics : object, sequence of object, or None
            Each object is a :class:`Metric`, a metric name (``"accuracy"``, ``"mse"``, ...; case
            and underscores are ignored), a ``torchmetrics.Metric`` instance (copied, not modified),
            a ``torchmetrics.MetricCollection`` (reported under its names, including `prefix` and
            `postfix`), a function ``fn(preds, targets)`` (see :class:`CustomizedMetric`), or an
            object with the methods of :class:`TorchMetric`.
        backend : {None, "pytorch"}
            Framework of the batches' tensors.

        Returns
        -------
        list of TorchMetric
            In the order of `metrics`. Names are unique ignoring case (a second ``Precision``
            becomes ``Precision_2``).

        Raises
        ------
        UsageError
            If an object has another type, or its state cannot be merged across workers.
        """
        if metrics is None:
            metrics = []
        elif not isinstance(metrics, list | tuple):
            metrics = [metrics]
        states = [state for metric in metrics for state in _to_states(metric, backend)]
        taken: set[str] = set()
        for state in states:
            state.name = _unique_name(state.name, taken)
            taken.add(state.name.lower())
        return states

    @staticmethod
    def convert_metrics_dict(metrics: object, backend: str | None = None) -> dict[str, TorchMetric]:
        """Create empty states as :meth:`convert_metrics_list` does, keyed by name.

        Parameters
        ----------
        metrics : object, sequence of object, or None
            See :meth:`convert_metrics_list`.
        backend : {None, "pytorch"}
            Framework of the batches' tensors.

        Returns
        -------
        dict of str to TorchMetric

        Raises
        ------
        UsageError
            See :meth:`convert_metrics_list`.
        """
        return {metric.name: metric for metric in Metric.convert_metrics_list(metrics, backend)}


class MergedMetric(Metric):
    """Base class of metrics whose state is a few tensors, by default a total and a count."""

    reductions: Mapping[str, Reduction] = {"total": "sum", "count": "sum"}
    takes_weights = True
    takes: Literal["", "probability", "distribution", "score"] = ""
    drops_ignored_labels = True  # whether labels that the Estimator's loss ignores are dropped

    def _torch_metric(self) -> TorchMetric:
        return TensorState(self)

    @abstractmethod
    def _batch_state(
        self, preds: Tensors, targets: Tensors, weights: Tensors | None = None
    ) -> State:
        """Return the state of a single batch.

        `weights` is passed only if ``takes_weights`` is True and the rows have weights.
        """

    def _value(self, state: State) -> torch.Tensor:
        """Compute the metric from a state; all tensors are empty if there were no rows."""
        return (state["total"].sum() / state["count"].sum()).float()


def row_count(name: str, preds: Tensors, targets: Tensors) -> int:
    """Return the number of rows of a nested batch, taken from its first tensor."""
    for leaf in _leaves([targets, preds]):
        return leaf.shape[0] if leaf.ndim else 1
    raise UsageError(
        f"{name}: preds and targets must contain tensors, got {type(preds).__name__} and "
        f"{type(targets).__name__}",
        code="data-type",
        metric=name,
    )


def _leaves(batch: object) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for item in batch:
            yield from _leaves(item)
    elif hasattr(batch, "shape") and hasattr(batch, "ndim"):
        yield batch


class CustomizedMetric(MergedMetric):
    """Mean of a user function over batches, weighted by the number of rows in each batch.

    If the function is a mean over rows, such as a loss, the result is the mean over all rows.
    Otherwise (a quantile, a correlation) the result depends on the batch size and the number of
    workers; implement such a metric as a ``torchmetrics.Metric``.

    Parameters
    ----------
    compute_function : callable
        ``fn(preds, targets)``, which returns a number or a tensor with one element. It receives the
        batch as the model returned it, on the model's device, without gradients.
    name : str, optional
        Name under which the metric is reported; default the name of the function, or
        ``"CustomizedMetric"`` for a lambda.

    Raises
    ------
    UsageError
        If `compute_function` is not callable.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import CustomizedMetric
    >>> def huber(preds, targets):
    ...     return torch.nn.functional.huber_loss(preds, targets)
    >>> metric = CustomizedMetric(huber).get_metric()
    >>> metric(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0]))
    >>> metric.name, metric.compute()
    ('huber', tensor(1.5000))
    """

    takes_weights = drops_ignored_labels = False

    def __init__(self, compute_function: Callable[[Any, Any], Any], name: str | None = None):
        if not callable(compute_function):
            raise UsageError(
                f"CustomizedMetric expects a function fn(preds, targets), got "
                f"{compute_function!r} ({type(compute_function).__name__})",
                code="argument-type",
                argument="compute_function",
            )
        self.fn = compute_function
        self.name = name

    def get_name(self) -> str:
        """Return the name under which the metric is reported."""
        if self.name is not None:
            return self.name
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return "CustomizedMetric" if name == "<lambda>" else name

    def _batch_state(self, preds, targets, weights=None):
        value = self.fn(preds, targets)
        try:
            value = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"the function of metric {self.get_name()} must return one number per batch, got "
                f"{value!r}",
                code="metric-unsupported",
            ) from error
        rows = row_count(self.get_name(), preds, targets)
        total = torch.tensor(value * rows, dtype=torch.float64)
        return {"total": total, "count": torch.tensor(rows)}


def is_torchmetrics(value: object) -> bool:
    """Return True for a ``torchmetrics.Metric`` or its subclass, without importing it."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return False
    cls = value if isinstance(value, type) else type(value)
    return issubclass(cls, torchmetrics.Metric)


class TorchmetricsState(TorchMetric):
    """Adapter from a copy of a ``torchmetrics.Metric`` to the TorchMetric interface.

    Supported states are tensors reduced by sum, max or min, and concatenated lists. The result of
    the torchmetrics object's ``compute()`` is therefore exact.

    Parameters
    ----------
    metric : torchmetrics.Metric
        The metric; it is copied and not modified.

    Raises
    ------
    UsageError
        If a state has another reduction (mean, a custom function or none), so that the result would
        depend on the number of workers.
    """

    def __init__(self, metric: torchmetrics.Metric):
        self._metric = metric.clone().cpu()
        self.reductions = _torchmetrics_reductions(self._metric)
        for part in _nested_metrics(self._metric).values():
            # compute() must not start a collective: only some ranks may call it
            part.sync_on_compute = part._to_sync = part.dist_sync_on_step = False
            part.persistent(True)  # include the states in state_dict()
        super().__init__(type(metric).__name__)

    def update(self, preds, targets):
        self._metric.update(to_cpu(preds), to_cpu(targets))
        self._updates += 1

    def reset(self):
        self._metric.reset()
        self._updates = 0

    def compute(self):
        if not self._updates:
            return torch.tensor(float("nan"))
        with torch.no_grad():
            return self._metric.compute()

    def state(self):
        state: dict[str, Any] = {_UPDATES: torch.tensor(self._updates)}
        for key, value in self._metric.state_dict().items():
            if self.reductions.get(key) == "cat":
                state[key] = value if isinstance(value, list) else [value]
            elif key in self.reductions:
                # empty without rows, so that a merge skips it: its shape may depend on the rows
                state[key] = value if self._updates else torch.zeros(0)
        return state

    def load_state(self, state):
        check_keys(state, self.reductions)
        self.reset()
        self._updates = int(state[_UPDATES])
        if self._updates:
            self._metric.load_state_dict(copy.deepcopy(dict(state)), strict=False)
            for part in _nested_metrics(self._metric).values():
                part._update_count = self._updates


_UPDATES = ".updates"  # not a valid attribute name, so no state has it


def _nested_metrics(metric: torchmetrics.Metric) -> dict[str, Any]:
    """Return a metric and its components (as in ``a + b``) as a dict keyed by state key prefix."""
    import torchmetrics

    return {
        f"{path}." if path else "": module
        for path, module in metric.named_modules()
        if isinstance(module, torchmetrics.Metric)
    }


def _torchmetrics_reductions(metric: torchmetrics.Metric) -> dict[str, Reduction]:
    """Return how to merge each state key, such as ``"sum"``; ``"cat"`` joins lists of tensors."""
    from torchmetrics.wrappers.abstract import WrapperMetric

    reductions: dict[str, Reduction] = {_UPDATES: "sum"}
    for prefix, part in _nested_metrics(metric).items():
        if isinstance(part, WrapperMetric):
            raise _unmergeable(part)
        reductions |= {prefix + name: how for name, how in reductions_of(part).items()}
    if len(reductions) == 1:
        raise UsageError(
            f"the torchmetrics metric {type(metric).__name__} has no state from add_state(), so it "
            "cannot be merged across workers",
            code="metric-unsupported",
        )
    return reductions


def reductions_of(metric: torchmetrics.Metric) -> dict[str, Reduction]:
    """Return the reductions of a ``torchmetrics.Metric``'s states, excluding nested metrics.

    Raises
    ------
    UsageError
        If a state has another reduction.
    """
    from torchmetrics.utilities import data

    known: dict[tuple[bool, Any], Reduction] = {
        (False, data.dim_zero_sum): "sum",
        (False, data.dim_zero_max): "max",
        (False, data.dim_zero_min): "min",
        (True, data.dim_zero_cat): "cat",
        (True, None): "cat",
    }
    states = {
        name: (isinstance(default, list), metric._reductions[name])
        for name, default in metric._defaults.items()
    }
    if not known.keys() >= set(states.values()):
        raise _unmergeable(metric)
    return {name: known[state] for name, state in states.items()}


def _unmergeable(metric: object) -> UsageError:
    return UsageError(
        f"the torchmetrics metric {type(metric).__name__} cannot be merged across workers without "
        "changing its value; its states must be lists, or tensors reduced by sum, max or min",
        code="metric-unsupported",
    )


_ALIASES = {
    "acc": "accuracy",
    "auroc": "auc",
    "f1": "f1score",
    "meanabsoluteerror": "mae",
    "meansquarederror": "mse",
}


def _key(name: str) -> str:
    key = name.lower().replace("_", "").replace("-", "").replace(" ", "")
    return _ALIASES.get(key, key)


def _checked(name: str, metric: object) -> object:
    is_metric = callable(metric) or isinstance(metric, Metric)
    if isinstance(metric, type):
        follows = all(hasattr(metric, attribute) for attribute in _STATE_METHODS)
        is_metric = follows or issubclass(metric, Metric) or is_torchmetrics(metric)
    if not is_metric:
        raise UsageError(
            "A metric must be an Orca Metric, a torchmetrics object, a function fn(preds, "
            "targets), "
            "or a class with the methods of bigdl.orca.learn.metrics.TorchMetric, got "
            f"{metric!r} for {name!r}",
            code="argument-type",
            argument="metric",
        )
    return metric


METRICS = Registry[object]("bigdl.metrics", "a metric", _checked, _key)
"""Registry of metrics, or their classes, by name; :mod:`.named` registers the built-in ones."""

_MetricT = TypeVar("_MetricT")


def register_metric(name: str, metric: _MetricT) -> _MetricT:
    """Register a metric under a name for ``metrics=["name"]``.

    A package can instead declare its metric as an entry point in the group ``bigdl.metrics``; then
    the program need not import the package.

    Parameters
    ----------
    name : str
        Case, underscores, hyphens and spaces are ignored.
    metric : object or type
        An object that ``metrics=[metric]`` accepts, or its class if the constructor needs no
        arguments.

    Returns
    -------
    object or type
        `metric` itself.

    Raises
    ------
    UsageError
        If another metric has the name, or `metric` is not a metric.

    Examples
    --------
    >>> from bigdl.orca.learn.metrics import Metric, register_metric
    >>> def largest_error(preds, targets):
    ...     return (preds - targets).abs().max()
    >>> function = register_metric("largest_error", largest_error)
    >>> Metric.convert_metrics_list(["accuracy", "largest_error"])[1].name
    'largest_error'
    """
    METRICS.register(name, metric)
    return metric


_STATE_METHODS = ("__call__", "compute", "reset", "state", "load_state", "merge", "reductions")


def _unique_name(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate.lower() in taken:  # fit reports val_<lowercase name>
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _to_states(metric: object, backend: str | None) -> list[TorchMetric]:
    """Return the state of a metric, or the states of all metrics of a collection."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or not isinstance(metric, torchmetrics.MetricCollection):
        return [_to_state(metric, backend)]
    states = []
    for name, each in metric.items(keep_base=False):
        state = _to_state(each, backend)
        state.name = name
        states.append(state)
    return states


def _to_state(metric: Any, backend: str | None) -> TorchMetric:
    if isinstance(metric, Metric):
        return metric.get_metric(backend)
    if isinstance(metric, str):
        return _to_state(metric_by_name(metric), backend)
    if isinstance(metric, type):
        raise UsageError(
            f"{metric.__name__} is a class; pass an instance of it as the metric",
            code="argument-type",
            metric=metric.__name__,
        )
    if is_torchmetrics(metric):
        return TorchmetricsState(metric)
    if all(hasattr(metric, attribute) for attribute in _STATE_METHODS):
        state = copy.deepcopy(metric)
        state.reset()
        state.name = getattr(metric, "name", type(metric).__name__)
        return state
    if not callable(metric):
        raise UsageError(
            f"a metric must be an Orca Metric, a metric name, a torchmetrics.Metric or a function "
            f"fn(preds, targets), got {metric!r} ({type(metric).__name__})",
            code="argument-type",
            argument="metric",
        )
    if hasattr(metric, "compute"):
        raise UsageError(
            f"{type(metric).__name__} has a compute() but no state that can be merged across "
            "workers; pass an Orca Metric, a torchmetrics.Metric or a function fn(preds, targets), "
            "or implement the methods of bigdl.orca.learn.metrics.TorchMetric",
            code="metric-unsupported",
        )
    return CustomizedMetric(metric).get_metric(backend)


def metric_by_name(name: str) -> object:
    """Return the metric registered under a name.

    Raises
    ------
    UsageError
        If no metric has the name. Another process may have registered it.
    """
    if name not in METRICS:
        known = list(METRICS)
        names = {each.lower(): each for each in known} | {short: short for short in _ALIASES}
        close = difflib.get_close_matches(_key(name), names, 1)
        advice = f"did you mean {names[close[0]]!r}? Known" if close else "known"
        raise UsageError(
            f"there is no metric named {name!r}; {advice} names are: {', '.join(known)}",
            code="name-unknown",
            metric=name,
            allowed=known,
        )
    metric = METRICS[name]
    return metric() if isinstance(metric, type) else metric
