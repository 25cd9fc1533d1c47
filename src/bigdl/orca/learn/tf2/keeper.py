"""Checkpoints of a Keras training."""

from __future__ import annotations

from typing import Any

from bigdl.orca.learn.tf2.callbacks import WorkerCallbacks
from bigdl.orca.learn.tf2.state import (
    dump_optimizers,
    dump_weights,
    put_optimizers,
    put_weights,
    seed_states,
    tensor_of,
    to_variable,
)
from bigdl.training.checkpoint import CheckpointManager
from bigdl.training.state import capture_rng, restore_rng

__all__ = ["KerasKeeper"]


class KerasKeeper(CheckpointManager):
    """:class:`~bigdl.training.checkpoint.CheckpointManager` for a model of Keras.

    In the place of `built` it is given the model.  Every rank's own are its random numbers (also
    those of its layers) and the metrics of the epoch that is not finished; of callbacks, what
    rank 0 counts is kept.
    """

    _built: Any
    #: of the loop, once they are there
    callbacks: WorkerCallbacks | None = None
    #: the form of a row of the model's inputs, for who must tell a model its shapes later
    example: Any = None
    #: what those of the interrupted run had counted
    callback_numbers: str = ""

    def expect_changes(self) -> None:
        """What was written last may differ from the state at the end."""
        self._saved = None

    def _take(self, position, sums):
        snapshot = super()._take(position, sums)
        if snapshot is not None:
            snapshot.manifest["example"] = self.example
        return snapshot

    def _initial(self):
        # an instance may come with an optimizer that has made steps already
        return self._shared()

    def _shared(self):
        model = self._built
        files = {"model.pt": dump_weights(model), "optimizer.pt": dump_optimizers(model)}
        if self.callbacks is not None:
            files["callbacks.json"] = self.callbacks.numbers().encode()
        return files

    def _put_shared(self, files):
        put_weights(self._built, files["model.pt"])
        if "optimizer.pt" in files:
            put_optimizers(self._built, files["optimizer.pt"])
        self.callback_numbers = files.get("callbacks.json", b"").decode()

    def _own(self):
        model = self._built
        return {
            "rng": capture_rng(),
            "seeds": [tensor_of(v) for v in seed_states(model)],
            "metrics": [tensor_of(v) for v in model.metrics_variables],
        }

    def _put_own(self, state):
        restore_rng(state["rng"])
        for variables, key in (
            (seed_states(self._built), "seeds"),
            (self._built.metrics_variables, "metrics"),
        ):
            for variable, value in zip(variables, state[key], strict=True):
                to_variable(variable, value)
