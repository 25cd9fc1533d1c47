"""XShards: a large collection as shards, each any Python object, transformed by plain functions."""

from bigdl.orca.data.xshards.ray import RayXShards
from bigdl.orca.data.xshards.spark import SharedValue, SparkXShards, XShards

__all__ = ["RayXShards", "SharedValue", "SparkXShards", "XShards"]
