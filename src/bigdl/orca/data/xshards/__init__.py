"""XShards: a large collection as shards, each any Python object, transformed by plain functions."""

from bigdl.orca.data.xshards.base import XShards
from bigdl.orca.data.xshards.shared_value import SharedValue
from bigdl.orca.data.xshards.spark import SparkXShards

__all__ = ["SharedValue", "SparkXShards", "XShards"]
