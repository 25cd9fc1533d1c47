"""Old import path of :mod:`bigdl.orca.data.xshards`."""

from bigdl.orca.data.xshards import RayXShards

__all__ = ["RayXShards"]
