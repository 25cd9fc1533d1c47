"""Old import path of :mod:`bigdl.nano.pytorch.vision.transforms`."""

from bigdl.nano.pytorch.vision.transforms import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms import __all__, __getattr__  # noqa: F401
