"""What an Estimator can be told between its calls: gradient clipping and summaries."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from pathlib import Path

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.gradients import Clipping
from bigdl.orca.learn.pytorch.group_phases import PHASE_TAGS, draw_phases, phase_summary
from bigdl.orca.learn.pytorch.model_files import ModelFiles
from bigdl.orca.learn.pytorch.summaries import (
    TRAIN_TAGS,
    EventFiles,
    train_summary,
    validation_summary,
)
from bigdl.training.state import loads

__all__ = ["EstimatorOptions"]

logger = logging.getLogger("bigdl.orca")


class EstimatorOptions(ModelFiles):
    """The verbs of an Estimator that change or look at its fits."""

    def __init__(self, parts, training):
        super().__init__(parts, training)
        self._clipping = Clipping()
        self._events: EventFiles | None = None

    # -- gradients -----------------------------------------------------------------------------

    def set_constant_gradient_clipping(self, min: float, max: float) -> None:
        """Bring every element of the batch's gradient into a range, from the next fit on."""
        low, high = _number("min", min), _number("max", max)
        if low > high:
            raise UsageError(f"min should be at most max, got min={min!r} and max={max!r}")
        self._clipping = replace(self._clipping, minimum=low, maximum=high)

    def set_l2_norm_gradient_clipping(self, clip_norm: float) -> None:
        """Scale the batch's gradient down to an L2 norm, over all weights, from the next fit on."""
        norm = _number("clip_norm", clip_norm)
        if norm <= 0:
            raise UsageError(f"clip_norm should be positive, got {clip_norm!r}")
        self._clipping = replace(self._clipping, norm=norm)

    def clear_gradient_clipping(self) -> None:
        """Leave gradients as they are."""
        self._clipping = Clipping()

    # -- summaries -----------------------------------------------------------------------------

    def set_tensorboard(self, log_dir: str, app_name: str) -> None:
        """Record every step of the following fits.

        Event files for TensorBoard are written after each fit to ``<log_dir>/<app_name>/train`` and
        ``.../validation`` if the package tensorboard is installed; the summaries need no package.

        Parameters
        ----------
        log_dir : str
            A local path of the driver or any fsspec URL.
        app_name : str
        """
        for name, value in (("log_dir", log_dir), ("app_name", app_name)):
            if not isinstance(value, str) or not value:
                raise UsageError(f"{name} should be a text, got {value!r}")
        self._events = EventFiles(f"{log_dir.rstrip('/')}/{app_name}")

    def get_train_summary(self, tag: str | None = None):
        """What was recorded of the steps, after :meth:`set_tensorboard`.

        Parameters
        ----------
        tag : str, optional
            ``"Loss"``, ``"LearningRate"`` or ``"Throughput"`` (samples per second). With
            ``backend="bigdl"`` also ``"Phases/compute_s"`` and other phases of the parameter layer:
            mean seconds per step, for each group of steps. None gives all of them in a dict.

        Returns
        -------
        list of [int, float, float]
            Step, value and time (seconds since 1970).
        """
        if self._events is None:
            raise UsageError("Steps are not recorded; call set_tensorboard before fit")
        groups = self._recorded("phases.pt")
        if tag in PHASE_TAGS and groups:
            return phase_summary(groups, tag)
        rows = self._recorded("summary.pt")
        if tag is None:
            found = {tag: train_summary(rows, tag) for tag in TRAIN_TAGS}
            return found | {tag: phase_summary(groups, tag) for tag in PHASE_TAGS if groups}
        return train_summary(rows, tag)

    def get_validation_summary(self, tag: str | None = None):
        """The figures of the validations of all fits.

        Parameters
        ----------
        tag : str, optional
            Name of a metric, or ``"Loss"``. None gives all of them in a dict.

        Returns
        -------
        list of [int, float, float]
            Step, value and time (seconds since 1970).
        """
        return validation_summary(self._training.position.history, tag)

    def plot_phases(self, path: str | os.PathLike) -> None:
        """Draw what the groups of the parameter layer spent their time on.

        Parameters
        ----------
        path : str or path
            ``.html`` or ``.svg``, or what matplotlib writes, e.g. ``.png``, if it is installed.

        Raises
        ------
        UsageError
            Without a fit of ``backend="bigdl"`` after :meth:`set_tensorboard`, or if the file
            cannot be written.
        """
        groups = self._recorded("phases.pt")
        if not groups:
            raise UsageError(
                "There are no phases to draw; call set_tensorboard, then fit with backend='bigdl'"
            )
        draw_phases(groups, Path(path))

    def _recorded(self, name: str) -> list[list[float]]:
        snapshot = self._training.snapshot
        data = None if snapshot is None else snapshot.files.get(name)
        return [] if data is None else loads(data).tolist()

    def _write_events(self) -> None:
        """Write what the last fit has added."""
        if self._events is not None:
            self._events.write(self.get_train_summary(), self.get_validation_summary())


def _number(name, value) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise UsageError(f"{name} should be a number, got {value!r}")
    return float(value)
