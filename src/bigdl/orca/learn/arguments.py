"""Arguments that the Estimators of all frameworks take, checked; and keywords of earlier BigDLs."""

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
    """Refuse counts that are too small; None is no count."""
    for name, value in counts.items():
        if value is not None:
            check_integer(name, value, least)


def check_loss_weight(value: Any, arguments: str, rows: str) -> None:
    """Refuse a ``loss_weight`` that is no function of these arguments, and no name of a divisor."""
    if not (value in (None, "rows", "sum") or callable(value)):
        raise UsageError(
            f"loss_weight must be a function {arguments} that returns what the loss of {rows} is "
            f'divided by, "rows" or "sum", got {value!r}',
            code="argument-value",
            argument="loss_weight",
        )


def config_of(config: dict | None, name: str = "config") -> dict:
    """A copy of the ``config`` that creators get."""
    if config is not None and not isinstance(config, dict):
        raise UsageError(
            f"{name} must be a dict, got {type(config).__name__}",
            code="argument-type",
            argument=name,
        )
    return dict(config or {})


def check_creator(
    name: str, creator: Any, parameters: tuple[str, ...], *, is_creator: bool = True
) -> None:
    """Refuse a function that cannot be called as creators are, before a worker calls it.

    Parameters
    ----------
    name : str
        Argument that it was given for.
    creator : callable
    parameters : tuple of str
        What it is called with.
    is_creator : bool, default True
        False leaves it alone.
    """
    if not is_creator or not isinstance(creator, types.FunctionType | type):
        return
    try:
        signature = inspect.signature(creator)
    except ValueError:  # of a class that does not tell it
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
            f"{name} is called as {called}, but {shown} takes {signature}; give it the "
            f"parameter{'s' if len(parameters) > 1 else ''} {', '.join(parameters)}",
            code="argument-value",
            argument=name,
        ) from None


def with_weight(label_cols, weight_col) -> list:
    """The label columns of a feed, with that of the weights behind them."""
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


# what has no effect here, and why
_IDLE = {"info": "info was for a TrainingOperator; config reaches every creator and callback"}
said_once: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning, the first time in this process."""
    if text not in said_once:
        said_once.add(text)
        logger.warning("%s", text)


_OTHER_NAMES = {
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
    verb: Callable, keywords: Mapping[str, Any], renamed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the values of old keywords of a call, under the names of today.

    Parameters
    ----------
    verb : callable
        It has been called.
    keywords : dict
        What its signature does not have.
    renamed : dict of str to str
        Old names of arguments.

    Raises
    ------
    UsageError
        For a keyword of no generation.
    """
    values, renamed = {}, renamed or {}
    for name, value in keywords.items():
        if name in renamed:
            values[renamed[name]] = value
        elif name in _IDLE:
            if value is not None:
                warn_once(f"{verb.__name__}({name}=) has no effect: {_IDLE[name]}")
        else:
            known = [*inspect.signature(verb).parameters, *renamed]
            # of another generation or framework, whose names are no misspelling
            other = [_OTHER_NAMES[name]] if _OTHER_NAMES.get(name) in known else []
            close = other or difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {close[0]}=?" if close else "leave it out"
            raise UsageError(
                f"{verb.__name__} has no argument {name!r}; {advice}",
                code="argument-unknown",
                argument=name,
                method=verb.__name__,
            )
    return values


def path_of(verb: str, path: Any) -> str:
    """Return the path that a verb was given, as a str."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(
            f"{verb} needs the path of a file, got {path!r}", code="argument-type", method=verb
        )
    return os.fspath(path)


def path_under(verb: Callable, old: Mapping[str, Any], old_name: str, path: Any) -> str:
    """Return the path that a call names by today's name or by that of BigDL 2.0."""
    return path_of(
        verb.__name__, resolve_legacy_kwargs(verb, old, {old_name: "path"}).get("path", path)
    )
