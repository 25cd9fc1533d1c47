"""Arguments that the Estimators of all frameworks take."""

from __future__ import annotations

from bigdl.common.errors import UsageError

__all__ = ["with_weight"]


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
