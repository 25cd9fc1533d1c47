"""Old import path of :class:`bigdl.orca.learn.pytorch.callbacks.MainCallback`."""

from bigdl.orca.learn.pytorch.callbacks.base import MainCallback as MainCallback
