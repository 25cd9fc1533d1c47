"""The import path that programs for BigDL 2.x use."""

from bigdl.orca import SafePickle

__all__ = ["SafePickle"]
