"""Arguments that the Estimators of all frameworks take, checked."""

from __future__ import annotations

import os

from bigdl.common.errors import UsageError

__all__ = ["config_of", "location_of", "with_weight"]


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
