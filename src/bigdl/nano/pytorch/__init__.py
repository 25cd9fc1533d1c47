"""BigDL Nano for PyTorch: faster training and inference on one machine."""

from typing import TYPE_CHECKING

from bigdl.nano.lazy_names import lazy_names

if TYPE_CHECKING:
    from bigdl.nano.pytorch.inference.optimizer import InferenceOptimizer as InferenceOptimizer
    from bigdl.nano.pytorch.inference.pipeline import Pipeline as Pipeline
    from bigdl.nano.pytorch.patching import patch_torch as patch_torch
    from bigdl.nano.pytorch.patching import unpatch_torch as unpatch_torch
    from bigdl.nano.pytorch.torch_nano import TorchNano as TorchNano
    from bigdl.nano.pytorch.torch_nano import nano as nano
    from bigdl.nano.pytorch.trainer import Trainer as Trainer

_HOMES = {
    "InferenceOptimizer": "bigdl.nano.pytorch.inference.optimizer",
    "Pipeline": "bigdl.nano.pytorch.inference.pipeline",
    "TorchNano": "bigdl.nano.pytorch.torch_nano",
    "Trainer": "bigdl.nano.pytorch.trainer",
    "nano": "bigdl.nano.pytorch.torch_nano",
    "patch_torch": "bigdl.nano.pytorch.patching",
    "unpatch_torch": "bigdl.nano.pytorch.patching",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
