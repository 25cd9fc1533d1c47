"""Transport: carries the bytes of one training from rank to rank.

A **Transport** carries the bytes of one training from rank to rank.  It is opened on the driver
with the rows, is given the state of every rank by :meth:`Transport.start`, and then runs groups of
steps.  Between two groups the state stays on the executors or moves along, as the transport
likes; :meth:`Transport.states` brings it to the driver, e.g. for a checkpoint.

A group that fails has changed nothing.  After :class:`~bigdl.common.errors.WorkerLost` the driver
starts again from the newest state that it has and runs the same steps, which gives the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from bigdl.orca.parameter_layer.plan import Step
from bigdl.orca.parameter_layer.rank import RankState

__all__ = ["Transport"]


class Transport(ABC):
    """Runs groups of steps on N ranks; see the module for who calls what."""

    #: whether what failed can be asked for again without :meth:`start`
    keeps_state: bool = False

    @abstractmethod
    def rows(self) -> list[dict]:
        """Return what the replica of every rank says of its rows."""

    @abstractmethod
    def start(self, states: Sequence[RankState]) -> None:
        """Go on from these states, one for each slice; what the transport had may be lost."""

    def recut(self, states: Sequence[RankState]) -> None:
        """Go on from these states, one for each slice, with the rows where they are."""
        self.start(states)

    @abstractmethod
    def run(self, steps: Sequence[Step]) -> list[list[dict]]:
        """One group of steps.

        Returns
        -------
        list of list of dict
            For every owner of a slice and every step its times; those of rank 0 hold ``sources``,
            what every rank had to say of its rows, and ``is_void``: whether the step was discarded,
            or one before it.

        Raises
        ------
        UsageError, WorkerError
            For what user code raised.
        WorkerLost
            When the group could not be ended.
        """

    @abstractmethod
    def states(self) -> list[RankState]:
        """The state of every owner after the last group.

        Raises
        ------
        WorkerLost
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
