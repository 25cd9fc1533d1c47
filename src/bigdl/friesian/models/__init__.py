"""Models of recommenders for PyTorch, sized from the schema of a table.

Each one takes columns as tensors, in the order of its ``feature_cols``, which is how an Estimator
of Orca feeds them::

    model = DeepFM.from_schema(table.feature_schema(), categories=["user", "item"])
    est = Estimator.from_torch(model=model, optimizer=..., loss=torch.nn.BCELoss())
    est.fit(table.df, feature_cols=model.feature_cols, label_cols=["label"])
"""

import importlib

from bigdl.common.errors import require

_MODULES = {
    "choices": ("DeepFM", "MMoE", "MultiTaskLoss", "NCF", "WideAndDeep"),
    "dien": ("AUGRU", "DIEN", "InterestLoss"),
    "tfrs": ("TFRSModel",),
    "two_tower": ("InBatchSoftmax", "Tower", "TwoTower"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "TFRSModel":
        require("torch", "orca")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
