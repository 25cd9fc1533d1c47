"""Old import path of :class:`bigdl.orca.learn.pytorch.callbacks.MaxstepsCallback`."""

from bigdl.orca.learn.pytorch.callbacks.base import MaxstepsCallback as MaxstepsCallback
