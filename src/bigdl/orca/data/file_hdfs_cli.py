"""Another name of :mod:`bigdl.orca.data.file`, which serves HDFS like any other storage."""

from bigdl.orca.data.file import *  # noqa: F403
from bigdl.orca.data.file import __all__  # noqa: F401
