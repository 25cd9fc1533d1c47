"""Triggers of a fit: when to write a checkpoint, and when to stop."""

from bigdl.training.position import *  # noqa: F403
from bigdl.training.position import __all__ as __all__
