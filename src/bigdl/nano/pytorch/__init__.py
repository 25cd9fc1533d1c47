"""Nano for PyTorch: the same model, faster."""

from bigdl.nano.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
