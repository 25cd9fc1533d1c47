"""Forward passes: from a batch to output, target and loss, for plain and Lightning modules."""

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
from bigdl.training.state import isolated_rng

if TYPE_CHECKING:
    from bigdl.orca.learn.pytorch.lightning import LightningForward

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
                f"label_cols=, {_ELSE}",
                code="argument-missing",
                argument="label_cols",
                columns=list(batch),
            )
        features = self.features or [key for key in batch if key not in self.labels]
        for key in (*features, *self.labels):
            if key not in batch:
                raise UsageError(
                    f"The batches have no {key!r}; they are dicts of {list(batch)}",
                    code="column-missing",
                    column=key,
                    columns=list(batch),
                )
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
            f"feature_cols=, {_ELSE}",
            code="model-input",
            columns=list(named),
        ) from None


def call_model(model: torch.nn.Module, inputs: Sequence[Any], names: Sequence[str] = ()) -> Any:
    """Call a model; refuse inputs that are more or fewer than its forward takes.

    A model of Hugging Face's kind gets inputs by `names`, those of the columns, if they are known.

    A model that does not compute with the dtypes of its inputs, such as a linear layer of floats
    with whole numbers, gets those numbers in a dtype that it computes with, see
    :func:`in_dtypes_of`. The error of an input that the model cannot compute tells the shapes that
    it was given.
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
                "join columns of numbers to one, e.g. by array(a, b) or VectorAssembler",
                code="model-input",
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


def accepted_inputs(model: torch.nn.Module, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return inputs in the dtypes in which :func:`call_model` has given such ones to a model."""
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
                f"{str(leaf.dtype)[6:]}; cast the column, or fill what is missing",
                code="data-value",
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


def takes_names(model: Any) -> bool:
    """Return True for a model of Hugging Face's kind, whose inputs are told by their names."""
    return isinstance(getattr(model, "main_input_name", None), str)


def has_own_loss(model: Any) -> bool:
    """Return True if the forward of a model takes labels, and so computes a loss itself."""
    return takes_names(model) or "labels" in inspect.signature(model.forward).parameters


def named_inputs(model: Any, inputs: Sequence[Any], names: Sequence[str]) -> dict | None:
    """Return the inputs of a model of Hugging Face's kind by name; None for another."""
    if not takes_names(model):
        return None
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return dict(inputs[0])
    if len(names) != len(inputs) or not set(names) <= set(_parameters(model)):
        return None
    return dict(zip(names, inputs, strict=True))


def _parameters(model) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def is_record(output: Any) -> bool:
    """Return True for a dict, a named tuple or a dataclass, whose fields have names."""
    has_fields = hasattr(output, "_fields") or hasattr(output, "__dataclass_fields__")
    return isinstance(output, Mapping) or (has_fields and not isinstance(output, type))


def fields_of(output: Any) -> dict[str, Any]:
    """Return the fields of a record that it has, by name."""
    if isinstance(output, Mapping):
        return dict(output)
    names = getattr(output, "_fields", None) or output.__dataclass_fields__
    fields = {name: getattr(output, name) for name in names}
    return {name: value for name, value in fields.items() if value is not None}


def logits_of(output: Any) -> Any:
    """Return the logits of an output that has them among others, as those of Hugging Face have.

    Other outputs are returned as they are.
    """
    if is_record(output) and type(output) is not dict:  # which a program takes apart itself
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
    loss_weights : LossWeights
        What parts of a batch weigh in its loss.
    module : LightningForward or None
        Whose hooks are called around batches, updates and epochs; None for other modules.
    """

    criterion: Any = None
    module: LightningForward | None = None

    def __init__(
        self,
        model: Any,
        columns: BatchColumns | None = None,
        loss_weights: LossWeights | None = None,
    ):
        self.model, self.columns = model, columns or BatchColumns()
        self.loss_weights = loss_weights or LossWeights()

    @property
    def loss_name(self) -> str:
        """The loss, as a message names it."""
        if self.criterion is None:
            return f"The loss of {type(self.model).__name__}"
        name = getattr(self.criterion, "__name__", type(self.criterion).__name__)
        return "The loss, a lambda," if name == "<lambda>" else f"The loss {name}"

    @abstractmethod
    def forward(self, batch: Any, index: int) -> tuple[Any, Any, Any]:
        """Output, target and loss (None without a criterion) of a batch."""

    def evaluate(self, batch: Any, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        """The same of a validation batch."""
        return self.forward(batch, index)

    def weights(self, batch: Any) -> torch.Tensor | None:
        """The weights of a batch's rows, or None where each counts once."""
        return None

    def denominator(self, output: Any, target: Any, rows: int, loss: Any = None) -> float:
        """Return what this worker's part of a batch counts in the mean loss."""
        return self.loss_weights.of(loss, output, target, rows)

    def find(self, batch: Any, output: Any, target: Any, rows: int, loss: Any) -> ProbeResult:
        """Look at the loss of a batch; returns what can be told of it.

        Neither the model nor random numbers are other than before.

        Parameters
        ----------
        batch, output, target : object
        rows : int
        loss : tensor
        """
        form = read_form(loss)
        if form is None:
            return ProbeResult(ROWS)  # what Lightning expects of a training step
        return ProbeResult(SUM if form.is_undivided else DIVISOR)

    def prediction(self, output: Any, takes: str) -> Any:
        """Return the output as a metric takes it, see :attr:`TorchMetric.takes`.

        A loss of logits says that the output is no probability yet. Of an output with ``logits``
        among its fields a metric takes these.
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

    def take_sizes(self, batch: Any) -> None:
        """Let lazy layers of the model take their sizes from a batch."""
        inputs, named, _ = self.columns.split(batch)
        training = self.model.training
        with torch.no_grad():
            self.model.eval()(*inputs, **named)
        self.model.train(training)

    def judged(self, output: Any, target: Any, weights: Any, loss: Any) -> tuple[Any, Any, Any]:
        """Return what metrics look at: predictions and labels without those that the loss ignores.

        Parameters
        ----------
        output, target, weights : object
            Of a batch, on the CPU.
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
        if (is_over_classes and output.ndim > 2) or output.shape[
            :-1
        ] != target.shape:  # classes come second
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
        """Have the module in evaluation mode for the time of a block."""
        training = self.model.training
        self.model.eval()
        yield
        self.model.train(training)


class PlainForward(ForwardPass):
    """``criterion(model(*features), target)``."""

    def __init__(
        self,
        model: Any,
        criterion: Any,
        columns: BatchColumns | None = None,
        loss_weights: LossWeights | None = None,
    ):
        super().__init__(model, columns, loss_weights or LossWeights(_known_form(criterion)))
        self.criterion = criterion
        self._elementwise = isinstance(criterion, _ELEMENTWISE)
        self._over_classes = isinstance(criterion, _OVER_CLASSES)
        self._made: Any = None  # the last loss

    def forward(self, batch: Any, index: int) -> tuple[Any, Any, Any]:
        inputs, named, target = self.columns.split(batch)
        output, loss = self._run(inputs, named), None
        if self.criterion is not None:
            loss = self._made = self.call_criterion(self.criterion, output, target)
        return output, target, loss

    def evaluate(self, batch: Any, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        inputs, named, target = self.columns.split(batch)
        output, loss = self._run(inputs, named), None
        if self.criterion is None:
            return output, target, loss
        if self.loss_weights.is_known:
            loss = self.call_criterion(self.criterion, output, target)
        else:
            with readable_graph():
                loss = self.call_criterion(self.criterion, requiring_grad(output), target)
        self._made = loss
        return output, target, loss

    def _run(self, inputs, named):
        if named:
            check_keywords(self.model, named)
            return self.model(**named)
        return call_model(self.model, inputs, self.columns.features or ())

    def find(self, batch: Any, output: Any, target: Any, rows: int, loss: Any) -> ProbeResult:
        criterion = self.criterion
        has_rows = any(rows in tensor.shape[:2] for tensor in tensors_in(output))
        if criterion is None or loss is not self._made or not has_rows:
            return super().find(batch, output, target, rows, loss)

        def loss_of(index):
            some_rows = requiring_grad(rows_at(output, index, rows))
            return self.call_criterion(criterion, some_rows, rows_at(target, index, rows))

        with isolated_rng(0), torch.enable_grad():
            criterion = copy.deepcopy(criterion)  # it may count its calls
            return probe(loss_of, rows)

    def denominator(self, output: Any, target: Any, rows: int, loss: Any = None) -> float:
        """Return what this worker's part of a batch counts in the mean loss.

        That is the number of rows, except where classes have weights or labels are ignored, and
        what is read off a loss that is not torch's.
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
                "number the classes from 0 on, or give the model more outputs",
                code="data-value",
            ) from None

    def _arguments(self, criterion, output, target) -> tuple[Sequence, Sequence]:
        """Return what a loss is called with: outputs and targets.

        A tuple or list is given element by element. A record (a dict, a named tuple, a dataclass)
        is given whole, unless the loss takes as many arguments as there are fields and targets; a
        loss of torch gets the logits of one that has them.
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


class OwnLossForward(PlainForward):
    """``model(*features, labels=target)`` of a model that computes its loss itself.

    Such are the models of Hugging Face, and others whose forward takes ``labels``: the output has
    ``loss``, or is a tuple that begins with it. Columns of the targets that are arguments of the
    forward are given under their names.
    """

    def __init__(
        self,
        model: Any,
        columns: BatchColumns | None = None,
        loss_weights: LossWeights | None = None,
    ):
        super().__init__(model, None, columns, loss_weights or LossWeights())

    def forward(self, batch: Any, index: int) -> tuple[Any, Any, Any]:
        output, target = self._with_labels(batch)
        loss = self._made = self._loss_of(output)
        return output, target, loss

    def evaluate(self, batch: Any, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        if self.loss_weights.is_known or has_tables(self.model):
            return self.forward(batch, index)
        with readable_graph():
            output, target = self._with_labels(batch)
        loss = self._made = self._loss_of(output)
        return map_tensors(torch.Tensor.detach, output), target, loss

    def find(self, batch: Any, output: Any, target: Any, rows: int, loss: Any) -> ProbeResult:
        if loss is not self._made or has_tables(self.model) or self._looks > 1:
            return ForwardPass.find(self, batch, output, target, rows, loss)
        self._looks += 1

        def loss_of(index):
            return self._loss_of(self._with_labels(rows_at(batch, index, rows))[0])

        modes = [(module, module.training) for module in self.model.modules()]
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self.model.eval()
        try:
            with isolated_rng(0), readable_graph():
                return probe(loss_of, rows)
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, value in kept:
                    if not torch.equal(buffer, value):  # the graph of the loss may hold it
                        buffer.copy_(value)

    _looks = 0  # forward passes of the model cost more than those of a loss

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
                f"arguments {list(names)}; name the columns of the targets as it does, or pass "
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
                f"{type(self.model).__name__} was given labels and returned no loss; return a dict "
                "or a dataclass with loss and logits, or pass loss= to Estimator.from_torch",
                code="model-output",
            )
        return loss


def _required(function: Any) -> int | None:
    """Return how many arguments a loss takes by position; None if that is not known."""
    function = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def _known_form(criterion: Any) -> str:
    """Return what is known of a loss without a look: that of torch's own classes."""
    # a subclass may compute something else
    if criterion is None or type(criterion).__module__ != nn.MSELoss.__module__:
        return ""
    if isinstance(criterion, nn.AdaptiveLogSoftmaxWithLoss):
        return ""
    return SUM if getattr(criterion, "reduction", "mean") == "sum" else ROWS


def loss_sentence(name: str, reason: str) -> str:
    """Return what the user is told of a loss whose parts nobody can weigh."""
    return (
        f"{name} is no mean and no sum over the rows of a batch: {reason}. So workers (and batches "
        "that are accumulated) do not give what one process gives with the whole batch; each "
        "counts by its rows. If the loss is divided by something else, pass loss_weight= to "
        "Estimator.from_torch, a function (output, target) that returns it, or make the loss a "
        'module of torch.nn; loss_weight="rows" says that it is meant so'
    )


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


def check_weighted(parts: Any, metrics: Any) -> None:
    """Refuse a loss that cannot be taken row by row, and metrics that cannot be weighted."""
    from bigdl.orca.learn.metrics import Metric

    if parts.loss_weight is not None:
        raise UsageError(
            "weight_col takes the loss row by row and does not go with loss_weight=; leave one of "
            "them out",
            code="argument-conflict",
            argument="weight_col",
        )
    if isinstance(parts.loss, nn.Module):
        _per_row(parts.loss)
    for name, measure in Metric.convert_metrics_dict(metrics, backend="pytorch").items():
        if not getattr(measure, "takes_weights", False):
            raise UsageError(
                f"weight_col cannot weight the metric {name}, which has no notion of rows that "
                "count more than others; leave it out, or use a metric of "
                "bigdl.orca.learn.metrics",
                code="metric-unsupported",
                metric=name,
            )


class WeightedForward(PlainForward):
    """``sum(w * loss) / sum(w)`` over the rows; the last target of a batch is w.

    Class weights and ignored labels of a loss over classes multiply w. A loss that adds up over the
    rows becomes ``sum(w * loss)``.
    """

    def __init__(self, model: Any, criterion: Any, columns: BatchColumns | None = None):
        self._each, is_sum = _per_row(criterion)
        super().__init__(model, criterion, columns, LossWeights(SUM if is_sum else ROWS))
        self._counted = 0.0

    def denominator(self, output: Any, target: Any, rows: int, loss: Any = None) -> float:
        return self._counted

    def evaluate(self, batch: Any, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        return self.forward(batch, index)

    def weights(self, batch: Any) -> torch.Tensor:
        """The weights of a batch's rows, of shape (rows,)."""
        *_, weights = self.columns.split(batch)[-1]
        weights = weights.reshape(len(weights))
        if bool((weights < 0).any()) or not bool(torch.isfinite(weights).all()):
            raise UsageError(
                "The column weight_col has negative numbers or none; weights are >= 0",
                code="data-value",
                argument="weight_col",
            )
        return weights

    def _weighted_loss(self, output, target, weights):
        losses = self.call_criterion(self._each, output, target)
        rows = len(weights)
        if losses.ndim == 0 or losses.shape[0] != rows:
            raise UsageError(
                f"weight_col needs a loss of every row, but with reduction='none' the loss has the "
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
        """Return the weight of every element of a loss in its mean."""
        criterion = self.criterion
        target = targets[0] if isinstance(targets, tuple) else targets
        if getattr(criterion, "reduction", "mean") != "mean":  # over the rows, not the elements
            return torch.full_like(losses, losses.shape[0] / max(1, losses.numel()))
        if _known_form(criterion):
            if not counts_unevenly(criterion):
                return torch.ones_like(losses)
            labels = target.to(torch.int64)
            if labels.shape != losses.shape:  # class probabilities
                return torch.ones_like(losses)
            return _class_weights(criterion, labels).to(losses.dtype)
        return self._counts_of_own(output, targets, losses)

    _has_even_mean = False  # whether all elements are known to count alike

    def _counts_of_own(self, output, targets, losses):
        """Return the same for a loss that is not of torch, as its own mean counts."""
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
            f"weight_col takes the loss row by row, and {self.loss_name[:1].lower()}"
            f"{self.loss_name[1:]} divides the sum of {losses.numel()} losses by "
            f"{form.divisor:g}, so what a row counts in it cannot be told; use a loss of torch.nn",
            code="loss-unsupported",
        )

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
        f"as torch.nn.MSELoss(), got {name}",
        code="loss-unsupported",
    )
