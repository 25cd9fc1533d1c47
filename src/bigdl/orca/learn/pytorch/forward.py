"""Forward passes, which compute the output, target and loss of a batch."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.training.embedding_tables.torch_model import has_tables
from bigdl.training.loss_form import (
    DIVISOR,
    ROWS,
    SUM,
    LossWeights,
    ProbeResult,
    ignored_label,
    label_weights,
    map_tensors,
    probe,
    read_form,
    readable_graph,
    requiring_grad,
    rows_at,
    tensors_in,
)
from bigdl.training.sharded_model import is_divided
from bigdl.training.state import isolated_rng

if TYPE_CHECKING:
    from bigdl.common.types import Tensors
    from bigdl.orca.learn.pytorch.lightning import LightningForward
    from bigdl.orca.learn.pytorch.parts import ModelParts
    from bigdl.orca.learn.types import Criterion

_OR_MAIN_CALLBACK = "or pass a MainCallback whose on_iter_forward splits the batch"


@dataclass(frozen=True)
class BatchColumns:
    """Feature and label names for batches that are dicts.

    Attributes
    ----------
    features : sequence of str, optional
        Keys that are passed as keyword arguments to the model; default all except the targets.
    labels : sequence of str, optional
        Keys of the targets.
    """

    features: Sequence[str] | None = None
    labels: Sequence[str] | None = None

    def split(self, batch: Tensors) -> tuple[list, dict, Any]:
        """Split a batch into model inputs and target.

        Returns
        -------
        inputs : list
            Positional arguments of the model.
        named : dict
            Keyword arguments of the model.
        target : object
            A tuple if there are several label columns.

        Raises
        ------
        UsageError
            If a dict lacks one of the keys, or `labels` is not set for a dict.
        """
        if not isinstance(batch, Mapping):
            *features, target = batch
            return features, {}, target
        if not self.labels:
            raise UsageError(
                f"The batches are dicts with the keys {list(batch)}; pass the keys of the targets "
                "as "
                f"label_cols=, {_OR_MAIN_CALLBACK}",
                code="argument-missing",
                argument="label_cols",
                columns=list(batch),
            )
        features = self.features or [key for key in batch if key not in self.labels]
        for key in (*features, *self.labels):
            if key not in batch:
                raise UsageError(
                    f"The batches have no {key!r}; they are dicts with the keys {list(batch)}",
                    code="column-missing",
                    column=key,
                    columns=list(batch),
                )
        targets = tuple(batch[key] for key in self.labels)
        named = {key: batch[key] for key in features}
        return [], named, targets[0] if len(targets) == 1 else targets


def check_keywords(model: torch.nn.Module, named: Mapping[str, Any]) -> None:
    """Raise an error if the model's forward does not accept the keyword arguments."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**named)
    except TypeError as error:
        raise UsageError(
            f"The batches are dicts, so their features {list(named)} are passed to the model by "
            f"name, but its forward takes {signature} ({error}); pass the keys that it takes as "
            f"feature_cols=, {_OR_MAIN_CALLBACK}",
            code="model-input",
            columns=list(named),
        ) from None


def call_model(
    model: torch.nn.Module, inputs: Sequence[Any], names: Sequence[str] = ()
) -> Any:  # what the user's model returns
    """Call a model with inputs, converting their dtypes if the model requires it.

    A Hugging Face model gets its inputs by the column `names`, if they are known. If the model does
    not support the dtypes of its inputs, e.g. integers in a linear layer, the inputs are converted
    to a dtype that it supports, see :func:`inputs_in_other_dtypes`. Errors of the model get a note
    with the shapes of the inputs. The wrong number of inputs raises a UsageError.
    """
    if isinstance(getattr(model, "main_input_name", None), str):
        named = named_inputs(model, inputs, names)
        if named is not None:
            return model(**named)
    if model in _accepted:
        inputs = accepted_inputs(model, inputs)
    try:
        return model(*inputs)
    except (RuntimeError, ValueError) as error:
        if _DTYPES.search(str(error)):
            for others in inputs_in_other_dtypes(model, inputs):
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
                f"The model gets {len(inputs)} inputs, one per feature column or array, but its "
                f"forward takes {signature} ({error}); let forward take all of them, or combine "
                "numeric columns into one, e.g. with array(a, b) or VectorAssembler",
                code="model-input",
            ) from None
        raise


def _note_inputs(error, inputs):
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    if tensors:
        shapes = ", ".join(f"{tuple(each.shape)} of {str(each.dtype)[6:]}" for each in tensors)
        error.add_note(f"The model's inputs had the shapes {shapes}")
    if any(each.ndim == 1 for each in tensors):
        error.add_note(
            "A column of scalars has one dimension: combine such columns into one, e.g. with "
            "array(a, b) or VectorAssembler, or use x.unsqueeze(1) in forward"
        )


# messages of torch layers for inputs in an unsupported dtype
_DTYPES = re.compile(
    r"dtype|scalar type|data type|not implemented for '|types? .* should be the same"
)
_MOST_INPUTS = 4  # up to this number of inputs, all combinations of dtypes are tried
# per model: accepted dtypes by the inputs' dtypes, see _remember
_accepted: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def inputs_in_other_dtypes(model: torch.nn.Module, inputs: Sequence[Any]) -> Iterator[list]:
    """Yield the inputs in other dtypes that the model may accept.

    Candidates are the float dtype of the model's parameters, and int64 for floats without
    fractional parts. Combinations that change the fewest inputs come first.
    """
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    floats = floats or torch.get_default_dtype()
    leaves, structure = _flat(inputs)
    choices = [_dtypes_for(leaf, floats) for leaf in leaves]
    if len(leaves) <= _MOST_INPUTS:
        combinations = list(itertools.product(*choices))
    else:  # convert all inputs to floats, with and without booleans
        combinations = [
            tuple(
                floats if floats in some and leaf.dtype != skipped else some[0]
                for leaf, some in pairs
            )
            for pairs in [list(zip(leaves, choices, strict=True))]
            for skipped in (torch.bool, None)
        ]

    def changes(dtypes):
        return sum(d != some[0] for d, some in zip(dtypes, choices, strict=True))

    for dtypes in sorted(combinations, key=changes):
        if changes(dtypes):
            yield structure(
                [leaf.to(d) if d else leaf for leaf, d in zip(leaves, dtypes, strict=True)]
            )


def _dtypes_for(leaf, floats):
    """Return an input's dtype and other dtypes to try; ``[None]`` if complex or not a tensor."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_complex():
        return [None]
    if not leaf.is_floating_point():
        return [leaf.dtype, floats]
    others = [] if leaf.dtype == floats else [floats]
    largest = 2 / torch.finfo(leaf.dtype).eps  # all integers below it are exact
    is_whole = bool(((leaf == leaf.trunc()) & (leaf.abs() < largest)).all())
    return [leaf.dtype, *others, *([torch.int64] if is_whole else [])]


def _flat(inputs):
    """Return the flat list of input tensors and a function that restores the structure."""
    keys = [list(each) if isinstance(each, dict) else None for each in inputs]
    leaves = [
        leaf for each in inputs for leaf in (each.values() if isinstance(each, dict) else [each])
    ]

    def structure(others):
        values = iter(others)
        return [next(values) if k is None else {key: next(values) for key in k} for k in keys]

    return leaves, structure


def _dtypes_of(leaves):
    return tuple(getattr(leaf, "dtype", None) for leaf in leaves)


def _remember(model, inputs, others):
    """Record that a model accepts the dtypes of `others` instead of the dtypes of `inputs`."""
    _accepted.setdefault(model, {})[_dtypes_of(_flat(inputs)[0])] = _dtypes_of(_flat(others)[0])


def accepted_inputs(model: torch.nn.Module, inputs: Sequence[Any]) -> Sequence[Any]:
    """Cast inputs to the dtypes that the model accepted in an earlier :func:`call_model`."""
    known = _accepted.get(model)
    if known is None:
        return inputs
    leaves, structure = _flat(inputs)
    dtypes = known.get(_dtypes_of(leaves))
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
                f"The model takes integers, but its input has {leaf[lossy][0].item()} in "
                f"{str(leaf.dtype)[6:]}; cast the column, or fill missing values",
                code="data-value",
            )
    return cast


def model_input_types(model: torch.nn.Module, types: list) -> list:
    """Return feature types, as in ``BatchSource.types``, with the dtypes the model accepts."""
    leaves = [leaf for column in types for leaf in column]
    dtypes = tuple(getattr(torch, dtype, None) for _, dtype, _ in leaves)
    accepted = [_NUMPY_NAMES.get(d) for d in (_accepted.get(model) or {}).get(dtypes, dtypes)]
    names = iter(accepted)
    return [[[key, next(names) or dtype, shape] for key, dtype, shape in each] for each in types]


# NumPy names; 16-bit floats become float32, which torch casts when needed
_NUMPY_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float32",
    torch.bfloat16: "float32",
    torch.int64: "int64",
}


def takes_named_inputs(model: object) -> bool:
    """Return True for a Hugging Face model, which takes its inputs by name."""
    return isinstance(getattr(model, "main_input_name", None), str)


def has_builtin_loss(model: torch.nn.Module) -> bool:
    """Return True if the model's forward takes labels and computes the loss."""
    return takes_named_inputs(model) or "labels" in inspect.signature(model.forward).parameters


def named_inputs(
    model: torch.nn.Module, inputs: Sequence[Any], names: Sequence[str]
) -> dict | None:
    """Return the inputs of a Hugging Face model by name, or None for other models."""
    if not takes_named_inputs(model):
        return None
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return dict(inputs[0])
    if len(names) != len(inputs) or not set(names) <= set(_parameters(model)):
        return None
    return dict(zip(names, inputs, strict=True))


def _parameters(model) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def is_record(output: object) -> bool:
    """Return True for a dict, a named tuple or a dataclass."""
    has_fields = hasattr(output, "_fields") or hasattr(output, "__dataclass_fields__")
    return isinstance(output, Mapping) or (has_fields and not isinstance(output, type))


def fields_of(output: Any) -> dict[str, Any]:  # output: a record
    """Return the fields of a record that are not None, by name."""
    if isinstance(output, Mapping):
        return dict(output)
    names = getattr(output, "_fields", None) or output.__dataclass_fields__
    fields = {name: getattr(output, name) for name in names}
    return {name: value for name, value in fields.items() if value is not None}


def logits_of(output: object) -> object:
    """Return the logits of an output with a field ``logits``, else the output.

    Hugging Face outputs have such a field among others.
    """
    if is_record(output) and type(output) is not dict:  # the user's code handles plain dicts
        logits = fields_of(output).get("logits")
        if isinstance(logits, torch.Tensor):
            return logits
    return output


_OVER_CLASSES = nn.CrossEntropyLoss, nn.NLLLoss
_ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss),
)
_PACKAGES = ("pytorch_lightning", "lightning", "lightning_fabric")


def is_lightning(model: object) -> bool:
    """Return True if a model is a LightningModule."""
    return lightning_base(model) is not None


def lightning_base(model: object) -> type | None:
    """Return the LightningModule base class of a model, or None."""
    for cls in type(model).__mro__:
        if cls.__name__ == "LightningModule" and cls.__module__.split(".")[0] in _PACKAGES:
            return cls
    return None


class ForwardPass(ABC):
    """Base class of forward passes, which compute the output, target and loss of a batch.

    Parameters
    ----------
    model : torch.nn.Module
    columns : BatchColumns, optional
        Feature and label names for batches that are dicts.

    Attributes
    ----------
    criterion : callable or None
    loss_weights : LossWeights
        Weights of the parts of a batch in its loss.
    module : LightningForward or None
        Caller of LightningModule hooks around batches, updates and epochs; None for other models.
    """

    criterion: Any = None
    module: LightningForward | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        columns: BatchColumns | None = None,
        loss_weights: LossWeights | None = None,
    ):
        self.model, self.columns = model, columns or BatchColumns()
        self.loss_weights = loss_weights or LossWeights()

    @property
    def loss_name(self) -> str:
        """Name of the loss for error and warning messages."""
        if self.criterion is None:
            return f"The loss of {type(self.model).__name__}"
        name = getattr(self.criterion, "__name__", type(self.criterion).__name__)
        return "The loss, a lambda," if name == "<lambda>" else f"The loss {name}"

    @abstractmethod
    def forward(self, batch: Tensors, index: int) -> tuple[Any, Any, Any]:
        """Return a batch's output, target and loss; the loss is None without a criterion."""

    def evaluate(self, batch: Tensors, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        """Return a validation batch's output, target and loss."""
        return self.forward(batch, index)

    def weights(self, batch: Tensors) -> torch.Tensor | None:
        """Return the row weights of a batch, or None if it has none."""
        return None

    def denominator(self, output: object, target: object, rows: int, loss: object = None) -> float:
        """Return the divisor of the mean loss over this worker's rows of a batch."""
        return self.loss_weights.of(loss, output, target, rows)

    def probe_loss(
        self, batch: Tensors, output: object, target: object, rows: int, loss: object
    ) -> ProbeResult:
        """Detect the reduction of the loss from a batch.

        The model and the random generators are left unchanged.

        Parameters
        ----------
        batch, output, target : object
        rows : int
        loss : tensor
        """
        form = read_form(loss)
        if form is None:
            return ProbeResult(ROWS)  # Lightning expects training_step to return a mean over rows
        return ProbeResult(SUM if form.is_undivided else DIVISOR)

    def prediction(self, output: Any, takes: str) -> object:
        """Convert the output to the input that a metric expects (`takes`), e.g. probabilities.

        If the loss takes logits, they are converted to probabilities or scores. If the output has a
        field ``logits``, the metric takes it.
        """
        output = logits_of(output)
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

    def infer_sizes(self, batch: Tensors) -> None:
        """Initialize lazy layers with a forward pass."""
        inputs, named, _ = self.columns.split(batch)
        training = self.model.training
        with torch.no_grad():
            self.model.eval()(*inputs, **named)
        self.model.train(training)

    def drop_ignored(
        self, output: Any, target: Any, weights: Any, loss: Any
    ) -> tuple[Any, Any, Any]:
        """Drop predictions and labels that the loss ignores, for metrics.

        Parameters
        ----------
        output, target, weights : object
            Values of a batch, on the CPU.
        loss : tensor or None
        """
        output, is_over_classes = logits_of(output), isinstance(self.criterion, _OVER_CLASSES)
        label = self.criterion.ignore_index if is_over_classes else ignored_label(loss)
        if isinstance(target, list | tuple) and len(target) == 1:
            (target,) = target
        if label is None or not isinstance(output, torch.Tensor):
            return output, target, weights
        if not isinstance(target, torch.Tensor) or output.ndim != target.ndim + 1:
            return output, target, weights
        classes_last = output
        # the class dimension may be the second one
        if (is_over_classes and output.ndim > 2) or output.shape[:-1] != target.shape:
            classes_last = output.movedim(1, -1)
        if classes_last.shape[:-1] != target.shape:
            return output, target, weights
        output, kept = classes_last, target != label
        if bool(kept.all()):
            return output, target, weights
        if weights is not None:
            shape = (len(target), *[1] * (target.ndim - 1))
            weights = weights.reshape(shape).expand(target.shape)[kept]
        return output[kept], target[kept], weights

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Return a context manager that puts the model in evaluation mode."""
        training = self.model.training
        self.model.eval()
        yield
        self.model.train(training)


class PlainForward(ForwardPass):
    """Forward pass ``criterion(model(*features), target)``."""

    def __init__(
        self,
        model: torch.nn.Module,
        criterion: Criterion | None,
        columns: BatchColumns | None = None,
        loss_weights: LossWeights | None = None,
    ):
        super().__init__(model, columns, loss_weights or LossWeights(_known_reduction(criterion)))
        self.criterion = criterion
        self._elementwise = isinstance(criterion, _ELEMENTWISE)
        self._over_classes = isinstance(criterion, _OVER_CLASSES)
        self._last_loss: Any = None  # the last loss

    def forward(self, batch: Tensors, index: int) -> tuple[Any, Any, Any]:
        inputs, named, target = self.columns.split(batch)
        output, loss = self._run(inputs, named), None
        if self.criterion is not None:
            loss = self._last_loss = self.call_criterion(self.criterion, output, target)
        return output, target, loss

    def evaluate(self, batch: Tensors, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        inputs, named, target = self.columns.split(batch)
        output, loss = self._run(inputs, named), None
        if self.criterion is None:
            return output, target, loss
        if self.loss_weights.is_known:
            loss = self.call_criterion(self.criterion, output, target)
        else:
            with readable_graph():
                loss = self.call_criterion(self.criterion, requiring_grad(output), target)
        self._last_loss = loss
        return output, target, loss

    def _run(self, inputs, named):
        if named:
            check_keywords(self.model, named)
            return self.model(**named)
        return call_model(self.model, inputs, self.columns.features or ())

    def probe_loss(
        self, batch: Tensors, output: object, target: object, rows: int, loss: object
    ) -> ProbeResult:
        criterion = self.criterion
        has_rows = any(rows in tensor.shape[:2] for tensor in tensors_in(output))
        if criterion is None or loss is not self._last_loss or not has_rows:
            return super().probe_loss(batch, output, target, rows, loss)

        def loss_of(index):
            some_rows = requiring_grad(rows_at(output, index, rows))
            return self.call_criterion(criterion, some_rows, rows_at(target, index, rows))

        with isolated_rng(0), torch.enable_grad():
            criterion = copy.deepcopy(criterion)  # a copy, since it may count its calls
            return probe(loss_of, rows)

    def denominator(
        self, output: Any, target: Any, rows: int, loss: Any = None
    ) -> float:  # output: the model's
        """Return the divisor of the mean loss over this worker's rows of a batch.

        This is the number of rows, unless classes have weights, labels are ignored, or the divisor
        is read from the autograd graph of a loss that is not torch's.
        """
        criterion = self.criterion
        if not self.loss_weights.is_known or self.loss_weights.is_uneven:
            return super().denominator(output, target, rows, loss)
        (output, *_), (target, *_) = self._arguments(criterion, output, target)
        are_tensors = isinstance(target, torch.Tensor) and isinstance(output, torch.Tensor)
        # class probabilities are divided by the rows
        if not (counts_unevenly(criterion) and are_tensors and target.ndim != output.ndim):
            return rows
        return float(_class_weights(criterion, target.to(torch.int64)).sum())

    def call_criterion(self, criterion, output, target):
        outputs, targets = self._arguments(criterion, output, target)
        if len(outputs) == len(targets) == 1:
            targets = (self._match_target(targets[0], outputs[0]),)
        try:
            return criterion(*outputs, *targets)
        except IndexError as error:
            if not self._over_classes:
                raise
            labels, classes = targets[0], outputs[0].shape[1 if outputs[0].ndim > 1 else 0]
            raise UsageError(
                f"The labels of a batch are from {labels.min()} to {labels.max()}, but the model "
                f"has {classes} outputs, one per class from 0 to {classes - 1} ({error}); "
                "number the classes from 0, or give the model more outputs",
                code="data-value",
            ) from None

    def _arguments(self, criterion, output, target) -> tuple[Sequence, Sequence]:
        """Return the outputs and targets that the loss is called with.

        A tuple or list is passed element by element. A record (dict, named tuple or dataclass) is
        passed as one argument, unless the loss takes one argument per field and target. A torch
        loss gets the field ``logits`` if the record has one.
        """
        targets = target if isinstance(target, list | tuple) else (target,)
        if not is_record(output):
            return (output if isinstance(output, list | tuple) else (output,)), targets
        is_torchs = (getattr(criterion, "__module__", None) or "").startswith("torch.")
        fields = fields_of(output)
        if is_torchs and "logits" in fields:
            return (fields["logits"],), targets
        if len(fields) > 1 and _required(criterion) == len(fields) + len(targets):
            return tuple(fields.values()), targets
        return (output,), targets

    def _match_target(self, target, output):
        """Convert a target to the shape and dtype that the loss expects for an output.

        * A target (n,) is reshaped to an output (n, 1), and vice versa: an elementwise loss would
          silently broadcast both to (n, n).
        * Integer labels (0, 1) are cast to the output's dtype for an elementwise loss.
        * Float labels (Spark ML's 0.0, 1.0, ...) and booleans are cast to class indices for a loss
          over classes.
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


class BuiltInLossForward(PlainForward):
    """Forward pass ``model(*features, labels=target)`` of a model that computes its loss.

    Examples are Hugging Face models and others whose forward takes ``labels``. The output has a
    field ``loss``, or is a tuple that starts with the loss. Target columns whose names are
    arguments of the forward are passed under these names.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        columns: BatchColumns | None = None,
        loss_weights: LossWeights | None = None,
    ):
        super().__init__(model, None, columns, loss_weights or LossWeights())

    def forward(self, batch: Tensors, index: int) -> tuple[Any, Any, Any]:
        output, target = self._with_labels(batch)
        loss = self._last_loss = self._loss_of(output)
        return output, target, loss

    def evaluate(self, batch: Tensors, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        if self.loss_weights.is_known or _joins_workers(self.model):
            return self.forward(batch, index)
        with readable_graph():
            output, target = self._with_labels(batch)
        loss = self._last_loss = self._loss_of(output)
        return map_tensors(torch.Tensor.detach, output), target, loss

    def probe_loss(
        self, batch: Tensors, output: object, target: object, rows: int, loss: object
    ) -> ProbeResult:
        if loss is not self._last_loss or _joins_workers(self.model) or self._probes > 1:
            return ForwardPass.probe_loss(self, batch, output, target, rows, loss)
        self._probes += 1

        def loss_of(index):
            return self._loss_of(self._with_labels(rows_at(batch, index, rows))[0])

        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with kept_buffers(self.model), isolated_rng(0), readable_graph():
                return probe(loss_of, rows)
        finally:
            for module, mode in modes:
                module.training = mode

    _probes = 0  # number of probes: they run the model, which costs more than running a loss

    def _with_labels(self, batch) -> tuple[Any, Any]:
        inputs, named, target = self.columns.split(batch)
        by_name = named or named_inputs(self.model, inputs, self.columns.features or ())
        labels = self._labels(target)
        if by_name is None:
            return self.model(*inputs, **labels), target
        check_keywords(self.model, {**by_name, **labels})
        return self.model(**by_name, **labels), target

    def _labels(self, target) -> dict:
        names, targets = self.columns.labels or (), target
        if len(names) <= 1:
            targets = (target,)
        if names and set(names) <= set(_parameters(self.model)):
            return dict(zip(names, targets, strict=True))
        if len(names) > 1 or isinstance(target, tuple):
            raise UsageError(
                f"{type(self.model).__name__} computes its loss itself, and its forward has no "
                f"arguments {list(names)}; rename the target columns to its arguments, or pass "
                "loss= to Estimator.from_torch",
                code="model-input",
                columns=list(names),
            )
        return {"labels": target}

    def _loss_of(self, output):
        loss = fields_of(output).get("loss") if is_record(output) else None
        if loss is None and isinstance(output, tuple | list) and output:
            loss = output[0]
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(
                f"{type(self.model).__name__} got labels but returned no loss; return a dict or a "
                "dataclass with loss and logits, or pass loss= to Estimator.from_torch",
                code="model-output",
            )
        return loss


@contextlib.contextmanager
def kept_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Context manager that restores the buffers of a model at the end."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                # skip unchanged buffers: the graph of the loss may refer to them
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _joins_workers(model: torch.nn.Module) -> bool:
    """Return True if all ranks must make the same forward passes of a model."""
    return has_tables(model) or is_divided(model)


def _required(function: Criterion) -> int | None:
    """Return the number of required positional arguments of a loss, or None if unknown."""
    function = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def _known_reduction(criterion: object) -> str:
    """Return the reduction of a torch loss, or ``""`` for other losses."""
    # a subclass may compute something else
    if criterion is None or type(criterion).__module__ != nn.MSELoss.__module__:
        return ""
    if isinstance(criterion, nn.AdaptiveLogSoftmaxWithLoss):
        return ""
    return SUM if getattr(criterion, "reduction", "mean") == "sum" else ROWS


def loss_warning(name: str, reason: str) -> str:
    """Return the warning for a loss that is neither a mean nor a sum over the rows of a batch."""
    return (
        f"{name} is neither a mean nor a sum over the rows of a batch: {reason}. Therefore workers "
        "(and accumulated batches) do not give the result of one process with the whole batch; "
        "each is weighted by its rows. If the loss has another divisor, pass loss_weight= to "
        "Estimator.from_torch, a function (output, target) that returns it, or use a loss of "
        'torch.nn; loss_weight="rows" confirms the weighting by rows'
    )


def counts_unevenly(criterion: Any) -> bool:  # criterion: a loss
    """Return True if the divisor of a mean loss may differ from the number of rows."""
    # a subclass may compute something else
    return type(criterion) in _OVER_CLASSES and criterion.reduction == "mean"


def _class_weights(criterion: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return each label's weight in a mean loss over classes; 0 if it is ignored."""
    kept = labels != criterion.ignore_index
    if criterion.weight is None:
        return kept.double()
    return criterion.weight.double()[labels * kept] * kept


# losses whose means are not over rows or elements
_OTHER_MEANS = ("CTCLoss", "AdaptiveLogSoftmaxWithLoss")


def check_weighted(parts: ModelParts, metrics: Sequence[object]) -> None:
    """Raise an error if the loss or a metric does not support row weights."""
    from bigdl.orca.learn.metrics import Metric

    if parts.loss_weight is not None:
        raise UsageError(
            "weight_col computes the loss per row and does not support loss_weight=; remove one of "
            "them",
            code="argument-conflict",
            argument="weight_col",
        )
    if isinstance(parts.loss, nn.Module):
        _unreduced(parts.loss)
    for name, measure in Metric.convert_metrics_dict(metrics, backend="pytorch").items():
        if not getattr(measure, "takes_weights", False):
            raise UsageError(
                f"weight_col cannot weight the metric {name}, which does not support row weights; "
                "remove it, or use a metric of bigdl.orca.learn.metrics",
                code="metric-unsupported",
                metric=name,
            )


class WeightedForward(PlainForward):
    """Forward pass with the loss ``sum(w * loss) / sum(w)``; w is the last target.

    Class weights and ignored labels of a loss over classes multiply w. A loss that is a sum over
    rows becomes ``sum(w * loss)``.
    """

    def __init__(
        self, model: torch.nn.Module, criterion: Criterion, columns: BatchColumns | None = None
    ):
        self._each, is_sum = _unreduced(criterion)
        super().__init__(model, criterion, columns, LossWeights(SUM if is_sum else ROWS))
        self._counted = 0.0

    def denominator(self, output: object, target: object, rows: int, loss: object = None) -> float:
        return self._counted

    def evaluate(self, batch: Tensors, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        return self.forward(batch, index)

    def weights(self, batch: Tensors) -> torch.Tensor:
        """Return the row weights of a batch, of shape (rows,)."""
        *_, weights = self.columns.split(batch)[-1]
        weights = weights.reshape(len(weights))
        if bool((weights < 0).any()) or not bool(torch.isfinite(weights).all()):
            raise UsageError(
                "The column weight_col has negative or non-finite numbers; weights must be >= 0",
                code="data-value",
                argument="weight_col",
            )
        return weights

    def _weighted_loss(self, output, target, weights):
        losses = self.call_criterion(self._each, output, target)
        rows = len(weights)
        if losses.ndim == 0 or losses.shape[0] != rows:
            raise UsageError(
                f"weight_col needs one loss per row, but with reduction='none' the loss has the "
                f"shape {tuple(losses.shape)} for {rows} rows",
                code="loss-unsupported",
            )
        weights = weights.to(losses.dtype)
        counts = self._counts(output, target, losses)
        weights = weights.reshape(rows, *[1] * (losses.ndim - 1))
        total = (weights * losses).sum()
        counted = (weights * counts).sum()
        self._counted = float(counted)
        if self.loss_weights.is_sum:
            return total
        return total / counted if self._counted else total * 0.0

    def _counts(self, output, targets, losses):
        """Return the weight of every loss element in the mean."""
        criterion = self.criterion
        target = targets[0] if isinstance(targets, tuple) else targets
        if getattr(criterion, "reduction", "mean") != "mean":  # a mean over rows, not elements
            return torch.full_like(losses, losses.shape[0] / max(1, losses.numel()))
        if _known_reduction(criterion):
            if not counts_unevenly(criterion):
                return torch.ones_like(losses)
            labels = target.to(torch.int64)
            if labels.shape != losses.shape:  # class probabilities
                return torch.ones_like(losses)
            return _class_weights(criterion, labels).to(losses.dtype)
        return self._counts_of_custom_loss(output, targets, losses)

    _has_even_mean = False  # whether all elements are known to have equal weights

    def _counts_of_custom_loss(self, output, targets, losses):
        """Infer the weights of a custom loss's elements from the mean that the loss returns."""
        if self._has_even_mean:
            return torch.ones_like(losses)
        with torch.enable_grad():
            mean = self.call_criterion(self.criterion, requiring_grad(output), targets)
        counts, form = label_weights(mean), read_form(mean, to_leaves=True)
        if counts is not None and counts.numel() == losses.numel():
            return counts.reshape(losses.shape).to(losses.dtype)
        if form is None or math.isclose(form.divisor, losses.numel(), rel_tol=1e-6):
            self._has_even_mean = form is None or form.is_even
            return torch.ones_like(losses)
        if math.isclose(form.divisor, losses.shape[0], rel_tol=1e-6):
            return torch.full_like(losses, losses.shape[0] / losses.numel())
        raise UsageError(
            f"weight_col computes the loss per row, but {self.loss_name[:1].lower()}"
            f"{self.loss_name[1:]} divides the sum of {losses.numel()} losses by "
            f"{form.divisor:g}, so the weight of a row is unknown; use a loss of torch.nn",
            code="loss-unsupported",
        )

    def forward(self, batch: Tensors, index: int) -> tuple[Any, Any, torch.Tensor]:
        inputs, named, (*targets, _) = self.columns.split(batch)
        output = self._run(inputs, named)
        target = targets[0] if len(targets) == 1 else tuple(targets)
        return output, target, self._weighted_loss(output, target, self.weights(batch))


def _unreduced(criterion):
    """Return the loss without reduction, and True if the original loss is a sum."""
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
        "weight_col needs a loss that can be computed per row, i.e. with a reduction argument, "
        f"such as torch.nn.MSELoss(), got {name}",
        code="loss-unsupported",
    )
