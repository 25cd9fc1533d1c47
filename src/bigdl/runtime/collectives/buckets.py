"""Gradient buckets: flat buffers per dtype and device that are all-reduced in pieces.

For a loss that is a mean of per-sample terms, a rank with n of the batch's N rows contributes
``n / N`` times its gradient, so the sum is the gradient of one process on the whole batch, also in
an uneven step and when a rank has no rows.  (DistributedDataParallel divides by the world size
instead.)  :class:`~bigdl.runtime.collectives.base.GradientSync` sums the buckets over the ranks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

BUCKET_ELEMENTS = 1 << 20  # elements of one all-reduce
PIECE_ELEMENTS = 1 << 20  # elements of one all-reduce of arrays: copying overlaps with sending
_ALIGNED = 64  # bytes: TensorFlow and XLA then use the memory without a copy
NONE, SPARSE, DENSE = 0, 1, 2  # layouts of a parameter's gradient on a rank


class SumBuffer:
    """A flat tensor whose pieces are summed over the ranks in place.

    Parameters
    ----------
    tensor : torch.Tensor
    start_sum : callable
        ``start_sum(tensor)`` starts to sum a tensor over the ranks, in place, and returns a
        function that waits for it.
    """

    def __init__(
        self, tensor: torch.Tensor, start_sum: Callable[[torch.Tensor], Callable[[], None]]
    ) -> None:
        self.tensor, self._start_sum = tensor, start_sum

    def fresh(self, size: int) -> torch.Tensor:
        """Return a tensor of `size` elements that :meth:`start` can use as `out`."""
        return self.tensor

    def start(self, begin: int, end: int, out: torch.Tensor | None = None) -> Callable[[], None]:
        """Start the all-reduce of a slice; all ranks must start the same slices in the same order.

        Parameters
        ----------
        begin, end : int
        out : torch.Tensor, optional
            Target of the sum at the same offsets, from :meth:`fresh`; default: the tensor itself.

        Returns
        -------
        callable
            Waits for the sum; all ranks wait in the same order.
        """
        return self._start_sum(self.tensor[begin:end])

    def settle(self) -> None:
        """Wait until the tensor may be written again; call it after all waits."""


class GradientGroups:
    """The parameters of a model, grouped by how their gradients are reduced.

    Parameters
    ----------
    parameters, may_be_sparse
        See :meth:`~bigdl.runtime.collectives.base.GradientSync.all_reduce_gradients`.
    make_buffer : callable
        See :class:`FlatBuckets`.
    carried : int
        Number of values of float64 that the sum of the first dense group carries.

    Attributes
    ----------
    dense : list of FlatBuckets
    sparse : list of torch.nn.Parameter
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        may_be_sparse: Sequence[torch.nn.Parameter],
        make_buffer: Callable[..., SumBuffer],
        carried: int = 0,
    ) -> None:
        self._carried = carried
        sparse = {id(p) for p in may_be_sparse}
        self._ids = tuple(map(id, parameters))
        self.sparse = [p for p in parameters if id(p) in sparse]
        groups: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if id(parameter) not in sparse:
                groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.dense = [
            FlatBuckets(members, make_buffer, 0 if number else carried)
            for number, members in enumerate(groups.values())
        ]

    def matches(self, parameters: Sequence[torch.nn.Parameter], carried: int | None = None) -> bool:
        """Return True if the groups were built from exactly these parameters.

        Parameters
        ----------
        parameters : sequence of torch.nn.Parameter
        carried : int, optional
            Number of values that they should carry.
        """
        return carried in (None, self._carried) and tuple(map(id, parameters)) == self._ids


class FlatBuckets:
    """A flat gradient buffer that is all-reduced in buckets, last layers first.

    A backward pass computes the gradients of the last parameters first. Within :meth:`overlap` a
    bucket is sent once it is full, so all buckets but the last are sent during the pass. All ranks
    send the buckets in the same order, even if they fill in another order. A rank that does not
    overlap sends them afterwards (Li et al., "PyTorch Distributed", VLDB 2020).

    Further elements of the buffer count the ranks on which each parameter has a gradient, and the
    ranks on which a gradient changed after it was sent. The last elements carry numbers of each
    rank to all ranks (:meth:`carry`): every rank has its own elements, which are zero on the
    others, and writes bits of its numbers to them as integers that every dtype represents exactly.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        Parameters of one dtype and device.
    make_buffer : callable
        ``make_buffer(size, dtype, device)`` returns a :class:`SumBuffer`.
    carried : int
        Number of values of float64 that the sum carries, of all ranks together.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        make_buffer: Callable[..., SumBuffer],
        carried: int = 0,
    ) -> None:
        import torch

        self._parameters = list(reversed(parameters))
        sizes = [p.numel() for p in self._parameters]
        first = self._parameters[0]
        total = sum(sizes)
        self._digits = torch.int8 if first.dtype.itemsize < 4 else torch.int16
        digits = carried * (8 // self._digits.itemsize)
        flags_end = total + len(sizes) + 1
        self.buffer = make_buffer(flags_end + digits, first.dtype, first.device)
        self._flat = self.buffer.tensor
        self._flags, self._carried = self._flat[total:flags_end], self._flat[flags_end:]
        self._carry: tuple[int, torch.Tensor] | None = None  # rank and its digits
        self._sums = self._carried  # of the latest sum
        self._views: list[torch.Tensor] = []
        self._bucket_of: list[int] = []
        self._ends: list[int] = []  # end offsets of the buckets in the buffer
        start = begin = 0
        for parameter, size in zip(self._parameters, sizes, strict=True):
            self._views.append(self._flat[start : start + size].view(parameter.shape))
            self._bucket_of.append(len(self._ends))
            start += size
            if start - begin >= BUCKET_ELEMENTS:
                self._ends.append(start)
                begin = start
        self._ends.append(self._flat.numel())  # includes the flags, so it is sent last
        # on a GPU a hook would have to synchronize streams: send after the backward pass instead
        self._can_overlap = len(self._ends) > 1 and first.device.type == "cpu"
        self._reset()

    def _reset(self) -> None:
        self._waits: list[Callable[[], None]] = []  # one per sent bucket
        self._is_copied = [False] * len(self._parameters)
        self._missing = Counter(self._bucket_of)
        self._is_stale = False  # a gradient changed after it was copied

    @contextlib.contextmanager
    def overlap(self, weight: float) -> Iterator[None]:
        """Context manager that all-reduces buckets as soon as the backward pass completes them.

        :meth:`all_reduce` must follow. Nothing is sent early if other hooks may change the
        gradients.
        """
        self._reset()
        if not (weight and self._can_overlap) or any(map(_has_hooks, self._parameters)):
            yield
            return

        def hook_of(index: int) -> Callable[[torch.Tensor], None]:
            def hook(_: torch.Tensor) -> None:
                if self._is_copied[index]:
                    self._is_stale = True
                    return
                self._copy(index, weight)
                self._missing[self._bucket_of[index]] -= 1
                while (bucket := len(self._waits)) < len(self._ends) - 1:
                    if self._missing[bucket]:
                        break
                    self._send()

            return hook

        hooks = [
            parameter.register_post_accumulate_grad_hook(hook_of(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def carry(self, rank: int, values: torch.Tensor) -> None:
        """Set the values of float64 that the next sum carries from this rank."""
        self._carry = rank, values.view(self._digits)

    def carried(self) -> list[torch.Tensor]:
        """Return the values that the latest sum has carried from each rank."""
        import torch

        _, digits = cast("tuple[int, torch.Tensor]", self._carry)
        sums = self._sums.to(device="cpu", dtype=self._digits).view(-1, len(digits))
        return [row.view(torch.float64) for row in sums]

    def all_reduce(self, weight: float) -> None:
        """Run :meth:`GradientSync.all_reduce_gradients` for these parameters."""
        self._reduce_rest(weight)
        if self._flags[
            -1
        ]:  # a gradient changed after it was sent, e.g. with activation checkpoints
            self._can_overlap = False
            self.buffer.settle()
            self._reset()
            self._reduce_rest(weight)
        present = (self._flags[:-1] != 0).tolist()
        self._sums = self._carried.clone()
        for parameter, view, is_present in zip(self._parameters, self._views, present, strict=True):
            if not is_present:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)
        self.buffer.settle()
        self._reset()

    def _reduce_rest(self, weight: float) -> None:
        import torch

        flags = [float(bool(weight) and p.grad is not None) for p in self._parameters]
        first = len(self._waits)
        for index, bucket in enumerate(self._bucket_of):
            while bucket > len(self._waits):
                self._send()
            if bucket >= first and not self._is_copied[index]:
                self._copy(index, weight)
        self._flags.copy_(torch.tensor([*flags, self._is_stale], dtype=self._flat.dtype))
        if self._carry is not None:
            rank, digits = self._carry
            self._carried.zero_()
            self._carried.view(-1, len(digits))[rank] = digits
        while len(self._waits) < len(self._ends):
            self._send()
        for wait in self._waits:
            wait()

    def _copy(self, index: int, weight: float) -> None:
        import torch

        parameter, view = self._parameters[index], self._views[index]
        with torch.no_grad():
            if parameter.grad is None or not weight:
                view.zero_()
            else:
                _check_dense(parameter.grad, parameter)
                torch.mul(parameter.grad, weight, out=view)
        self._is_copied[index] = True

    def _send(self) -> None:
        """Start the all-reduce of the next bucket."""
        bucket = len(self._waits)
        start = self._ends[bucket - 1] if bucket else 0
        self._waits.append(self.buffer.start(start, self._ends[bucket]))


def _has_hooks(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def sum_with_buffers(
    arrays: Sequence[npt.NDArray[Any]], weight: float, make_buffer: Callable[..., SumBuffer]
) -> list[npt.NDArray[Any]]:
    """Return the weighted sums of arrays over the ranks; see :meth:`GradientSync.sum_arrays`.

    The results are views of new memory. Each piece is copied to the buffer while the previous piece
    is being sent.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
    weight : float
    make_buffer : callable
        ``make_buffer(size, dtype)`` returns a :class:`SumBuffer`, which may be larger and reused.
    """
    out: dict[int, npt.NDArray[Any]] = {}
    waits: list[Callable[[], None]] = []
    weight = float(weight)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        members = [i for i, array in enumerate(arrays) if array.dtype == dtype]
        pieces, more = _start_sums([arrays[i] for i in members], weight, make_buffer)
        waits += more
        for i, piece in zip(members, pieces, strict=True):
            out[i] = piece
    for wait in waits:
        wait()
    return [out[i] for i in range(len(arrays))]


def _start_sums(
    arrays: Sequence[npt.NDArray[Any]], weight: float, make_buffer: Callable[..., SumBuffer]
) -> tuple[list[npt.NDArray[Any]], list[Callable[[], None]]]:
    """Start summing weighted arrays; return views of the sums, and wait functions in call order."""
    import numpy as np
    import torch

    step = _ALIGNED // arrays[0].itemsize
    sizes = [-(-array.size // step) * step for array in arrays]
    buffer = make_buffer(sum(sizes), getattr(torch, arrays[0].dtype.name))
    memory, sums = buffer.tensor.numpy(), buffer.fresh(sum(sizes))
    pieces, waits, sent, begin = [], [], 0, 0
    for array, size in zip(arrays, sizes, strict=True):
        piece, flat = memory[begin : begin + array.size], array.reshape(-1)
        for first in range(0, array.size, PIECE_ELEMENTS):
            part = piece[first : first + PIECE_ELEMENTS]
            if weight:
                np.multiply(flat[first : first + PIECE_ELEMENTS], weight, out=part)
            else:
                part.fill(0)
            if (end := begin + first + part.size) - sent >= PIECE_ELEMENTS:
                waits.append(buffer.start(sent, end, sums))
                sent = end
        pieces.append(sums.numpy()[begin : begin + array.size].reshape(array.shape))
        memory[begin + array.size : begin + size] = 0  # padding, which is sent, too
        begin += size
    if begin > sent:
        waits.append(buffer.start(sent, begin, sums))
    return pieces, [*waits, buffer.settle]


def _check_dense(gradient: torch.Tensor, parameter: torch.nn.Parameter) -> None:
    import torch

    if gradient.layout != torch.strided:
        raise UsageError(
            f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient, but no module "
            "such as nn.Embedding(sparse=True) says that it may; use such a module, or dense "
            "gradients",
            code="model-unsupported",
        )


def gradient_layout(gradient: torch.Tensor | None) -> int:
    """Return the layout of a gradient on this rank: NONE, SPARSE or DENSE."""
    if gradient is None:
        return NONE
    return SPARSE if gradient.is_sparse else DENSE


def scaled_gradient(parameter: torch.nn.Parameter, weight: float, *, dense: bool) -> torch.Tensor:
    """Return a parameter's gradient multiplied by `weight`, as a dense or sparse tensor."""
    import torch

    gradient = parameter.grad if weight else None
    if gradient is not None:
        scaled = gradient.detach() * weight
        if scaled.is_sparse:
            return scaled.to_dense() if dense else scaled.coalesce()
        return scaled.contiguous()
    if dense:
        return torch.zeros_like(parameter.detach(), memory_format=torch.contiguous_format)
    indices = torch.zeros((1, 0), dtype=torch.int64)
    values = torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
