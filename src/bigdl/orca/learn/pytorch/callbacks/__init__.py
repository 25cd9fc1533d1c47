"""Callbacks of the PyTorch Estimator."""

from bigdl.orca.learn.pytorch.callbacks.base import (
    Callback,
    MainCallback,
    MaxstepsCallback,
    TqdmCallback,
)
from bigdl.orca.learn.pytorch.callbacks.model_checkpoint import EarlyStopping, ModelCheckpoint
from bigdl.orca.learn.pytorch.callbacks.tensorboard import TensorBoardCallback
from bigdl.orca.learn.pytorch.callbacks.wandb import WandbLoggerCallback

__all__ = [
    "Callback",
    "EarlyStopping",
    "MainCallback",
    "MaxstepsCallback",
    "ModelCheckpoint",
    "TensorBoardCallback",
    "TqdmCallback",
    "WandbLoggerCallback",
]
