"""What ``fit`` was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bigdl.orca.learn.pytorch.gradients import Clipping
from bigdl.training.run_settings import RunSettings

__all__ = ["FitSettings"]


@dataclass
class FitSettings(RunSettings):
    """The arguments of ``fit`` as the workers get them.

    Attributes
    ----------
    label_cols : sequence of str
        With `weight_col` its column is the last one.
    per_worker : bool
        Whether the validation figures of each worker are wanted too.
    accumulate : int
        Batches of one update.
    precision : str
        ``"fp32"`` or ``"bf16"``.
    weighted : bool
        Whether the last label column holds the weights of the rows.
    summary : bool
        Whether loss, learning rate and throughput of every step are recorded.
    """

    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    metrics: Sequence[Any] = ()
    callbacks: Sequence[Any] = ()
    per_worker: bool = False
    clipping: Clipping = field(default_factory=Clipping)
    accumulate: int = 1
    precision: str = "fp32"
    weighted: bool = False
    summary: bool = False
