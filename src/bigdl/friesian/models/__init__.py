"""Recommender models for PyTorch, sized from the schema of a table.

Models take columns as tensors, in the order of ``feature_cols``. An Orca Estimator passes them in
this order::

    model = DeepFM.from_schema(table.feature_schema(), categories=["user", "item"])
    est = Estimator.from_torch(model=model, optimizer=..., loss=torch.nn.BCELoss())
    est.fit(table.df, feature_cols=model.feature_cols, label_cols=["label"])
"""

import importlib

from bigdl.common.errors import require

__all__ = [
    "AUGRU",
    "DIEN",
    "DLRM",
    "NCF",
    "DeepFM",
    "DotInteraction",
    "InBatchSoftmax",
    "InterestLoss",
    "MMoE",
    "MultiTaskLoss",
    "TFRSModel",
    "Tower",
    "TwoTower",
    "WideAndDeep",
]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "TFRSModel":
        require("torch", "orca")
    home = "tfrs" if name == "TFRSModel" else "torch"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
