"""Import path of :mod:`bigdl.nano.pytorch.vision.models` in BigDL 2.x."""

from bigdl.nano.pytorch.vision.models import *  # noqa: F403
from bigdl.nano.pytorch.vision.models import __all__ as __all__
