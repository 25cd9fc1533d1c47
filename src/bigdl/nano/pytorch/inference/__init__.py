"""Inference of PyTorch models: accelerated models and InferenceOptimizer."""

from bigdl.nano.lazy_names import lazy_names

_HOMES = {
    "InferenceOptimizer": "bigdl.nano.pytorch.inference.optimizer",
    "Pipeline": "bigdl.nano.pytorch.inference.pipeline",
}

__all__ = ["InferenceOptimizer", "Pipeline"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
