"""Metrics as a user gives them to an Estimator, and the mergeable states that are fed with batches.

A metric is one of ours, of torchmetrics, or a function.
"""

from __future__ import annotations

import copy
import difflib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bigdl.common.errors import LazyModule, UsageError
from bigdl.common.plugins import Registry
from bigdl.training.state import to_cpu

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]
    Reduction = Literal["sum", "cat", "max", "min"]
else:
    torch = LazyModule("torch", "orca")


class TorchMetric(ABC):
    """A metric as accumulated by one worker so far.

    A worker calls the object once per batch and hands in :meth:`state` at the end.  The states of
    all workers are merged in rank order by :func:`merge_states` and loaded by an object made the
    same way, which then computes the figure.  A merged state may be fed and merged again.

    Parameters
    ----------
    name : str
        The name under which the figure is reported.

    Attributes
    ----------
    reductions : dict of str to {"sum", "cat", "max", "min"}
        How each tensor of the state merges, see :func:`merge_states`.
    takes_weights : bool
        Whether rows may have weights. A row of weight 2 then counts as two rows, one of weight 0 as
        none, and :meth:`update` takes the weights as its third argument.
    takes : {"", "probability", "distribution", "score"}
        What predictions are to be where the loss of an Estimator says that the model gives
        logits: the sigmoid of them (``nn.BCEWithLogitsLoss``), the softmax, or of two columns the
        difference (``nn.CrossEntropyLoss``, ``nn.NLLLoss``). "": the output as it is.

    Examples
    --------
    A metric of one's own that is more than a mean, here the largest error:

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

    def __call__(self, preds: Any, targets: Any, weights: Any = None) -> None:
        """Take one batch in.

        Parameters
        ----------
        preds, targets : torch.Tensor
            Output of the model and its truth, any number of rows (none is fine), on any device;
            neither is changed.
        weights : torch.Tensor, shape (rows,) or (rows, 1), optional
            What each row counts, 0 or more; default 1.

        Raises
        ------
        UsageError
            If there are weights and the metric has no notion of them.
        """
        if weights is not None and not self.takes_weights:
            raise UsageError(
                f"The metric {self.name} has no notion of rows that count more than others; leave "
                "it out where rows have weights",
                code="metric-unsupported",
                metric=self.name,
            )
        with torch.no_grad():
            if row_count(self.name, preds, targets):
                self.update(preds, targets, *(() if weights is None else (weights,)))

    @abstractmethod
    def update(self, preds: Any, targets: Any) -> None:
        """Take one batch in that has rows; gradients are off."""

    @abstractmethod
    def compute(self) -> torch.Tensor:
        """Return the figure, a float32 tensor without dimensions; nan when there was no row."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every batch."""

    @abstractmethod
    def state(self) -> State:
        """Return a copy of the state, all tensors on the CPU."""

    @abstractmethod
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by a copy of another one.

        Raises
        ------
        UsageError
            If the names of its tensors are not those of this metric.
        """

    def merge(self, other_state: Mapping[str, torch.Tensor]) -> None:
        """Add the rows that another state has seen; its rows come after those of this one."""
        self.load_state(merge_states([self.state(), other_state], self.reductions))


class TensorState(TorchMetric):
    """The state of one of our metrics: a few tensors, to which a batch adds just as a worker does.

    Parameters
    ----------
    metric : MergedMetric
    """

    def __init__(self, metric: MergedMetric):
        self._metric, self.reductions = metric, metric.reductions
        self.takes_weights, self.takes = metric.takes_weights, metric.takes
        self.leaves_ignored = metric.leaves_ignored
        super().__init__(metric.get_name())

    def __call__(
        self, preds: Any, targets: Any, weights: Any = None, *, threshold: float | None = None
    ) -> None:
        """Take one batch in.

        Parameters
        ----------
        preds, targets, weights
            See :meth:`TorchMetric.__call__`.
        threshold : float, optional
            Predictions above it are 1, the others 0, before they are compared.
        """
        if threshold is not None:
            preds = (preds > threshold).to(preds.dtype)
        super().__call__(preds, targets, weights)

    def update(self, preds: Any, targets: Any, *weights: Any) -> None:
        """Take one batch in that has rows; gradients are off."""
        for key, tensor in self._metric._batch_state(preds, targets, *weights).items():
            parts = [*self._parts[key], tensor]
            # what is joined is joined once, in state()
            is_joined = self.reductions[key] == "cat"
            self._parts[key] = (
                parts if is_joined else [merge_tensors(key, parts, self.reductions[key])]
            )

    def compute(self) -> torch.Tensor:
        """Return the figure."""
        return self._metric._figure(self.state())

    def reset(self) -> None:
        """Forget every batch."""
        self._parts: dict[str, list[torch.Tensor]] = {key: [] for key in self.reductions}

    def state(self) -> State:
        """Return a copy of the state, all tensors on the CPU."""
        return {
            key: merge_tensors(key, self._parts[key], how) for key, how in self.reductions.items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by a copy of another one."""
        check_keys(state, self.reductions)
        self._parts = {key: [state[key].clone()] for key in self.reductions}


def merge_states(
    states: Sequence[Mapping[str, torch.Tensor]], reductions: Mapping[str, Reduction]
) -> State:
    """Merge the states of all workers into the state of one that saw every row.

    Parameters
    ----------
    states : sequence of dict of str to torch.Tensor
        One per worker, in rank order.
    reductions : dict of str to {"sum", "cat", "max", "min"}
        ``TorchMetric.reductions``.  "cat" joins 1-D tensors in the order of `states`, and lists of
        tensors where a metric of torchmetrics has them; the others
        go element by element over tensors of one shape.  A tensor without elements is one of a
        worker that saw no row: it takes no part, whatever its shape and dtype.

    Returns
    -------
    dict of str to torch.Tensor

    Raises
    ------
    UsageError
        If there is no state, or the states are not of one and the same metric.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import MSE, merge_states
    >>> one, two = MSE().get_metric(), MSE().get_metric()
    >>> one(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]))
    >>> two(torch.tensor([1.0]), torch.tensor([5.0]))
    >>> one.load_state(merge_states([one.state(), two.state()], one.reductions))
    >>> one.compute()  # of four rows; the mean of the two figures would be 8
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
    """Raise a UsageError unless `state` holds what `reductions` tells how to merge."""
    if set(state) != set(reductions):
        raise UsageError(
            f"the state of a metric is expected to hold {sorted(reductions)}, "
            f"but this one holds {sorted(state)}",
            code="data-structure",
        )


_OPERATIONS = {"sum": "sum", "max": "amax", "min": "amin"}


def merge_tensors(key: str, values: Sequence, reduction: Reduction) -> Any:
    """Return what the tensors (or lists of them) of several states merge to."""
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
            f"the tensors {key!r} of the states to merge have different shapes "
            f"{sorted(shapes)}; every batch must have the same number of classes",
            code="data-shape",
        )
    return getattr(torch, _OPERATIONS[reduction])(torch.stack(filled), dim=0)


# -- metrics ---------------------------------------------------------------------------------------


class Metric(ABC):
    """A metric by name and parameters; it holds no data.

    The Estimator keeps it on the driver, sends it to the workers, and calls :meth:`get_metric`
    once per evaluation and worker.  A subclass stores its parameters in the constructor and
    implements :meth:`_torch_metric`.

    Examples
    --------
    >>> from bigdl.orca.learn.metrics import AUC, Metric
    >>> [metric.name for metric in Metric.convert_metrics_list([AUC(), "accuracy"])]
    ['AUC', 'Accuracy']
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
                f"{self.get_name()} exists for backend='pytorch', but {backend!r} was requested",
                code="unsupported",
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
            touched), a ``torchmetrics.MetricCollection`` (its metrics under the names that it gives
            them, `prefix` and `postfix` included), a function ``fn(preds, targets)`` (see
            :class:`CustomizedMetric`), or an object that follows the contract of
            :class:`TorchMetric`.
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
        states = [state for metric in metrics for state in _to_states(metric, backend)]
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
    takes: Literal["", "probability", "distribution", "score"] = ""
    leaves_ignored = True  # labels that the loss of an Estimator ignores

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


def row_count(name: str, preds: Any, targets: Any) -> int:
    """Return the number of rows of a batch of any structure: that of its first tensor."""
    for leaf in _leaves([targets, preds]):
        return leaf.shape[0] if leaf.ndim else 1
    raise UsageError(
        f"{name}: preds and targets are expected to hold tensors, "
        f"got {type(preds).__name__} and {type(targets).__name__}",
        code="data-type",
        metric=name,
    )


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for item in batch:
            yield from _leaves(item)
    elif hasattr(batch, "shape") and hasattr(batch, "ndim"):
        yield batch


class CustomizedMetric(MergedMetric):
    """The mean over batches of a function of the user, weighted by rows.

    For a function that is itself a mean over rows, such as a loss, this is the mean over all rows.
    For any other (a quantile, a correlation) the figure depends on how rows were cut into batches,
    and so on the batch size and the number of workers: write those as a ``torchmetrics.Metric``.

    Parameters
    ----------
    compute_function : callable
        ``fn(preds, targets) -> number`` or tensor with one element; it receives the batch as the
        model returned it, on the model's device, without gradients.
    name : str, optional
        The name under which the figure is reported; by default that of the function, or
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

    takes_weights = leaves_ignored = False

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
        """Return the name under which the figure is reported."""
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
                f"the function of the metric {self.get_name()} must return one number per batch, "
                f"got {value!r}",
                code="metric-unsupported",
            ) from error
        rows = row_count(self.get_name(), preds, targets)
        total = torch.tensor(value * rows, dtype=torch.float64)
        return {"total": total, "count": torch.tensor(rows)}


def is_torchmetrics(value: object) -> bool:
    """Tell whether `value` is a ``torchmetrics.Metric`` or its class, without importing it."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return False
    cls = value if isinstance(value, type) else type(value)
    return issubclass(cls, torchmetrics.Metric)


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
            part.persistent(True)  # states are part of the state_dict
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
                # without rows it takes no part in a merge: its shape may depend on the rows
                state[key] = value if self._updates else torch.zeros(0)
        return state

    def load_state(self, state):
        check_keys(state, self.reductions)
        self.reset()
        self._updates = int(state[_UPDATES])
        if self._updates:
            self._metric.load_state_dict(copy.deepcopy(dict(state)), strict=False)
            for part in _metrics_within(self._metric).values():
                part._update_count = self._updates


_UPDATES = ".updates"  # no attribute of a torchmetrics object


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
    from torchmetrics.wrappers.abstract import WrapperMetric

    reductions: dict[str, Reduction] = {_UPDATES: "sum"}
    for prefix, part in _metrics_within(metric).items():
        if isinstance(part, WrapperMetric):
            raise _unmergeable(part)
        reductions |= {prefix + name: how for name, how in reductions_of(part).items()}
    if len(reductions) == 1:
        raise UsageError(
            f"the torchmetrics metric {type(metric).__name__} has no state made by add_state(), so "
            "nothing of it can be merged across workers",
            code="metric-unsupported",
        )
    return reductions


def reductions_of(metric: Any) -> dict[str, Reduction]:
    """Return how the states of a ``torchmetrics.Metric`` itself merge, without those within it.

    Raises
    ------
    UsageError
        If one merges in another way.
    """
    from torchmetrics.utilities import data

    known: dict[tuple[bool, Any], Reduction] = {
        (False, data.dim_zero_sum): "sum",
        (False, data.dim_zero_max): "max",
        (False, data.dim_zero_min): "min",
        (True, data.dim_zero_cat): "cat",
        (True, None): "cat",
    }
    kinds = {
        name: (isinstance(default, list), metric._reductions[name])
        for name, default in metric._defaults.items()
    }
    if not known.keys() >= set(kinds.values()):
        raise _unmergeable(metric)
    return {name: known[kind] for name, kind in kinds.items()}


def _unmergeable(metric: Any) -> UsageError:
    return UsageError(
        f"the torchmetrics metric {type(metric).__name__} cannot be merged across workers "
        "without changing its figure; its states must be lists, or tensors that merge by "
        "sum, max or min",
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
        follows = all(hasattr(metric, attribute) for attribute in _CONTRACT)
        is_metric = follows or issubclass(metric, Metric) or is_torchmetrics(metric)
    if not is_metric:
        raise UsageError(
            "A metric is an Orca Metric, an object of torchmetrics, a function fn(preds, targets), "
            "or a class whose objects follow bigdl.orca.learn.metrics.TorchMetric, but got "
            f"{metric!r} for {name!r}",
            code="argument-type",
            argument="metric",
        )
    return metric


METRICS = Registry[object]("bigdl.metrics", "a metric", _checked, _key)
"""The metrics, or their classes, by name; :mod:`.named` enters those of this package."""

_MetricT = TypeVar("_MetricT")


def register_metric(name: str, metric: _MetricT) -> _MetricT:
    """Give a metric a name, under which ``metrics=["name"]`` finds it.

    A package that a program need not import offers its metric by an entry point of the group
    ``bigdl.metrics``, under the name.

    Parameters
    ----------
    name : str
        Case, underscores, hyphens and spaces do not matter.
    metric : object or type
        What ``metrics=[metric]`` takes, or the class of it, which is made without arguments.

    Returns
    -------
    object or type
        The same.

    Raises
    ------
    UsageError
        If another metric has the name, or `metric` is none.

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


_CONTRACT = ("__call__", "compute", "reset", "state", "load_state", "merge", "reductions")


def _unused(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate.lower() in taken:  # fit reports val_<name in lower case>
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _to_states(metric: Any, backend: str | None) -> list[TorchMetric]:
    """Return the state of a metric; of a collection those of all of its metrics."""
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
            f"{metric.__name__} is a class; as a metric pass an instance of it",
            code="argument-type",
            metric=metric.__name__,
        )
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
            f"a function fn(preds, targets), got {metric!r} ({type(metric).__name__})",
            code="argument-type",
            argument="metric",
        )
    if hasattr(metric, "compute"):
        raise UsageError(
            f"{type(metric).__name__} has a compute() but no state that can be merged across "
            "workers; pass an Orca Metric, a torchmetrics.Metric or a function fn(preds, targets), "
            "or give it the methods of bigdl.orca.learn.metrics.TorchMetric",
            code="metric-unsupported",
        )
    return CustomizedMetric(metric).get_metric(backend)


def metric_by_name(name: str) -> object:
    """Return the metric of a name, which another process may not know.

    Raises
    ------
    UsageError
        If there is none.
    """
    if name not in METRICS:
        known = list(METRICS)
        names = {each.lower(): each for each in known} | {short: short for short in _ALIASES}
        close = difflib.get_close_matches(_key(name), names, 1)
        advice = f"did you mean {names[close[0]]!r}? Known" if close else "known"
        raise UsageError(
            f"there is no metric of the name {name!r}; {advice} names are: {', '.join(known)}",
            code="name-unknown",
            metric=name,
            allowed=known,
        )
    metric = METRICS[name]
    return metric() if isinstance(metric, type) else metric
