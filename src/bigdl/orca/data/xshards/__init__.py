"""XShards: a large collection as shards, each any Python object, transformed by plain functions."""

from bigdl.orca.data.xshards.base import SharedValue, XShards
from bigdl.orca.data.xshards.ray import RayXShards
from bigdl.orca.data.xshards.spark import SparkXShards

__all__ = ["RayXShards", "SharedValue", "SparkXShards", "XShards"]
