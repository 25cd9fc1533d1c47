"""How the workers' gradients meet.

A **GradientSync** belongs to one program in one worker.  The Loop calls :meth:`~GradientSync.start`
once, :meth:`~GradientSync.broadcast` for the initial state, :meth:`~GradientSync.reduce` in every
step between ``backward`` and the optimizer's step, and the other collectives at the ends of
epochs; :meth:`~GradientSync.stop` also runs when the program fails, before the failure is reported.
Every collective raises :class:`~bigdl.orca.engine.base.PeerLost` when another worker went away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

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

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes | None:
        """Bytes of rank 0 on every rank."""

    @abstractmethod
    def all_gather(self, values: list[float]) -> list[list[float]]:
        """A few numbers of every rank, in rank order (float64)."""

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes] | None:
        """Bytes of every rank on rank 0, None elsewhere."""

    @abstractmethod
    def all_reduce(self, tensor):
        """Sum a tensor over the ranks, in place."""

    @abstractmethod
    def reduce(self, parameters, weight: float) -> None:
        """Replace every gradient by the sum over ranks of ``weight * gradient``.

        A rank without rows passes weight 0 and takes part with zeros. A parameter that has a
        gradient on no rank keeps None, as in a single process.
        """
