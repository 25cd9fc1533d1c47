"""What ``fit`` of ``backend="bigdl"`` is told about the parameter layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.estimator import check_positive
from bigdl.orca.learn.pytorch.callbacks import Callback, MainCallback
from bigdl.orca.sync.parameter_layer.codec import codec_for

__all__ = ["LayerOptions", "check_callbacks", "layer_options"]

_GROUPS = {"shuffle": 10, "barrier": 100}
_SAMPLINGS = ("exact", "window")
_OF_STEPS = ("before_train_iter", "after_train_iter", "before_iter", "after_iter")


@dataclass(frozen=True)
class LayerOptions:
    """How a training goes through the parameter layer.

    Attributes
    ----------
    transport : str
        ``"shuffle"`` or ``"barrier"``.
    group_size : int
        Steps of one Spark job, at most.
    compression : str
        Name of a codec.
    sampling : str
        ``"exact"``: every row once per epoch. ``"window"``: a batch is a run of consecutive rows
        of the epoch's order from a random place on, as in BigDL 2.x.
    """

    transport: str = "shuffle"
    group_size: int = 10
    compression: str = "fp32"
    sampling: str = "exact"


def layer_options(backend: str, given: dict[str, Any]) -> LayerOptions | None:
    """The options that were given to ``fit``, checked; None for another backend."""
    given = {name: value for name, value in given.items() if value is not None}
    if backend != "bigdl":
        if given:
            raise UsageError(
                f"{', '.join(given)} of fit are for the parameter layer, this Estimator has "
                f"backend={backend!r}; make it with backend='bigdl'"
            )
        return None
    transport = given.get("transport", "shuffle")
    if transport not in _GROUPS:
        raise UsageError(f"transport should be one of {tuple(_GROUPS)}, got {transport!r}")
    sampling = given.get("sampling", "exact")
    if sampling not in _SAMPLINGS:
        raise UsageError(f"sampling should be one of {_SAMPLINGS}, got {sampling!r}")
    compression = given.get("compression", "fp32")
    codec_for(compression)
    size = check_positive("group_size", given.get("group_size", _GROUPS[transport]))
    return LayerOptions(transport, size, compression, sampling)


def check_callbacks(callbacks: Sequence[Any], accumulate: int) -> None:
    """Refuse what the steps of the parameter layer do not do."""
    for callback in callbacks:
        kind = type(callback)
        hooks = [h for h in _OF_STEPS if getattr(kind, h, None) is not getattr(Callback, h)]
        if isinstance(callback, MainCallback) or hooks:
            what = "is a MainCallback" if not hooks else f"has {', '.join(hooks)}"
            raise UsageError(
                f"{kind.__name__} {what}, but the steps of backend='bigdl' run in Spark tasks that "
                "call no callbacks; use hooks of epochs, or backend='spark'"
            )
    if accumulate > 1:
        raise UsageError(
            "accumulate_grad_batches does not go with backend='bigdl'; pass a batch_size that is "
            f"{accumulate} times as large, which is the same update"
        )
