"""The driver's loop of a Keras training by the parameter layer: epochs, callbacks, validation."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.learn.layer_fit.loop import LayerLoop, LayerRun
from bigdl.orca.learn.tf2.callbacks import BATCH_HOOKS, WorkerCallbacks
from bigdl.orca.learn.tf2.layer_figures import KerasLayerFigures
from bigdl.orca.learn.tf2.state import dump_weights
from bigdl.training.checkpoint import Snapshot
from bigdl.training.figures import score_of

__all__ = ["KerasLayerLoop", "check_callbacks"]

_FIGURES, _NUMBERS = "figures.json", "callbacks.json"


class KerasLayerLoop(LayerLoop):
    """A fit by the parameter layer; callbacks are called on the driver.

    Parameters
    ----------
    run : LayerRun
    callbacks : sequence of keras.callbacks.Callback
    """

    def __init__(self, run: LayerRun, callbacks: Sequence[Any]):
        super().__init__(run)
        self.model, settings = run.model.model, run.settings
        self._callbacks: WorkerCallbacks | None = None
        self._numbers = b""  # what callbacks had counted
        self.begin(run.start)
        self._callbacks = WorkerCallbacks(
            callbacks,
            self.model,
            0,
            epochs=settings.initial_epoch + self._epochs_of_fit,
            steps=self._epoch_steps,
            verbose=settings.verbose,
        )
        self._has_callbacks = bool(callbacks)

    # -- the fit -------------------------------------------------------------------------------

    def fit(self) -> Snapshot:
        """Train to the end; returns the final state."""
        hooks, optimizer = self._callbacks.list, self.model.optimizer
        self.model.stop_training = False
        hooks.on_train_begin()
        if self.settings.goal.is_begun(self.position):
            self._restore_callbacks()
        if self.position.partial:  # an earlier fit ended inside this epoch
            self._close_epoch(self.position.partial)
        states = self._train()
        if self._has_callbacks or optimizer.use_ema:  # they may change weights at the end
            states = self._pull()
            optimizer.finalize_variable_values(self.model.trainable_weights)
        hooks.on_train_end()
        return self._finish(states)

    def _epoch(self):
        number = self.settings.epoch_number(self.position)
        hooks = self._callbacks.list
        hooks.on_epoch_begin(number)
        self._groups_of_epoch()
        entry = self._entry()
        if self._validate_weights is not None and self.settings.validates_after(number + 1):
            entry["logs"].update(self._validation())
        if self._has_callbacks:
            states, before = self._pull(), self._layer.vector(self._layer_plan)
            hooks.on_epoch_end(number, dict(entry["logs"]))
            if not np.array_equal(before, self._layer.vector(self._layer_plan)):
                self._push([state.residual for state in states])
        else:
            hooks.on_epoch_end(number, dict(entry["logs"]))
        self.stop = bool(self.model.stop_training)
        entry["logs"] = {
            name: value if isinstance(value, list) else float(value)
            for name, value in self._callbacks.noted.items()
            if isinstance(value, numbers.Real | list)
        }
        self._close_epoch(entry)
        self._checkpoint_after_epoch(entry["logs"].get("loss"), score_of(entry["logs"]))

    def _entry(self) -> dict:
        position, figures = self.position, self._figures
        found = figures.entry()
        # a step of the user's own may return figures of its own
        logs = figures.means() or self._layer.figures(figures.added)
        if self._options.stragglers is not None:
            logs |= figures.dropped
        return {
            "epoch": position.epoch + 1,
            "global_step": position.global_step,
            "num_samples": found["num_samples"],
            "steps": position.step,
            "logs": logs,
            "profile": {**found["profile"], "peak_memory_bytes": figures.memory},
        }

    def _validation(self) -> dict[str, float]:
        self._pull()
        self._callbacks.list.on_test_begin()
        found = self._validate_weights(dump_weights(self.model))
        self._callbacks.list.on_test_end(found)
        return {f"val_{name}": value for name, value in found.items()}

    def _push(self, residuals):
        """Give the ranks the weights that a callback has set."""
        self._transport.start(self._layer.states(self._layer_plan, residuals))

    # -- what the groups ask -------------------------------------------------------------------

    @property
    def _epoch_steps(self):
        return self.settings.steps_per_epoch or self._plan.steps

    def _place(self):
        if self.settings.steps_per_epoch:  # an epoch goes on where the last one ended
            return divmod(self.position.global_step, self._plan.steps)
        return super()._place()

    def _pass_step(self):
        self._layer.optimizer.pass_step()

    def _no_figures(self):
        return KerasLayerFigures(self._layer_plan.ranks, sums=self._layer.sums)

    def _open_rows(self):
        super()._open_rows()
        known = self._transport.rows()
        self._layer.build_for(next(each["example"] for each in known if each["example"]))

    def _kept(self):
        found = {_FIGURES: self._figures.dump()} if self.position.step else {}
        if self._callbacks is not None:
            found[_NUMBERS] = self._callbacks.numbers().encode()
        return found

    def _put_kept(self, files):
        self._numbers = files.get(_NUMBERS, b"")
        if self.position.step and not self.position.partial and _FIGURES in files:
            self._figures.put(files[_FIGURES])

    def _restart_from_latest(self, error):
        super()._restart_from_latest(error)
        self.model.stop_training = False
        self._restore_callbacks()

    def _restore_callbacks(self):
        if self._numbers:
            self._callbacks.put_numbers(self._numbers.decode())


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that want to know of single batches.

    Those of Keras that write files after batches only if they are told so are fine.
    """
    import keras

    base = keras.callbacks.Callback
    for callback in callbacks:
        kind = type(callback)
        frequency = getattr(callback, "save_freq", getattr(callback, "update_freq", None))
        if kind.__module__.startswith("keras.") and frequency == "epoch":
            continue
        hooks = [h for h in BATCH_HOOKS if getattr(kind, h) is not getattr(base, h)]
        hooks += [h for h in BATCH_HOOKS if h in vars(callback)]
        if hooks:
            raise UsageError(
                f"{kind.__name__} has {', '.join(hooks)}, but the steps of backend='bigdl' run in "
                "Spark tasks that call no callbacks; use hooks of epochs, or backend='spark'"
            )
