"""Detection of how a loss reduces: mean over rows, sum, or mean over unmasked elements.

Each worker computes a part of a batch.  The gradients add up to that of one process only if each
part is weighted by the divisor of its loss: the number of rows, of labels that are not ignored, or
the sum of a mask.  For torch losses the divisor is known.  For any other loss :func:`read_form`
reads it from the first nodes of the autograd graph, which is almost free, and :func:`probe`
compares the loss of some rows with the losses of parts of them, in the first batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bigdl.common.errors import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", "orca")

T = TypeVar("T")

ROWS, SUM, DIVISOR, UNKNOWN = "rows", "sum", "divisor", "unknown"
_CODES = ("", ROWS, SUM, DIVISOR, UNKNOWN)  # exchanged between workers; "" is undecided
_PROBED_ROWS = 64


@dataclass(frozen=True)
class LossForm:
    """Divisors of the sums of elements in a loss, read from its autograd graph.

    Attributes
    ----------
    divisors : tuple of float
        Distinct divisors of the sums of elements that make up the loss, up to a factor that does
        not depend on the batch. An undivided sum has the divisor 1.
    is_undivided : bool
        Whether the loss only sums elements, without a mean or a division.
    is_even : bool
        Whether the divisors follow from shapes alone. False if that is unknown.
    """

    divisors: tuple[float, ...]
    is_undivided: bool
    is_even: bool

    @property
    def divisor(self) -> float:
        """First divisor, which suffices to weight losses with proportional divisors."""
        return self.divisors[0]

    def is_like(self, other: LossForm) -> bool:
        """Return True if the divisors of both losses are equal up to a common factor."""
        if not (any(self.divisors) and any(other.divisors)):
            return True  # no element counts
        if len(self.divisors) != len(other.divisors) or not (self.divisor and other.divisor):
            return False
        pairs = zip(self.divisors, other.divisors, strict=True)
        return all(
            math.isclose(left / self.divisor, right / other.divisor, rel_tol=1e-4)
            for left, right in pairs
        )


@dataclass(frozen=True)
class _Term:
    """Divisor of one term in a loss that is a sum of terms.

    Attributes
    ----------
    divisor : float
    is_plain : bool
        Whether the divisor follows from a shape, not from the values of a tensor.
    is_divided : bool
    """

    divisor: float
    is_plain: bool
    is_divided: bool


class _UnreadableError(Exception):
    """Raised at an autograd node from which no divisor can be read."""


def read_form(loss: Any, *, to_leaves: bool = False) -> LossForm | None:
    """Read a loss's divisors from its autograd graph; return None if that is impossible.

    Parameters
    ----------
    loss : torch.Tensor
        Loss with one element and an autograd graph.
    to_leaves : bool
        Inspect the whole graph to determine whether the divisor is even; for a graph whose leaves
        are the outputs of the model.
    """
    node = getattr(loss, "grad_fn", None)
    if node is None or loss.numel() != 1:
        return None
    try:
        terms = _terms(node, _Term(1.0, True, False))
    except (_UnreadableError, AttributeError, RuntimeError, RecursionError):
        return None
    if not terms or any(math.isnan(term.divisor) for term in terms):
        return None
    divisors: tuple[float, ...] = ()
    for term in terms:
        if not any(math.isclose(term.divisor, each, rel_tol=1e-6) for each in divisors):
            divisors += (term.divisor,)
    is_plain = all(term.is_plain for term in terms)
    if not is_plain and divisors == (1.0,) and float(loss.detach()) == 0.0:
        divisors = (0.0,)  # no element counts, and the divisor is clamped to 1
    is_even = to_leaves and is_plain and _is_elementwise(node)
    return LossForm(divisors, not any(term.is_divided for term in terms), is_even)


def _name(node: Any) -> str:
    """Return the name of an autograd node without the overload number."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def ignored_label(loss: object) -> int | None:
    """Return the ``ignore_index`` of a classification loss, read from its graph, or None."""
    waiting = [getattr(loss, "grad_fn", None)]
    for _ in range(40):
        node = waiting.pop(0) if waiting else None
        if node is None:
            if waiting:
                continue
            return None
        if _name(node) in _OVER_CLASSES:
            label = int(node._saved_ignore_index)
            return label - 2**64 if label >= 2**63 else label  # saved as an unsigned number
        waiting += [following for following, _ in node.next_functions]
    return None


def label_weights(loss: object) -> torch.Tensor | None:
    """Return the weight of each label in a mean classification loss, or None for other losses."""
    node = getattr(loss, "grad_fn", None)
    if node is None or _name(node) not in _OVER_CLASSES or node._saved_reduction != 1:
        return None
    labels: torch.Tensor = node._saved_target
    weights: torch.Tensor | None = node._saved_weight
    kept = labels.ne(cast("int", ignored_label(loss)))
    if weights is None:
        return kept.double()
    return weights.double()[labels * kept] * kept


_LEAF = "torch::autograd::AccumulateGrad"
_PASSING = {
    *("Neg", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias", "ToCopy"),
    *("Clone", "ViewAs", "Permute", "T", "Transpose", "AsStrided"),
}
_POINTWISE = {
    *("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "L1Loss", "KlDiv"),
    *("BinaryCrossEntropyWithLogits", "SoftMarginLoss", "MultiMarginLoss"),
    "MultilabelMarginLoss",
}
_OVER_CLASSES = {"NllLoss", "NllLoss2D", "NllLossNd"}
_ELEMENTWISE = {
    *_PASSING,
    *_POINTWISE,
    *("Mean", "Sum", "Add", "Sub", "Mul", "Div", "Pow", "Abs", "Exp", "Log", "Log1P", "Sqrt"),
    *("Sigmoid", "LogSigmoid", "Tanh", "Relu", "Softplus", "LogSoftmax", "Softmax", "Expand"),
    *("Clamp", "ClampMin", "ClampMax", "Where", "MaskedFill", "Maximum", "Minimum", "Gather"),
    *("LinalgVectorNorm", "Norm", "Sgn", "Square", "Rsub", "LeakyRelu", "Threshold", "Erf"),
}


def _terms(node: Any, term: _Term) -> list[_Term]:
    """Return the divisors of all terms that add up to the output of an autograd node.

    Parameters
    ----------
    node : torch.autograd.graph.Node or None
        Node that computed the number; None for a constant.
    term : _Term
        Divisor of the number in the loss.
    """
    if node is None:
        return []
    name, inputs = _name(node), [following for following, _ in node.next_functions]
    if name == _LEAF:
        return []  # a trained scalar, such as a task weight
    if name in ("Add", "Sub"):
        other = abs(float(getattr(node, "_saved_alpha", 1.0)))
        times = replace(term, divisor=term.divisor / other)
        return [*_terms(inputs[0], term), *(_terms(inputs[1], times) if len(inputs) > 1 else [])]
    if name in ("Mul", "Div"):
        following, factor = _of_product(node, name, inputs, term)
        return [factor] if following is None else _terms(following, factor)
    if name in _PASSING:
        return _terms(inputs[0], term)
    if name in _OVER_CLASSES or name in _POINTWISE:
        return [_of_torch(node, name, term)]
    if name in ("Mean", "Sum"):
        return _of_elements(node, term)
    raise _UnreadableError(name)


def _of_product(
    node: Any, name: str, inputs: Sequence[Any], term: _Term, dims: int = 8
) -> tuple[Any, _Term]:
    """Return the node of the factor that depends on the rows, and the divisor at that node."""
    is_division = name == "Div"
    if len(inputs) == 1:  # with a Python number
        number, is_plain, following = float(node._saved_other), term.is_plain, inputs[0]
    else:
        left, right = inputs
        if left is not None and right is not None:  # e.g. by the learned weight of a task
            if _is_trained_number(right):
                right = None
            elif not is_division and _is_trained_number(left):
                left = None
            else:
                raise _UnreadableError(name)
        if left is None and is_division:
            raise _UnreadableError(name)
        other = node._saved_self if left is None else node._saved_other
        if other is None or other.numel() != 1 or other.ndim > dims:
            raise _UnreadableError(name)
        following, number, is_plain = right if left is None else left, float(other), False
    if not number:  # no element counts, or the term is switched off
        return None, _Term(0.0 if is_division else math.inf, False, True)
    number = abs(number) if is_division else 1.0 / abs(number)
    return following, _Term(term.divisor * number, is_plain, term.is_divided or is_division)


def _is_trained_number(node: Any) -> bool:
    """Return True if a node's output depends only on one scalar parameter."""
    for _ in range(8):
        if node is None:
            return False
        if node.name() == _LEAF:
            return bool(node.variable.numel() == 1)
        if len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return False


def _of_torch(node: Any, name: str, term: _Term) -> _Term:
    """Return `term` with its divisor multiplied by that of a torch loss function."""
    if node._saved_reduction != 1:  # a sum, or of one element
        return term
    if name in _OVER_CLASSES:
        return _Term(term.divisor * float(node._saved_total_weight), False, True)
    return _Term(term.divisor * node._saved_self.numel(), term.is_plain, True)


def _count(node: Any) -> int:
    """Return the number of input elements that a mean averages into each output element."""
    sizes = node._saved_self_sym_sizes
    dims = getattr(node, "_saved_dim", None) or range(len(sizes))
    # dims may be saved as unsigned numbers
    return math.prod(sizes[dim - 2**64 if dim >= 2**63 else dim] for dim in dims)


def _of_elements(node: Any, term: _Term) -> list[_Term]:
    """Return the divisors of a mean or sum, including means and factors deeper in the graph."""
    is_first = True
    while node is not None:
        name, inputs = _name(node), [following for following, _ in node.next_functions]
        if name == "Mean":
            is_first = False
            term = _Term(term.divisor * _count(node), term.is_plain, True)
        elif name == "Stack" and is_first:  # the sum of a list of losses
            return [each for following in inputs for each in _terms(following, term)]
        elif name in ("Mul", "Div"):
            try:
                # a batch of one row has one-element tensors, which are not scalars
                node, term = _of_product(node, name, inputs, term, dims=0)
            except _UnreadableError:
                break
            continue
        elif name != "Sum" and name not in _PASSING:
            break
        node = inputs[0]
    return [term]


def _is_elementwise(node: Any) -> bool:
    """Return True if a small graph has only operations whose shapes follow from its leaves."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = _name(node)
        if name == _LEAF:
            continue
        if name not in _ELEMENTWISE or len(seen) > 200:
            return False
        waiting += [following for following, _ in node.next_functions]
    return True


@contextmanager
def readable_graph() -> Iterator[None]:
    """Context manager that records autograd graphs without storing large tensors."""

    def shape_alone(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() <= 1:
            return tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    hooks = torch.autograd.graph.saved_tensors_hooks(shape_alone, lambda tensor: tensor)
    with torch.enable_grad(), hooks:
        yield


# -- trees of tensors ------------------------------------------------------------------------------


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor | None], value: T) -> T:
    """Apply a function to each tensor of a nested structure.

    Parameters
    ----------
    function : callable
    value : tensor, tuple, named tuple, list, dict, dataclass or None
        Structure; other objects, such as a cache, are returned unchanged.
    """
    out: Any = value
    if isinstance(value, torch.Tensor):
        out = function(value)
    elif isinstance(value, Mapping):
        try:
            out = copy.copy(value)  # keep its class
            for key, each in value.items():
                out[key] = map_tensors(function, each)
        except TypeError:
            out = value
    elif isinstance(value, tuple | list):
        mapped = [map_tensors(function, each) for each in value]
        out = type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        out = copy.copy(value)
        for name in value.__dataclass_fields__:
            object.__setattr__(out, name, map_tensors(function, getattr(value, name)))
    return cast("T", out)


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors of a nested structure."""
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(take, value)
    return tensors


def rows_at(value: T, index: torch.Tensor, rows: int) -> T:
    """Select rows of all tensors that have `rows` rows, and detach the others."""

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        # some sequences have time first
        for dim, size in enumerate(tensor.shape[:2]):
            if size == rows:
                return tensor.detach().index_select(dim, index.to(tensor.device))
        return tensor.detach()

    return map_tensors(taken, value)


def requiring_grad(value: T) -> T:
    """Copy a structure; its floating-point and complex tensors are leaves that need gradients."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.detach()
        can = out.is_floating_point() or out.is_complex()
        return out.requires_grad_() if can else out

    return map_tensors(leaf, value)


MIXED = "it is a sum of terms with different divisors"

# -- the probe -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeResult:
    """Reduction of a loss that a probe detected.

    Attributes
    ----------
    reduction : {"", "rows", "sum", "divisor", "unknown"}
        How the loss reduces over the batch; "" if undecided, as for a loss of 0.
    reason : str
        Why the reduction is unknown.
    """

    reduction: str = ""
    reason: str = ""

    @property
    def code(self) -> float:
        """Reduction as a number, for exchange between workers."""
        return float(_CODES.index(self.reduction))


def agreed(codes: Sequence[float]) -> str:
    """Combine the reductions that the workers detected.

    Parameters
    ----------
    codes : sequence of float
        :attr:`ProbeResult.code` of all workers.
    """
    reductions = {_CODES[int(code)] for code in codes} - {""}
    if len(reductions) <= 1:
        return next(iter(reductions), "")
    return DIVISOR if reductions == {ROWS, DIVISOR} else UNKNOWN


_TOLERANCES = {"float64": 1e-8, "float32": 5e-5}  # rounding tolerance by dtype


def tolerance_of(dtype: str) -> float:
    """Return the relative rounding tolerance for comparing losses of a dtype."""
    return _TOLERANCES.get(dtype.removeprefix("torch."), 3e-2)


def probe(loss_of: Callable[[torch.Tensor], Any], rows: int) -> ProbeResult:
    """Detect a loss's reduction by comparing the loss of a batch with the losses of its parts.

    Parameters
    ----------
    loss_of : callable
        ``loss_of(index)`` computes the loss of the rows with these indices.
    rows : int
        Rows of the batch, at least 1.
    """
    return probe_parts(lambda index: PartialLoss.of(loss_of(index), len(index)), rows)


def probe_parts(part_of: Callable[[torch.Tensor], PartialLoss], rows: int) -> ProbeResult:
    """Detect a loss's reduction as :func:`probe` does, from :class:`PartialLoss` objects."""
    count = min(rows, _PROBED_ROWS)
    everything = torch.arange(count)
    cut = max(1, count // 3)
    splits = [(everything[:cut], everything[cut:]), (everything[::2], everything[1::2])]
    if count == 1:  # use the row twice
        everything = torch.zeros(2, dtype=torch.int64)
        splits = [(everything[:1], everything[1:])]
    try:
        whole = part_of(everything)
        pairs = [(part_of(one), part_of(other)) for one, other in splits]
    except Exception as error:  # of the user's function
        text = " ".join(str(error).split())[:200]
        return ProbeResult(UNKNOWN, f"it cannot be computed for a part of a batch ({text})")
    return _classify(whole, pairs)


@dataclass(frozen=True)
class PartialLoss:
    """Loss of a subset of a batch's rows.

    Attributes
    ----------
    loss : float
    rows : int
    form : LossForm or None
        Form of the loss, if it can be read.
    tolerance : float
        See :func:`tolerance_of`.
    """

    loss: float
    rows: int
    form: LossForm | None
    tolerance: float

    @classmethod
    def of(cls, loss: Any, rows: int) -> PartialLoss:
        """Build a partial loss from a torch loss and its number of rows."""
        if not isinstance(loss, torch.Tensor):
            return cls(float(loss), rows, None, 2e-4)
        form = read_form(loss, to_leaves=True)
        tolerance = tolerance_of(str(loss.dtype))
        return cls(float(loss.detach()), rows, form, tolerance)

    @property
    def divisor(self) -> float:
        return float("nan") if self.form is None else self.form.divisor

    def times(self, number: float) -> float:
        """Return the loss multiplied by a number, where 0 times nan is 0."""
        return 0.0 if number == 0.0 else self.loss * number


def _classify(whole: PartialLoss, pairs: Sequence[tuple[PartialLoss, PartialLoss]]) -> ProbeResult:
    parts = [part for pair in pairs for part in pair]
    everything = [whole, *parts]
    forms = [part.form for part in everything]
    is_read = all(form is not None for form in forms)
    if is_read and not all(
        cast("LossForm", f).is_like(cast("LossForm", whole.form)) for f in forms
    ):
        return ProbeResult(UNKNOWN, MIXED)
    if whole.divisor == 0.0 or (math.isnan(whole.loss) and not is_read):
        return ProbeResult()
    if any(math.isnan(part.loss) and part.divisor != 0.0 for part in everything):
        return ProbeResult()
    size = max(abs(part.loss) for part in everything if not math.isnan(part.loss))
    if size == 0.0 or math.isinf(size):
        return ProbeResult()

    def fits(expected: Callable[[PartialLoss, PartialLoss], float]) -> bool:
        return all(abs(whole.loss - expected(*pair)) <= whole.tolerance * size for pair in pairs)

    is_sum = fits(lambda one, other: one.times(1.0) + other.times(1.0))
    is_mean = fits(
        lambda one, other: (one.times(one.rows) + other.times(other.rows)) / (one.rows + other.rows)
    )
    if is_read and all(math.isclose(part.divisor, whole.divisor) for part in parts):
        if is_sum:
            return ProbeResult(SUM)
    elif is_read:
        adds_up = all(
            math.isclose(one.divisor + other.divisor, whole.divisor, rel_tol=1e-4)
            for one, other in pairs
        )
        is_weighted = adds_up and fits(
            lambda one, other: (
                (one.times(one.divisor) + other.times(other.divisor))
                / (one.divisor + other.divisor)
            )
        )
        if is_weighted:
            is_even = is_mean and all(form and form.is_even for form in forms)
            return ProbeResult(ROWS if is_even else DIVISOR)
    elif is_sum:
        return ProbeResult(SUM)
    if is_mean:
        return ProbeResult(ROWS)
    one, other = pairs[0]
    return ProbeResult(
        UNKNOWN,
        f"it is {whole.loss:.5g} for {whole.rows} rows, but {one.loss:.5g} for {one.rows} of them "
        f"and {other.loss:.5g} for the other {other.rows}, which is neither a mean nor a sum",
    )


# -- for training loops --------------------------------------------------------------------------


class LossWeights:
    """Per-worker weights that combine the losses of a batch's parts into the batch's loss.

    The loop calls :meth:`is_due` for each batch and probes the loss when it is due. The workers
    exchange their results and pass the common one to :meth:`settle`.

    Parameters
    ----------
    known : {"", "rows", "sum"}
        Reduction of a well-known loss; "" if the loss must be probed.
    loss_weight : callable, {"rows", "sum"} or None
        ``loss_weight`` of the Estimator: a reduction, or ``loss_weight(output, target)`` that
        returns the weight of a batch.

    Attributes
    ----------
    reduction : {"", "rows", "sum", "divisor", "unknown"}
    reason : str
        Why the reduction is unknown.
    """

    def __init__(self, known: str = "", loss_weight: Callable[..., float] | str | None = None):
        self._loss_weight = loss_weight if callable(loss_weight) else None
        if isinstance(loss_weight, str):
            self.reduction = loss_weight
        else:
            self.reduction = known if loss_weight is None else DIVISOR
        self.is_known = bool(self.reduction)
        self.reason = ""
        self._batches = 0
        self._last = 1.0  # last weight per row
        self._form: LossForm | None = None

    @property
    def is_sum(self) -> bool:
        return self.reduction == SUM

    @property
    def is_uneven(self) -> bool:
        """True if the workers must exchange the divisors of their partial losses."""
        return self.reduction == DIVISOR

    def is_due(self) -> bool:
        """Count a batch; return True on every rank if the loss should be probed with this batch.

        Every batch is due until the reduction is known; then the intervals double.
        """
        self._batches += 1
        return not self.reduction or self._batches & (self._batches - 1) == 0

    def state(self) -> list[object]:
        """Return what the batches so far have determined, as JSON values."""
        return [self.reduction, self.reason, self._batches, self._last]

    def restore(self, state: object) -> None:
        """Restore a result of :meth:`state`."""
        reduction, self.reason, self._batches, self._last = cast("list[Any]", state)
        self.reduction = reduction

    def settle(self, reduction: str, reason: str = "") -> bool:
        """Set the reduction that the workers agreed on; return True when it becomes unknown."""
        if reduction == "" or reduction == self.reduction or self.reduction == UNKNOWN:
            return False
        if reduction == UNKNOWN:
            # an earlier reduction stays: it was right for the batches since then
            is_new, self.reason = not self.reason, reason or "its reduction differs between batches"
            self.reduction = self.reduction or UNKNOWN
            return is_new
        if not self.reduction:
            self.reduction = reduction
        elif reduction == DIVISOR:
            self.reduction = DIVISOR
        return False

    def of(self, loss: object, output: object, target: object, rows: int) -> float:
        """Return the weight of a worker's part of a batch.

        Parameters
        ----------
        loss : tensor
            Loss of the part, with its autograd graph.
        output, target : object
        rows : int
        """
        if self._loss_weight is not None:
            with torch.no_grad():
                return float(self._loss_weight(output, target))
        return self.divisor_of(loss, rows) if self.reduction == DIVISOR else float(rows)

    def divisor_of(self, loss: object, rows: int) -> float:
        """Return the divisor of the loss for part of a batch; estimate it if it is unknown."""
        form = read_form(loss)
        if form is None or not math.isfinite(form.divisor):
            return self._last * rows
        if form.divisor:
            self._form = self._form or form
            self._last = form.divisor / rows
            if not form.is_like(self._form):
                self.reason = self.reason or MIXED
        return form.divisor
