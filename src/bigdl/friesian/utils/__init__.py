"""Import path for programs that were written for BigDL 2.x."""

from bigdl.orca import SafePickle

__all__ = ["SafePickle"]
