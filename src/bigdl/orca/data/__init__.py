"""Distributed data of Orca: XShards, what reads them, and feeds for training."""

from bigdl.orca.data.xshards import SharedValue, SparkXShards, XShards

__all__ = ["SharedValue", "SparkXShards", "XShards"]
