"""Import path that programs written for BigDL 2.x use."""

from bigdl.orca import SafePickle

__all__ = ["SafePickle"]
