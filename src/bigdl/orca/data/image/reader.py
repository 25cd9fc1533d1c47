"""Reading a :class:`~bigdl.orca.data.image.dataset.ParquetDataset`, a shard in each worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.orca.data.file import open_file_system
from bigdl.orca.data.image.dataset import ParquetDataset
from bigdl.orca.data.image.utils import DType, FeatureType, SchemaField, decode_record

__all__ = ["RecordReader", "read_parquet", "tf_dataset"]

_ROWS = 64  # records that are decoded together


def read_parquet(
    format: str,
    path: str,
    transforms: Callable | None = None,
    config: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    *,
    output_types: Any = None,
    output_shapes: Any = None,
) -> Any:
    """Read a dataset that ``write_parquet`` or :meth:`ParquetDataset.write` wrote.

    Parameters
    ----------
    format : {"dataloader", "tf_dataset"}
    path : str
    transforms : callable, optional
        Function of one record, a dict by column: arrays are numpy arrays, images the bytes of
        their file.
    config : dict, optional
        ``num_shards`` and ``rank``: read only the chunks whose number leaves the remainder
        ``rank``.  For a DataLoader also ``num_workers`` and ``collate_fn``.
    batch_size : int, default 1
    output_types, output_shapes : optional
        For ``"tf_dataset"``, those of ``tf.data.Dataset.from_generator``; needed with
        `transforms`, since without they follow from the schema.

    Returns
    -------
    torch.utils.data.DataLoader or tf.data.Dataset
        Batches of records.

    Raises
    ------
    UsageError
        If there is no such dataset, or it has fewer chunks than shards are asked for.
    """
    formats = ("dataloader", "tf_dataset")
    if format not in formats:
        raise UsageError(f"format must be one of {', '.join(formats)}, got {format!r}")
    if format == "tf_dataset":
        require("tensorflow", "tf")
        reader = RecordReader(path, transforms, config)
        return tf_dataset(reader, output_types, output_shapes).batch(batch_size)
    loader = require("torch.utils.data", "orca").DataLoader
    options = {k: config[k] for k in ("num_workers", "collate_fn") if config and k in config}
    records = ParquetDataset.read_as_torch(path, transforms, config)
    return loader(records, batch_size=batch_size, **options)


class RecordReader:
    """The records of one shard of a dataset; the order is that in which they were written.

    Parameters
    ----------
    path : str
    transforms : callable, optional
        Function of one record.
    config : mapping, optional
        With ``num_shards`` and ``rank``.
    """

    def __init__(
        self,
        path: str,
        transforms: Callable | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        if transforms is not None and not callable(transforms):
            raise UsageError(f"transforms must be a function of a record, got {transforms!r}")
        self.schema = ParquetDataset.schema(path)
        self.transforms = transforms
        self.chunks = _shard(ParquetDataset.files(path), path, config or {})

    def records(self, part: int = 0, parts: int = 1) -> Iterator[Any]:
        """The records of every `parts`-th chunk, from the one with the number `part` on."""
        for files in self.chunks[part::parts]:
            for record in read_chunk(files, self.schema):
                yield record if self.transforms is None else self.transforms(record)

    def xshards(self) -> Any:
        """SparkXShards with one shard per chunk."""
        from bigdl.orca.data.shard import SparkXShards
        from bigdl.orca.settings import OrcaContext

        sc, schema = OrcaContext.get_spark_context(), self.schema
        rdd = sc.parallelize(self.chunks, max(len(self.chunks), 1))
        return SparkXShards(rdd.map(lambda files: _columns(files, schema)), class_name="dict")


def _shard(chunks: list[list[str]], path: str, config: Mapping[str, Any]) -> list[list[str]]:
    shards, rank = config.get("num_shards"), config.get("rank")
    if shards is None and rank is None:
        return chunks
    if not isinstance(shards, int) or not isinstance(rank, int):
        raise UsageError(
            f"config must have num_shards and rank, both whole numbers, got {shards!r} and {rank!r}"
        )
    if shards > len(chunks):
        raise UsageError(
            f"num_shards should be not larger than partitions, but num_shards is {shards} and "
            f"{path!r} has {len(chunks)}; write it with a smaller block_size"
        )
    if not 0 <= rank < shards:
        raise UsageError(f"rank must be from 0 to num_shards − 1 = {shards - 1}, got {rank}")
    return chunks[rank::shards]


def read_chunk(files: list[str], schema: Mapping[str, SchemaField]) -> Iterator[dict[str, Any]]:
    """The records of one chunk."""
    parquet = require("pyarrow.parquet", "orca")
    for name in files:
        fs, inside = open_file_system(name)
        # threads of Arrow may hold a Python file for a moment too long for a process that ends
        with (
            fs.open(inside, "rb") as source,
            parquet.ParquetFile(source, pre_buffer=False) as file,
        ):
            batches = file.iter_batches(_ROWS, columns=list(schema), use_threads=False)
            for batch in batches:
                for record in batch.to_pylist():
                    yield decode_record(schema, record)


def _columns(files: list[str], schema: Mapping[str, SchemaField]) -> dict[str, np.ndarray]:
    records = list(read_chunk(files, schema))
    return {name: _stack([record[name] for record in records]) for name in schema}


def _stack(values: list) -> np.ndarray:
    numbers = all(isinstance(value, int | float | np.ndarray) for value in values)
    if numbers and len({np.shape(value) for value in values}) == 1:
        return np.stack(values)
    objects = np.empty(len(values), dtype=object)
    objects[:] = values
    return objects


def tf_dataset(reader: RecordReader, output_types: Any = None, output_shapes: Any = None) -> Any:
    """The records of a reader as a ``tf.data.Dataset``."""
    tf = require("tensorflow", "tf")
    if output_types is not None:
        return tf.data.Dataset.from_generator(
            reader.records, output_types=output_types, output_shapes=output_shapes
        )
    if reader.transforms is not None:
        raise UsageError("output_types must say what transforms returns; pass it")
    types = {
        DType.STRING: tf.string,
        DType.BYTES: tf.string,
        DType.INT32: tf.int32,
        DType.FLOAT32: tf.float32,
        DType.UINT8: tf.uint8,
    }
    signature = {}
    for name, field in reader.schema.items():
        dtype = tf.string if field.feature_type is FeatureType.IMAGE else types[field.dtype]
        array = field.feature_type is FeatureType.NDARRAY
        shape = [None if size < 0 else size for size in field.shape] if array else []
        signature[name] = tf.TensorSpec(shape, dtype)
    return tf.data.Dataset.from_generator(reader.records, output_signature=signature)
