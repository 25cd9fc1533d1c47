"""Programs of Horovod on Ray, under the name of BigDL 2.x."""

from bigdl.orca.learn.horovod.runner import HorovodRayRunner

__all__ = ["HorovodRayRunner"]
