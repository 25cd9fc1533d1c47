"""Gradients as flat buffers: one per dtype and device, cut in buckets that are summed.

For a loss that is a mean of per-sample terms, a rank with n of the batch's N rows contributes
``n / N`` times its gradient, so the sum is the gradient of one process on the whole batch, also in
an uneven step and when a rank has no rows.  (DistributedDataParallel divides by the world size
instead.)  How a bucket is summed over the ranks is somebody else's: see
:class:`~bigdl.runtime.collectives.base.GradientSync`.
"""

from collections.abc import Callable, Sequence

from bigdl.common.errors import UsageError

_BUCKET = 4 << 20  # elements of one all-reduce
_PIECE = 1 << 20  # the same for arrays: small, so that copying overlaps with sending
_ALIGNED = 64  # bytes: TensorFlow and XLA take memory that begins so as it is
NONE, SPARSE, DENSE = 0, 1, 2  # what a rank has as gradient of a parameter


class GradientGroups:
    """The parameters of a model, sorted by how their gradients are reduced; made once.

    Parameters
    ----------
    parameters, may_be_sparse
        See :meth:`~bigdl.runtime.collectives.base.GradientSync.all_reduce_gradients`.
    start_sum : callable
        See :class:`FlatBuckets`.

    Attributes
    ----------
    dense : list of FlatBuckets
    sparse : list of torch.nn.Parameter
    """

    def __init__(self, parameters, may_be_sparse, start_sum: Callable):
        sparse = {id(p) for p in may_be_sparse}
        self._ids = tuple(map(id, parameters))
        self.sparse = [p for p in parameters if id(p) in sparse]
        kinds: dict[tuple, list] = {}
        for parameter in parameters:
            if id(parameter) not in sparse:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.dense = [FlatBuckets(members, start_sum) for members in kinds.values()]

    def are_of(self, parameters) -> bool:
        """Return True if it was made of these very parameters; an optimizer may get more later."""
        return tuple(map(id, parameters)) == self._ids


class FlatBuckets:
    """One flat buffer for the gradients of `parameters`, reduced in buckets that overlap copying.

    The last ``len(parameters)`` elements say on how many ranks each parameter has a gradient.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        Of one dtype and device.
    start_sum : callable
        ``start_sum(tensor)`` starts to sum a tensor over the ranks, in place, and returns a
        function that waits for it.
    """

    def __init__(self, parameters, start_sum: Callable):
        import torch

        self._start_sum = start_sum
        self._parameters = list(parameters)
        sizes = [p.numel() for p in self._parameters]
        first = self._parameters[0]
        total = sum(sizes)
        self._flat = torch.zeros(total + len(sizes), dtype=first.dtype, device=first.device)
        self._flags = self._flat[total:]
        self._views, start = [], 0
        for parameter, size in zip(self._parameters, sizes, strict=True):
            self._views.append(self._flat[start : start + size].view(parameter.shape))
            start += size

    def all_reduce(self, weight: float) -> None:
        """Do :meth:`GradientSync.all_reduce_gradients` for these parameters."""
        import torch

        flags, waits, start, filled = [], [], 0, 0
        with torch.no_grad():
            for parameter, view in zip(self._parameters, self._views, strict=True):
                gradient = parameter.grad if weight else None
                flags.append(0.0 if gradient is None else 1.0)
                if gradient is None:
                    view.zero_()
                else:
                    _check_dense(gradient, parameter)
                    torch.mul(gradient, weight, out=view)
                filled += view.numel()
                if filled - start >= _BUCKET:
                    waits.append(self._start_sum(self._flat[start:filled]))
                    start = filled
            self._flags.copy_(torch.tensor(flags, dtype=self._flat.dtype))
            waits.append(self._start_sum(self._flat[start:]))
            for wait in waits:
                wait()
            present = (self._flags != 0).tolist()
            for parameter, view, here in zip(self._parameters, self._views, present, strict=True):
                if not here:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)


def summed(arrays: Sequence, weight: float, start_sum: Callable) -> list:
    """Sum arrays over the ranks, see :meth:`GradientSync.sum_arrays`.

    The results are views of buffers that belong to this call, so every number is copied once, while
    the bucket before it is being sent.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
    weight : float
    start_sum : callable
        See :class:`FlatBuckets`.
    """
    out, waits, weight = [None] * len(arrays), [], float(weight)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        members = [i for i, array in enumerate(arrays) if array.dtype == dtype]
        pieces, more = _start_sums([arrays[i] for i in members], weight, start_sum)
        waits += more
        for i, piece in zip(members, pieces, strict=True):
            out[i] = piece
    for wait in waits:
        wait()
    return out


def _start_sums(arrays, weight, start_sum) -> tuple[list, list[Callable]]:
    """The parts of a buffer that will be the sums, and what waits for them."""
    import numpy as np
    import torch

    step = _ALIGNED // arrays[0].itemsize
    sizes = [-(-array.size // step) * step for array in arrays]
    flat = torch.empty(sum(sizes), dtype=getattr(torch, arrays[0].dtype.name))
    memory = flat.numpy()
    pieces, waits, sent, begin = [], [], 0, 0
    for array, size in zip(arrays, sizes, strict=True):
        piece, given = memory[begin : begin + array.size], array.reshape(-1)
        for first in range(0, array.size, _PIECE):
            part = piece[first : first + _PIECE]
            if weight:
                np.multiply(given[first : first + _PIECE], weight, out=part)
            else:
                part.fill(0)
            if begin + first + part.size - sent >= _PIECE:
                waits.append(start_sum(flat[sent : begin + first + part.size]))
                sent = begin + first + part.size
        pieces.append(piece.reshape(array.shape))
        memory[begin + array.size : begin + size] = 0  # is sent, too
        begin += size
    if begin > sent:
        waits.append(start_sum(flat[sent:]))
    return pieces, waits


def _check_dense(gradient, parameter):
    import torch

    if gradient.layout != torch.strided:
        raise UsageError(
            f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient, but no module "
            "such as nn.Embedding(sparse=True) says that it may; use such a module, or dense "
            "gradients"
        )


def layout(gradient) -> int:
    """Return the layout of a gradient on one rank."""
    if gradient is None:
        return NONE
    return SPARSE if gradient.is_sparse else DENSE


def weighted(parameter, weight: float, *, dense: bool):
    """`weight` times a parameter's gradient, in a layout that all ranks agreed on."""
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
