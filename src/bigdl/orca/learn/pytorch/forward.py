"""Forward passes: from a batch to output, target and loss, for plain and Lightning modules."""

import contextlib
import copy
import functools
import inspect
import itertools
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.base import GradientSync

_ELSE = "or pass a MainCallback, whose on_iter_forward takes the batch apart"


@dataclass(frozen=True)
class BatchColumns:
    """Names within batches that are dicts; other batches are ``(*features, target)``.

    Attributes
    ----------
    features : sequence of str, optional
        Keys that become the model's arguments of the same names; default all but the targets.
    labels : sequence of str, optional
        Keys of the targets.
    """

    features: Sequence[str] | None = None
    labels: Sequence[str] | None = None

    def split(self, batch: Any) -> tuple[list, dict, Any]:
        """Take a batch apart.

        Returns
        -------
        inputs : list
            Of the model, by position.
        named : dict
            Those by name.
        target : object
            A tuple for several label columns.

        Raises
        ------
        UsageError
            For a dict without the keys that are named, or without names.
        """
        if not isinstance(batch, Mapping):
            *features, target = batch
            return features, {}, target
        if not self.labels:
            raise UsageError(
                f"The batches are dicts of {list(batch)}; name the keys of the targets with "
                f"label_cols=, {_ELSE}"
            )
        features = self.features or [key for key in batch if key not in self.labels]
        for key in (*features, *self.labels):
            if key not in batch:
                raise UsageError(f"The batches have no {key!r}; they are dicts of {list(batch)}")
        targets = tuple(batch[key] for key in self.labels)
        named = {key: batch[key] for key in features}
        return [], named, targets[0] if len(targets) == 1 else targets


def check_keywords(model: torch.nn.Module, named: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that the forward of a model does not take."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**named)
    except TypeError as error:
        raise UsageError(
            f"The batches are dicts, so their features {list(named)} are given to the model by "
            f"name, but its forward takes {signature} ({error}); name the keys that it takes with "
            f"feature_cols=, {_ELSE}"
        ) from None


def call_model(model: torch.nn.Module, inputs: Sequence[Any]) -> Any:
    """Call a model; refuse inputs that are more or fewer than its forward takes.

    A model that does not compute with the dtypes of its inputs, such as a linear layer of floats
    with whole numbers, gets those numbers in a dtype that it computes with, see
    :func:`in_dtypes_of`. The error of an input that the model cannot compute tells the shapes that
    it was given.
    """
    inputs = _as_remembered(model, inputs)
    try:
        return model(*inputs)
    except (RuntimeError, ValueError) as error:
        if _DTYPES.search(str(error)):
            for others in in_dtypes_of(model, inputs):
                with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError):
                    output = model(*others)
                    _remember(model, inputs, others)
                    return output
        _note_inputs(error, inputs)
        raise
    except TypeError:
        signature = inspect.signature(model.forward)
        try:
            signature.bind(*inputs)
        except TypeError as error:
            raise UsageError(
                f"The model is given {len(inputs)} inputs, since each feature column or array is "
                f"one, but its forward takes {signature} ({error}); let forward take them all, or "
                "join columns of numbers to one, e.g. by array(a, b) or VectorAssembler"
            ) from None
        raise


def _note_inputs(error, inputs):
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    if tensors:
        told = ", ".join(f"{tuple(each.shape)} of {str(each.dtype)[6:]}" for each in tensors)
        error.add_note(f"The model was given inputs of shape {told}")
    if any(each.ndim == 1 for each in tensors):
        error.add_note(
            "A column of single numbers has one dimension: join such columns to one, e.g. by "
            "array(a, b) or VectorAssembler, or let forward take x.unsqueeze(1)"
        )


# what the layers of torch say of an input in a dtype that they do not compute with
_DTYPES = re.compile(
    r"dtype|scalar type|data type|not implemented for '|types? .* should be the same"
)
_MOST_INPUTS = 4  # whose dtypes are tried in all combinations
_accepted: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by model, see _remember


def in_dtypes_of(model: torch.nn.Module, inputs: Sequence[Any]) -> Iterator[list]:
    """Yield inputs in other dtypes that a model may compute with.

    Numbers become floats of the dtype of the model's parameters, or whole numbers where none of
    them has a fraction. The first differ from what was given in the fewest inputs.
    """
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    floats = floats or torch.get_default_dtype()
    leaves, structure = _flat(inputs)
    choices = [_dtypes_for(leaf, floats) for leaf in leaves]
    if len(leaves) <= _MOST_INPUTS:
        combinations = list(itertools.product(*choices))
    else:  # all that can be floats, and the same without booleans
        combinations = [
            tuple(
                floats if floats in some and leaf.dtype != but else some[0] for leaf, some in both
            )
            for both in [list(zip(leaves, choices, strict=True))]
            for but in (torch.bool, None)
        ]

    def changes(dtypes):
        return sum(d != some[0] for d, some in zip(dtypes, choices, strict=True))

    for dtypes in sorted(combinations, key=changes):
        if changes(dtypes):
            yield structure(
                [leaf.to(d) if d else leaf for leaf, d in zip(leaves, dtypes, strict=True)]
            )


def _dtypes_for(leaf, floats):
    """The dtype of an input, and those that it may be given in instead; None if it is no number."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_complex():
        return [None]
    if not leaf.is_floating_point():
        return [leaf.dtype, floats]
    others = [] if leaf.dtype == floats else [floats]
    largest = 2 / torch.finfo(leaf.dtype).eps  # below it, all whole numbers are told apart
    is_whole = bool(((leaf == leaf.trunc()) & (leaf.abs() < largest)).all())
    return [leaf.dtype, *others, *([torch.int64] if is_whole else [])]


def _flat(inputs):
    """The tensors of inputs, which may be dicts, and what puts others in their place."""
    keys = [list(each) if isinstance(each, dict) else None for each in inputs]
    leaves = [
        leaf for each in inputs for leaf in (each.values() if isinstance(each, dict) else [each])
    ]

    def structure(others):
        rest = iter(others)
        return [next(rest) if k is None else {key: next(rest) for key in k} for k in keys]

    return leaves, structure


def _kinds(leaves):
    return tuple(getattr(leaf, "dtype", None) for leaf in leaves)


def _remember(model, inputs, others):
    """Note that a model takes inputs of some dtypes in others."""
    _accepted.setdefault(model, {})[_kinds(_flat(inputs)[0])] = _kinds(_flat(others)[0])


def _as_remembered(model, inputs):
    known = _accepted.get(model)
    if known is None:
        return inputs
    leaves, structure = _flat(inputs)
    dtypes = known.get(_kinds(leaves))
    if dtypes is None:
        return inputs
    casts = zip(leaves, dtypes, strict=True)
    return structure([leaf if d is None else _cast(leaf, d) for leaf, d in casts])


def _cast(leaf, dtype):
    cast = leaf.to(dtype)
    if leaf.is_floating_point() and not dtype.is_floating_point:
        lossy = (leaf != cast.to(leaf.dtype)) | (leaf.abs() >= 2 / torch.finfo(leaf.dtype).eps)
        if bool(lossy.any()):
            raise UsageError(
                f"The model takes whole numbers, but its input holds {leaf[lossy][0].item()} in "
                f"{str(leaf.dtype)[6:]}; cast the column, or fill what is missing"
            )
    return cast


def taken_types(model: torch.nn.Module, types: list) -> list:
    """Return the types of features, as in ``BatchSource.types``, as the model was given them."""
    leaves = [leaf for column in types for leaf in column]
    own = tuple(getattr(torch, dtype, None) for _, dtype, _ in leaves)
    taken = [_NAMES.get(d) for d in (_accepted.get(model) or {}).get(own, own)]
    names = iter(taken)
    return [[[key, next(names) or dtype, shape] for key, dtype, shape in each] for each in types]


# NumPy has no bfloat16, and torch's own casts make it of float32
_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float32",
    torch.bfloat16: "float32",
    torch.int64: "int64",
}


def accepted_inputs(model: torch.nn.Module, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return inputs in the dtypes in which :func:`call_model` has given such ones to a model."""
    return _as_remembered(model, inputs)


_OVER_CLASSES = nn.CrossEntropyLoss, nn.NLLLoss
_ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss),
)
_PACKAGES = ("pytorch_lightning", "lightning", "lightning_fabric")


def is_lightning(model: Any) -> bool:
    """Return True if a model is a LightningModule."""
    return lightning_base(model) is not None


def lightning_base(model: Any) -> Any:
    """Return the class LightningModule that a model is of, or None."""
    for cls in type(model).__mro__:
        if cls.__name__ == "LightningModule" and cls.__module__.split(".")[0] in _PACKAGES:
            return cls
    return None


class ForwardPass(ABC):
    """From a batch to output, target and loss.

    Parameters
    ----------
    model : torch.nn.Module
    columns : BatchColumns, optional
        For batches that are dicts.

    Attributes
    ----------
    criterion : callable or None
    loss_is_sum : bool
        Whether the loss adds up over samples instead of averaging.
    """

    criterion: Any = None
    loss_is_sum = False

    def __init__(self, model: Any, columns: BatchColumns | None = None):
        self.model, self.columns = model, columns or BatchColumns()

    @abstractmethod
    def forward(self, batch: Any, index: int) -> tuple[Any, Any, Any]:
        """Output, target and loss (None without a criterion) of a batch."""

    def evaluate(self, batch: Any, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        """The same of a validation batch."""
        return self.forward(batch, index)

    def weights(self, batch: Any) -> torch.Tensor | None:
        """The weights of a batch's rows, or None where each counts once."""
        return None

    def denominator(self, output: Any, target: Any, rows: int) -> float:
        """Return what this worker's part of a batch counts in the mean loss: its rows."""
        return rows

    def prediction(self, output: Any, takes: str) -> Any:
        """Return the output as a metric takes it, see :attr:`TorchMetric.takes`.

        A loss of logits says that the output is no probability yet.
        """
        are_numbers = isinstance(output, torch.Tensor) and output.is_floating_point()
        if not (are_numbers and takes):
            return output
        if isinstance(self.criterion, nn.BCEWithLogitsLoss) and takes == "probability":
            return output.double().sigmoid()
        if isinstance(self.criterion, _OVER_CLASSES) and output.ndim == 2:
            if takes == "distribution":
                return output.double().softmax(1)
            if takes == "score" and output.shape[1] == 2:
                return output[:, 1].double() - output[:, 0].double()
        return output

    def take_sizes(self, batch: Any) -> None:
        """Let lazy layers of the model take their sizes from a batch."""
        inputs, named, _ = self.columns.split(batch)
        training = self.model.training
        with torch.no_grad():
            self.model.eval()(*inputs, **named)
        self.model.train(training)

    # -- hooks of a LightningModule; other modules have none ---------------------------------------

    rows = 0  # of this worker in the batch

    def on(self, hook: str, *arguments: Any) -> Any:
        """Call a hook of the module, if it has one of its own."""
        return None

    def begin_training(self) -> None:  # noqa: B027 - few have to do it
        """Before the batches of an epoch."""

    def transferred(self, batch: Any) -> Any:
        """Return a batch as the module's hooks of its way to the device leave it."""
        return batch

    def begin_batch(self, batch: Any, index: int, rows: int) -> Any:
        """Before a batch, of which this worker may have no rows; returns it as it is computed."""
        return batch

    def end_batch(self, batch: Any) -> None:  # noqa: B027 - few have to do it
        """After a batch and what the optimizer made of it."""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget gradients."""
        optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[..., None]) -> None:
        """Limit gradients, which are those of all workers, and update the weights.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
        clip : callable
            Limits gradients as ``fit`` was told, or by the arguments of Clipping.
        """
        clip()
        optimizer.step()

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Have the module in evaluation mode for the time of a block."""
        training = self.model.training
        self.model.eval()
        yield
        self.model.train(training)

    def end_validation(self, sync: GradientSync) -> dict:
        """Return what the module logged in an evaluation on this worker; maybe a collective."""
        return {}

    def end_epoch(self, sync: GradientSync, entry: dict) -> dict | None:
        """Return what the module logged in an epoch of training; maybe a collective.

        Parameters
        ----------
        sync : GradientSync
        entry : dict
            Other figures of the epoch.

        Returns
        -------
        dict or None
            ``figures``, and ``stop``: whether the module ends the training here.
        """
        return None

    def close_epoch(self) -> None:  # noqa: B027 - few have to do it
        """Forget what was logged in an epoch that is whole."""

    def log_state(self) -> dict | None:
        """Return what was logged in an epoch so far, for a checkpoint; None if that is nothing."""
        return None

    def load_log(self, states: Sequence[dict]) -> None:  # noqa: B027 - few have to do it
        """Take over what :meth:`log_state` of this worker, or of several, returned."""


class PlainForward(ForwardPass):
    """``criterion(model(*features), target)``."""

    def __init__(self, model: Any, criterion: Any, columns: BatchColumns | None = None):
        super().__init__(model, columns)
        self.criterion = criterion
        self.loss_is_sum = getattr(criterion, "reduction", "mean") == "sum"
        self._elementwise = isinstance(criterion, _ELEMENTWISE)
        self._over_classes = isinstance(criterion, _OVER_CLASSES)

    def forward(self, batch: Any, index: int) -> tuple[Any, Any, Any]:
        inputs, named, target = self.columns.split(batch)
        output, loss = self._run(inputs, named), None
        if self.criterion is not None:
            loss = self._call(self.criterion, output, target)
        return output, target, loss

    def _run(self, inputs, named):
        if named:
            check_keywords(self.model, named)
            return self.model(**named)
        return call_model(self.model, inputs)

    def denominator(self, output: Any, target: Any, rows: int) -> float:
        """Return what this worker's part of a batch counts in the mean loss.

        That is the number of rows, except where classes have weights or labels are ignored.
        """
        criterion = self.criterion
        are_tensors = isinstance(target, torch.Tensor) and isinstance(output, torch.Tensor)
        # class probabilities are divided by the rows
        if not (counts_unevenly(criterion) and are_tensors and target.ndim != output.ndim):
            return rows
        return float(_class_weights(criterion, target.to(torch.int64)).sum())

    def _call(self, criterion, output, target):
        outputs = output if isinstance(output, list | tuple) else (output,)
        targets = target if isinstance(target, list | tuple) else (target,)
        if len(outputs) == len(targets) == 1:
            targets = (self._like(targets[0], outputs[0]),)
        try:
            return criterion(*outputs, *targets)
        except IndexError as error:
            if not self._over_classes:
                raise
            labels, classes = targets[0], outputs[0].shape[1 if outputs[0].ndim > 1 else 0]
            raise UsageError(
                f"The labels of a batch go from {labels.min()} to {labels.max()}, but the model "
                f"has {classes} outputs, one for each class from 0 to {classes - 1} ({error}); "
                "number the classes from 0 on, or give the model more outputs"
            ) from None

    def _like(self, target, output):
        """A target in the shape and dtype that the loss takes for this output.

        * A target (n,) meets an output (n, 1), and the reverse: a loss over elements would
          broadcast the two to (n, n) and be wrong without a word.
        * Labels of integers (0, 1) are numbers of the output's dtype for a loss over elements.
        * Labels of floats (Spark ML's 0.0, 1.0, ...) and booleans are class indices for a loss over
          classes.
        """
        if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
            return target
        if self._over_classes and target.ndim == output.ndim - 1:
            if target.is_floating_point() or target.dtype is torch.bool:
                labels = target.to(torch.int64)
                target = labels if torch.equal(labels.to(target.dtype), target) else target
            return target
        if self._elementwise and not target.is_floating_point():
            target = target.to(output.dtype)
        if target.is_floating_point() and output.shape != target.shape:
            longer, shorter = sorted((output.shape, target.shape), key=len, reverse=True)
            if longer[: len(shorter)] == shorter and set(longer[len(shorter) :]) == {1}:
                return target.reshape(output.shape)
        return target


def counts_unevenly(criterion: Any) -> bool:
    """Return True if a mean loss may be divided by something else than its rows."""
    # a subclass may compute something else
    return type(criterion) in _OVER_CLASSES and criterion.reduction == "mean"


def _class_weights(criterion: Any, labels: torch.Tensor) -> torch.Tensor:
    """The weight of every label in a mean loss over classes; 0 of one that is ignored."""
    kept = labels != criterion.ignore_index
    if criterion.weight is None:
        return kept.double()
    return criterion.weight.double()[labels * kept] * kept


# their means are not over the rows or the elements
_OTHER_MEANS = ("CTCLoss", "AdaptiveLogSoftmaxWithLoss")


def check_weighted(loss: Any, metrics: Any) -> None:
    """Refuse a loss that cannot be taken row by row, and metrics that cannot be weighted."""
    from bigdl.orca.learn.metrics import Metric

    if isinstance(loss, nn.Module):
        _per_row(loss)
    for name, measure in Metric.convert_metrics_dict(metrics, backend="pytorch").items():
        if not getattr(measure, "takes_weights", False):
            raise UsageError(
                f"weight_col cannot weight the metric {name}, which has no notion of rows that "
                "count more than others; leave it out, or use a metric of "
                "bigdl.orca.learn.metrics"
            )


class WeightedForward(PlainForward):
    """``sum(w * loss) / sum(w)`` over the rows; the last target of a batch is w.

    Class weights and ignored labels of a loss over classes multiply w. A loss that adds up over the
    rows becomes ``sum(w * loss)``.
    """

    def __init__(self, model: Any, criterion: Any, columns: BatchColumns | None = None):
        super().__init__(model, criterion, columns)
        self._each, self.loss_is_sum = _per_row(criterion)
        self._counted = 0.0

    def denominator(self, output: Any, target: Any, rows: int) -> float:
        return self._counted

    def weights(self, batch: Any) -> torch.Tensor:
        """The weights of a batch's rows, of shape (rows,)."""
        *_, weights = self.columns.split(batch)[-1]
        weights = weights.reshape(len(weights))
        if bool((weights < 0).any()) or not bool(torch.isfinite(weights).all()):
            raise UsageError("The column weight_col has negative numbers or none; weights are >= 0")
        return weights

    def _weighted_loss(self, output, target, weights):
        losses = self._call(self._each, output, target)
        rows = len(weights)
        if losses.ndim == 0 or losses.shape[0] != rows:
            raise UsageError(
                f"weight_col needs a loss of every row, but with reduction='none' the loss has the "
                f"shape {tuple(losses.shape)} for {rows} rows"
            )
        weights = weights.to(losses.dtype)
        counts = self._counts(target[0] if isinstance(target, tuple) else target, losses)
        weights = weights.reshape(rows, *[1] * (losses.ndim - 1))
        total = (weights * losses).sum()
        counted = (weights * counts).sum()
        self._counted = float(counted)
        if self.loss_is_sum:
            return total
        return total / counted if self._counted else total * 0.0

    def _counts(self, target, losses):
        """Return the weight of every element of a loss in its mean."""
        criterion = self.criterion
        if getattr(criterion, "reduction", "mean") != "mean":  # over the rows, not the elements
            return torch.full_like(losses, losses.shape[0] / max(1, losses.numel()))
        if not counts_unevenly(criterion):
            return torch.ones_like(losses)
        labels = target.to(torch.int64)
        if labels.shape != losses.shape:  # class probabilities
            return torch.ones_like(losses)
        return _class_weights(criterion, labels).to(losses.dtype)

    def forward(self, batch: Any, index: int) -> tuple[Any, Any, torch.Tensor]:
        inputs, named, (*targets, _) = self.columns.split(batch)
        output = self._run(inputs, named)
        target = targets[0] if len(targets) == 1 else tuple(targets)
        return output, target, self._weighted_loss(output, target, self.weights(batch))


def _per_row(criterion):
    """A loss that does not reduce, and whether the given one adds up over the rows."""
    reduction = getattr(criterion, "reduction", None)
    is_reducing = reduction in ("mean", "sum", "batchmean")
    if is_reducing and type(criterion).__name__ not in _OTHER_MEANS:
        each = copy.copy(criterion)
        each.reduction = "none"
        return each, reduction == "sum"
    try:
        parameters = inspect.signature(criterion).parameters
    except (TypeError, ValueError):
        parameters = {}
    if "reduction" in parameters and not is_reducing:
        return functools.partial(criterion, reduction="none"), False
    name = getattr(criterion, "__name__", type(criterion).__name__)
    raise UsageError(
        "weight_col needs a loss that can be taken row by row, that is one with a reduction such "
        f"as torch.nn.MSELoss(), got {name}"
    )
