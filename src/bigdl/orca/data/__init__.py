"""Distributed data of Orca: XShards, what reads them, and feeds for training."""

from typing import Any

from bigdl.orca.data.xshards import SharedValue, SparkXShards, XShards

__all__ = ["SharedValue", "SparkXShards", "XShards", "read_images", "spark_df_to_ray_dataset"]


def __getattr__(name: str) -> Any:
    if name == "read_images":  # needs numpy, which the others do not
        from bigdl.orca.data.image import read_images

        return read_images
    if name == "spark_df_to_ray_dataset":
        from bigdl.orca.data.ray_exchange import spark_df_to_ray_dataset

        return spark_df_to_ray_dataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
