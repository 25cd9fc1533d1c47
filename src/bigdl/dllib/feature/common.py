"""Old import path of :mod:`bigdl.orca.learn.nnframes.preprocessing`."""

from bigdl.orca.learn.nnframes.preprocessing import *  # noqa: F403
from bigdl.orca.learn.nnframes.preprocessing import __all__ as __all__
