"""Alias of :mod:`bigdl.orca.data.xshards`, for programs of BigDL 2.x."""

from bigdl.orca.data.xshards import SharedValue, SparkXShards, XShards

__all__ = ["SharedValue", "SparkXShards", "XShards"]
