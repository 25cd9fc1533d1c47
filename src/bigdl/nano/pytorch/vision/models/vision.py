"""The old home of the names of :mod:`bigdl.nano.pytorch.vision.models`."""

from bigdl.nano.pytorch.vision import models
from bigdl.nano.pytorch.vision.models import *  # noqa: F403

__all__ = models.__all__
