"""Alias of :mod:`bigdl.orca.data.file`, for programs of BigDL 2.x."""

from bigdl.orca.data.file import *  # noqa: F403
from bigdl.orca.data.file import __all__  # noqa: F401
