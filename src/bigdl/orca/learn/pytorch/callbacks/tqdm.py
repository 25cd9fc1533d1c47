"""Old import path of :class:`bigdl.orca.learn.pytorch.callbacks.TqdmCallback`."""

from bigdl.orca.learn.pytorch.callbacks.base import TqdmCallback as TqdmCallback
