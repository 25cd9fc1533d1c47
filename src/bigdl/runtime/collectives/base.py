"""How the workers' gradients meet.

A **GradientSync** belongs to one program in one worker.  The Loop calls :meth:`~GradientSync.start`
once, :meth:`~GradientSync.broadcast` for the initial state, :meth:`~GradientSync.reduce` in every
step between ``backward`` and the optimizer's step, and the other collectives at the ends of
epochs; :meth:`~GradientSync.stop` also runs when the program fails, before the failure is reported.
All ranks call the same methods in the same order.
Every collective raises :class:`~bigdl.runtime.engine.PeerLost` when another worker went away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

__all__ = ["GradientSync"]


class GradientSync(ABC):
    """Collectives among the workers of a job; see the module for who calls what."""

    rank: int
    world_size: int

    @abstractmethod
    def start(self) -> None:
        """Join the other workers; returns when all are there."""

    @abstractmethod
    def stop(self) -> None:
        """Leave, at once and without waiting for anybody; safe to call twice."""

    def use_device(self, device, *, is_alone: bool) -> None:  # noqa: B027 - few have to do it
        """Expect tensors of a GPU from now on; a collective, right after :meth:`start`.

        Parameters
        ----------
        device : torch.device
        is_alone : bool
            Whether no other worker uses the GPU of any worker.
        """

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes | None:
        """Bytes of rank 0 on every rank."""

    @abstractmethod
    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """A few numbers of every rank, in rank order (float64); as many on every rank."""

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes] | None:
        """Bytes of every rank on rank 0, None elsewhere."""

    @abstractmethod
    def all_reduce(self, tensor, operation: Literal["sum", "max"] = "sum"):
        """Combine a tensor of one shape and dtype over the ranks, in place; returns it."""

    @abstractmethod
    def reduce(self, parameters: Sequence, weight: float, may_be_sparse: Sequence = ()) -> None:
        """Replace every gradient by the sum over ranks of ``weight * gradient``.

        Parameters
        ----------
        parameters : sequence of torch.nn.Parameter
            The same ones in the same order on every rank.
        weight : float
            A rank without rows passes 0 and takes part with zeros, whatever its gradients are.
        may_be_sparse : sequence of torch.nn.Parameter
            Those of `parameters` whose gradient can be a sparse tensor on some rank.

        Notes
        -----
        A parameter that has a gradient on no rank of weight above 0 keeps None, as in a single
        process, so an optimizer leaves it alone.
        """

    @abstractmethod
    def sum_arrays(self, arrays: Sequence, weight: float) -> list:
        """The sums over the ranks of ``weight * array``, as arrays in memory of their own.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray
            Of float32 or float64; of the same shapes and types on every rank. They are only read.
        weight : float
            0 for a rank that takes part with zeros, whatever its arrays are.
        """
