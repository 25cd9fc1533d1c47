"""Alias of :mod:`bigdl.orca.data.xshards`, for programs of BigDL 2.x."""

from bigdl.orca.data.xshards import RayXShards

__all__ = ["RayXShards"]
