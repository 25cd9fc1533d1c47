"""Arguments that the Estimators of all frameworks take, checked; and keywords of earlier BigDLs."""

from __future__ import annotations

import difflib
import logging
import os
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.orca.learn.layer_fit.loop import LayerOptions

__all__ = [
    "check_layer_options",
    "config_of",
    "location_of",
    "take_old",
    "warn_once",
    "with_weight",
]

logger = logging.getLogger("bigdl.orca")


def check_layer_options(backend: str, given: dict[str, Any]) -> LayerOptions | None:
    """Return the options of ``fit`` for the parameter layer; None for another backend.

    Raises
    ------
    UsageError
        For options that cannot work, and for any with another backend.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if backend == "bigdl":
        from bigdl.orca.learn.layer_fit.loop import layer_options

        return layer_options(given)
    if given:
        raise UsageError(
            f"{', '.join(given)} of fit are for the parameter layer, this Estimator has "
            f"backend={backend!r}; make it with backend='bigdl'"
        )
    return None


def config_of(config: dict | None) -> dict:
    """A copy of the ``config`` that creators get."""
    if config is not None and not isinstance(config, dict):
        raise UsageError(f"config must be a dict, got {type(config).__name__}")
    return dict(config or {})


def location_of(model_dir: str | os.PathLike | None) -> str | None:
    """``model_dir`` as a str."""
    if model_dir is not None and not isinstance(model_dir, str | os.PathLike):
        raise UsageError(f"model_dir should be a path or URL, got {type(model_dir).__name__}")
    return None if model_dir is None else os.fspath(model_dir)


def with_weight(label_cols, weight_col) -> list:
    """The label columns of a feed, with that of the weights behind them."""
    if weight_col is None:
        return label_cols
    if not isinstance(weight_col, str):
        raise UsageError(f"weight_col should be the name of one column, got {weight_col!r}")
    labels = [label_cols] if isinstance(label_cols, str) else list(label_cols or ())
    if not labels:
        raise UsageError("weight_col needs label_cols; pass the names of the target columns")
    if weight_col in labels:
        raise UsageError(f"weight_col {weight_col!r} is one of label_cols; name another column")
    return [*labels, weight_col]


# what has no effect here, and why
_IDLE = {
    "info": "info was for a TrainingOperator; config reaches every creator and callback",
}
_said: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning, the first time in this process."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def take_old(verb: str, given: dict, renamed: dict[str, str] | None = None, known=()) -> dict:
    """What the remaining keywords of a call mean.

    Parameters
    ----------
    verb : str
        For the message.
    given : dict
        The keywords that the signature does not have.
    renamed : dict of str to str
        Old names of arguments.
    known : iterable of str
        Names of the arguments, for advice.

    Returns
    -------
    dict
        Values of the renamed arguments, under their names of today.

    Raises
    ------
    UsageError
        For a keyword of no generation.
    """
    found = {}
    for name, value in given.items():
        if renamed and name in renamed:
            found[renamed[name]] = value
        elif name in _IDLE:
            if value is not None:
                warn_once(f"{verb}({name}=) has no effect: {_IDLE[name]}")
        else:
            close = difflib.get_close_matches(name, [*known, *(renamed or ())], 1)
            advice = f"; did you mean {close[0]}=?" if close else ""
            raise UsageError(f"{verb} has no argument {name!r}{advice or '; leave it out'}")
    return found
