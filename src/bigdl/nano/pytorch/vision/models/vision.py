"""Old import path of :mod:`bigdl.nano.pytorch.vision.models`."""

from bigdl.nano.pytorch.vision.models import *  # noqa: F403
from bigdl.nano.pytorch.vision.models import __all__ as __all__
