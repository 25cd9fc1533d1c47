"""Images: read into XShards, and kept as records in Parquet files."""

from bigdl.orca.data.image.parquet_dataset import ParquetDataset, read_parquet, write_parquet
from bigdl.orca.data.image.preprocessing import (
    read_coco,
    read_images,
    read_images_pil,
    read_images_spark,
    read_voc,
)
from bigdl.orca.data.image.tfrecord import read_tfrecord, write_tfrecord

__all__ = [
    "ParquetDataset",
    "read_coco",
    "read_images",
    "read_images_pil",
    "read_images_spark",
    "read_parquet",
    "read_tfrecord",
    "read_voc",
    "write_parquet",
    "write_tfrecord",
]
