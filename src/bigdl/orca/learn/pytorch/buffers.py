"""BatchNorm statistics and other buffers, which every worker makes from its own rows."""

from __future__ import annotations

from bigdl.training.running import RunningState

__all__ = ["Buffers"]


class Buffers(RunningState):
    """The buffers of a module."""

    def own(self) -> list:
        """A copy of this worker's buffers."""
        return [buffer.clone() for buffer in self._model.buffers()]

    def put(self, values: list) -> None:
        """Set this worker's buffers, e.g. to what :meth:`own` gave."""
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            buffer.copy_(value)
