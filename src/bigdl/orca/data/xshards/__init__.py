"""XShards: distributed collections of Python objects, transformed by ordinary functions."""

from bigdl.orca.data.xshards.ray import RayXShards
from bigdl.orca.data.xshards.spark import SharedValue, SparkXShards, XShards

__all__ = ["RayXShards", "SharedValue", "SparkXShards", "XShards"]
