"""Inference of PyTorch models: accelerated models, and the optimizer that makes them."""

import importlib

_HOMES = {
    "InferenceOptimizer": "bigdl.nano.pytorch.inference.optimizer",
    "Pipeline": "bigdl.nano.pytorch.inference.pipeline",
}

__all__ = ["InferenceOptimizer", "Pipeline"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
