"""Callbacks of the PyTorch Estimator."""

from bigdl.orca.learn.pytorch.callbacks.base import Callback
from bigdl.orca.learn.pytorch.callbacks.early_stopping import EarlyStopping
from bigdl.orca.learn.pytorch.callbacks.maincallback import MainCallback
from bigdl.orca.learn.pytorch.callbacks.maxsteps import MaxstepsCallback
from bigdl.orca.learn.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from bigdl.orca.learn.pytorch.callbacks.tensorboard import TensorBoardCallback
from bigdl.orca.learn.pytorch.callbacks.tqdm import TqdmCallback
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
