"""Nano for PyTorch: the same model, faster."""

import importlib

_HOMES = {
    "InferenceOptimizer": "bigdl.nano.pytorch.inference.optimizer",
    "Pipeline": "bigdl.nano.pytorch.inference.pipeline",
    "TorchNano": "bigdl.nano.pytorch.torch_nano",
    "Trainer": "bigdl.nano.pytorch.trainer",
    "nano": "bigdl.nano.pytorch.torch_nano",
    "patch_torch": "bigdl.nano.pytorch.patching",
    "unpatch_torch": "bigdl.nano.pytorch.patching",
}

__all__ = [
    "InferenceOptimizer",
    "Pipeline",
    "TorchNano",
    "Trainer",
    "nano",
    "patch_torch",
    "unpatch_torch",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
