"""The import path that programs for BigDL 2.x use."""

from bigdl.orca.data.xshards import SharedValue, SparkXShards, XShards

__all__ = ["SharedValue", "SparkXShards", "XShards"]
