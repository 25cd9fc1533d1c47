"""Checkpoints of a PyTorch training."""

from __future__ import annotations

from bigdl.orca.learn.pytorch.parts import Built
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.training.checkpointing import StateKeeper
from bigdl.training.state import capture_rng, dumps, loads, restore_rng

__all__ = ["TorchKeeper"]


class TorchKeeper(StateKeeper):
    """:class:`~bigdl.training.checkpointing.StateKeeper` for the parts of a PyTorch training.

    Every rank's own are its random numbers.
    """

    _built: Built
    #: of the loop, if steps are recorded
    summary: StepSummary | None = None

    def _initial(self):
        return {"model.pt": dumps(self._built.model.state_dict())}

    def _shared(self):
        files = self._built.files()
        if self.summary is not None:
            files["summary.pt"] = dumps(self.summary.take())
        return files

    def _put_shared(self, files):
        self._built.load(files)
        if self.summary is not None and "summary.pt" in files:
            self.summary.put(loads(files["summary.pt"]))

    def _own(self):
        return capture_rng()

    def _put_own(self, state):
        restore_rng(state)
