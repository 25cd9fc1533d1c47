"""Old import path of :mod:`bigdl.training.trigger`."""

from bigdl.training.trigger import *  # noqa: F403
from bigdl.training.trigger import __all__ as __all__
