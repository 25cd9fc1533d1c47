"""What a search of a Keras model optimizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError

__all__ = ["Target"]

_MODES = ("last", "max", "min", "auto")
_BEST_HIGH = ("acc", "auc", "precision", "recall", "f1", "r2")
_BEST_LOW = ("loss", "mae", "mse", "error")
_VALIDATION = "val_"


@dataclass(frozen=True)
class Target:
    """A figure of the training's history.

    Attributes
    ----------
    name : str
        Its key.
    direction : {"minimize", "maximize"}
    mode : {"last", "max", "min"}
        Of which epoch it is.
    """

    name: str
    direction: str
    mode: str

    @classmethod
    def of(
        cls,
        name: str | Sequence[str] | None,
        mode: str,
        study: Mapping[str, Any],
        compiled: Mapping[str, Any],
        fit: Mapping[str, Any],
    ) -> Target:
        """Check what a user asks for.

        Parameters
        ----------
        name : str or None
        mode : str
        study : mapping
            Arguments of the study.
        compiled, fit : mapping
            Arguments of ``compile`` and ``fit``.

        Raises
        ------
        UsageError
            If it makes no sense.
        """
        directions = study.get("directions") or []
        if isinstance(name, (list, tuple)):
            if len(name) > 1:
                raise UsageError("multiple objective metric is not supported.")
            name = name[0] if name else None
        if len(directions) > 1:
            raise UsageError("multiple objective metric is not supported.")
        if mode not in _MODES:
            raise UsageError(
                f"target_metric_mode {mode!r} is not recognized; it must be one of "
                f"{', '.join(map(repr, _MODES))}"
            )
        metrics = _names(compiled)
        validated = fit.get("validation_data") is not None or bool(fit.get("validation_split"))
        if name is None:
            name = (_VALIDATION if validated else "") + (metrics[0] if metrics else "loss")
        _check_name(name, metrics, validated)
        direction = _direction(name, study.get("direction") or next(iter(directions), None))
        if mode == "auto":
            mode = "max" if direction == "maximize" else "min"
        return cls(name, direction, mode)

    def of_history(self, history: Mapping[str, Sequence[float]]) -> float:
        """The figure of a training.

        Raises
        ------
        UsageError
            If the history does not have it.
        """
        if self.name not in history:
            raise UsageError(
                f"invalid target metric {self.name!r}: the training reports "
                f"{', '.join(map(repr, history)) or 'nothing'}"
            )
        values = [float(value) for value in history[self.name]]
        return {"last": values[-1], "max": max(values), "min": min(values)}[self.mode]


def _names(compiled: Mapping[str, Any]) -> list[str] | None:
    """Keys of the compiled metrics; None where outputs have metrics of their own."""
    metrics = compiled.get("metrics") or []
    if not isinstance(metrics, (list, tuple)):
        return None if isinstance(metrics, Mapping) else [_name(metrics)]
    if any(isinstance(metric, (list, tuple, Mapping)) for metric in metrics):
        return None
    return [_name(metric) for metric in metrics]


def _name(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    return getattr(metric, "name", None) or getattr(metric, "__name__", type(metric).__name__)


def _check_name(name: str, metrics: list[str] | None, validated: bool) -> None:
    if not isinstance(name, str):
        raise UsageError(f"invalid target metric {name!r}; it must be a name")
    plain = name.removeprefix(_VALIDATION)
    if plain != name and not validated:
        raise UsageError(
            f"invalid target metric {name!r}: there is no validation; give validation_data or "
            "validation_split"
        )
    if plain == "loss" or metrics is None or plain in metrics:
        return
    if not metrics:
        raise UsageError(
            "target metric is should be loss or val_loss if metrics is not provided in compile, "
            f"not {name!r}"
        )
    raise UsageError(
        f"invalid target metric {name!r}: compile has the metrics {', '.join(map(repr, metrics))}"
    )


def _direction(name: str, given: Any) -> str:
    plain = name.removeprefix(_VALIDATION).lower()
    natural = None
    if any(plain == each or plain.startswith((each, f"{each}_")) for each in _BEST_HIGH):
        natural = "maximize"
    elif plain in _BEST_LOW or plain.endswith(("_loss", "_error")):
        natural = "minimize"
    if given is None:
        return natural or "minimize"
    wanted = str(getattr(given, "name", given)).lower()
    if natural is not None and wanted in ("minimize", "maximize") and wanted != natural:
        raise UsageError(
            f"The direction of target metric {name!r} must be {natural!r}, not {given!r}"
        )
    return wanted
