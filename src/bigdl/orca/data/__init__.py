"""Distributed data in Orca: XShards, functions that read XShards, and feeds for training."""

from bigdl.orca.data import elastic_search
from bigdl.orca.data.image import read_images
from bigdl.orca.data.xshards import SharedValue, SparkXShards, XShards
from bigdl.orca.data.xshards.ray_exchange import spark_df_to_ray_dataset

__all__ = [
    "SharedValue",
    "SparkXShards",
    "XShards",
    "elastic_search",
    "read_images",
    "spark_df_to_ray_dataset",
]
