"""Checks of arguments that all Estimators share, and legacy keywords of BigDL 2.x."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import names_of

logger = logging.getLogger("bigdl.orca")


def check_counts(least: int = 1, **counts: int | None) -> None:
    """Raise an error if a count is below `least`; skip counts that are None."""
    for name, value in counts.items():
        if value is not None:
            check_integer(name, value, least)


def check_loss_weight(value: object, arguments: str, rows: str) -> None:
    """Raise an error if a ``loss_weight`` is not a function, ``"rows"`` or ``"sum"``."""
    if not (value in (None, "rows", "sum") or callable(value)):
        raise UsageError(
            f"loss_weight must be a function {arguments} that returns the divisor of the loss of "
            f'{rows}, or "rows" or "sum", got {value!r}',
            code="argument-value",
            argument="loss_weight",
        )


def check_config(config: dict | None, name: str = "config") -> dict:
    """Raise an error if ``config`` is not a dict; return a copy, or an empty dict for None."""
    if config is not None and not isinstance(config, dict):
        raise UsageError(
            f"{name} must be a dict, got {type(config).__name__}",
            code="argument-type",
            argument=name,
        )
    return dict(config or {})


def check_creator(
    name: str, creator: object, parameters: tuple[str, ...], *, is_creator: bool = True
) -> None:
    """Raise an error if a creator function does not accept the arguments that it is called with.

    Parameters
    ----------
    name : str
        Name of the argument.
    creator : callable
    parameters : tuple of str
        Names of the arguments that the creator is called with.
    is_creator : bool, default True
        If False, check nothing.
    """
    if not is_creator or not isinstance(creator, types.FunctionType | type):
        return
    try:
        signature = inspect.signature(creator)
    except ValueError:  # the class does not expose its signature
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        if isinstance(creator, type):
            raise UsageError(
                f"{name} must be an object or a function {name}({', '.join(parameters)}) that "
                f"returns one, got the class {creator.__name__}, which takes {signature}; write "
                f"{name}={creator.__name__}(...) or {name}=lambda {', '.join(parameters)}: "
                f"{creator.__name__}(...)",
                code="argument-type",
                argument=name,
            ) from None
        called = f"{name}({', '.join(parameters)})"
        shown = "a lambda" if creator.__name__ == "<lambda>" else f"the function {creator.__name__}"
        raise UsageError(
            f"{name} is called as {called}, but {shown} takes {signature}; declare the "
            f"parameter{'s' if len(parameters) > 1 else ''} {', '.join(parameters)}",
            code="argument-value",
            argument=name,
        ) from None


def append_weight_col(label_cols, weight_col) -> list:
    """Return the label columns with the weight column appended."""
    if weight_col is None:
        return label_cols
    if not isinstance(weight_col, str):
        raise UsageError(
            f"weight_col should be the name of one column, got {weight_col!r}",
            code="argument-type",
            argument="weight_col",
        )
    labels = names_of(label_cols)
    if not labels:
        raise UsageError(
            "weight_col needs label_cols; pass the names of the target columns",
            code="argument-missing",
            argument="label_cols",
        )
    if weight_col in labels:
        raise UsageError(
            f"weight_col {weight_col!r} is one of label_cols; name another column",
            code="argument-conflict",
            argument="weight_col",
        )
    return [*labels, weight_col]


# legacy keywords without effect, and the reason
_IGNORED = {"info": "info was for a TrainingOperator; config reaches every creator and callback"}
warned_texts: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning once per process."""
    if text not in warned_texts:
        warned_texts.add(text)
        logger.warning("%s", text)


_FOREIGN_NAMES = {
    "model_creator": "model",
    "net": "model",
    "module": "model",
    "optimizer_creator": "optimizer",
    "loss_creator": "loss",
    "criterion": "loss",
    "loss_fn": "loss",
    "lr_scheduler": "scheduler_creator",
    "scheduler": "scheduler_creator",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "n_epochs": "epochs",
    "num_workers": "workers_per_node",
    "features": "feature_cols",
    "labels": "label_cols",
    "target_cols": "label_cols",
    "val_data": "validation_data",
    "train_data": "data",
}


def resolve_legacy_kwargs(
    method: Callable, keywords: Mapping[str, Any], renamed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the values of legacy keyword arguments under the current argument names.

    Parameters
    ----------
    method : callable
        The called method.
    keywords : dict
        Keywords that are not in its signature.
    renamed : dict of str to str
        Current argument names by legacy name.

    Raises
    ------
    UsageError
        If a keyword is neither a current nor a legacy name.
    """
    values, renamed = {}, renamed or {}
    for name, value in keywords.items():
        if name in renamed:
            values[renamed[name]] = value
        elif name in _IGNORED:
            if value is not None:
                warn_once(f"{method.__name__}({name}=) has no effect: {_IGNORED[name]}")
        else:
            known = [*inspect.signature(method).parameters, *renamed]
            # a name that other frameworks or versions use is not a misspelling
            other = [_FOREIGN_NAMES[name]] if _FOREIGN_NAMES.get(name) in known else []
            close = other or difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {close[0]}=?" if close else "leave it out"
            raise UsageError(
                f"{method.__name__} has no argument {name!r}; {advice}",
                code="argument-unknown",
                argument=name,
                method=method.__name__,
            )
    return values


def check_path(method: str, path: object) -> str:
    """Raise an error if `path` is not a path; return it as a str."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(
            f"{method} needs a file path, got {path!r}", code="argument-type", method=method
        )
    return os.fspath(path)


def resolve_path(method: Callable, old: Mapping[str, Any], old_name: str, path: object) -> str:
    """Return the path that a call passed under its current or its BigDL 2.0 argument name."""
    return check_path(
        method.__name__, resolve_legacy_kwargs(method, old, {old_name: "path"}).get("path", path)
    )
