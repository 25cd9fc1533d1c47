"""Datasets of image and array records in Parquet files, read in shards by training workers.

A dataset is a directory on any storage::

    <path>/_orca_metadata          the schema, in JSON
    <path>/chunk=0/….parquet       the first `block_size` records
    <path>/chunk=1/….parquet       the next ones

It is written block by block, from a generator of any length.  The schema is written last, so an
incomplete dataset is rejected when reading.
"""

from __future__ import annotations

import random
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError, require
from bigdl.orca.data.file import (
    exists,
    is_file,
    listdir,
    makedirs,
    open_file_system,
    read_bytes,
    rmdir,
    write_text,
)
from bigdl.orca.data.image.preprocessing import voc_records
from bigdl.orca.data.image.utils import (
    DType,
    FeatureType,
    SchemaField,
    arrow_schema,
    check_schema,
    chunks,
    decode_record,
    decode_schema,
    encode_record,
    encode_schema,
)
from bigdl.orca.data.xshards import SparkXShards
from bigdl.orca.data.xshards.connect import parallelize

if TYPE_CHECKING:
    import tensorflow as tf
    from torch.utils.data import DataLoader, IterableDataset

_METADATA = "_orca_metadata"
_CHUNK = re.compile(r"chunk=(\d+)")
_MODES = ("overwrite", "append", "ignore", "error", "errorifexists")


class ParquetDataset:
    """Writer and reader of record datasets in Parquet files.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.data.image import ParquetDataset
    >>> from bigdl.orca.data.image.utils import DType, FeatureType, SchemaField
    >>> schema = {
    ...     "id": SchemaField(FeatureType.SCALAR, DType.INT32),
    ...     "pixels": SchemaField(FeatureType.NDARRAY, DType.FLOAT32, (2,)),
    ... }
    >>> records = ({"id": n, "pixels": np.full(2, n, "float32")} for n in range(3))
    >>> ParquetDataset.write("dataset", records, schema)
    >>> dataset = ParquetDataset.read_as_torch("dataset")
    >>> [record["pixels"].tolist() for record in dataset]
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    """

    @staticmethod
    def write(
        path: str,
        generator: Iterable[Mapping[str, Any]],
        schema: Mapping[str, SchemaField],
        block_size: int = 1000,
        write_mode: str = "overwrite",
        **kwargs: object,
    ) -> None:
        """Write a dataset.

        Parameters
        ----------
        path : str
            Directory on any storage.
        generator : iterable of dict
            Records with a value for each column of the schema.
        schema : dict of str to SchemaField
            Types of the columns.
        block_size : int, default 1000
            Records per chunk; one chunk at a time is in memory.
        write_mode : {"overwrite", "append", "ignore", "error", "errorifexists"}
            Treatment of an existing dataset: replace it (the default), append chunks, keep it
            unchanged, or raise an error.
        **kwargs
            Arguments of ``pyarrow.parquet.write_table``, e.g. ``compression``.

        Raises
        ------
        UsageError
            If an argument is invalid, or a record does not match the schema.
        """
        schema = check_schema(schema)
        check_choice("write_mode", write_mode, _MODES)
        check_positive("block_size", block_size)
        root = path.rstrip("/")
        existing = _chunks(root)
        start = 0
        if existing or is_file(f"{root}/{_METADATA}"):
            if write_mode == "ignore":
                return
            if write_mode.startswith("error"):
                raise UsageError(
                    f'A dataset exists at {path!r}; pass write_mode="overwrite"',
                    code="path-exists",
                    path=path,
                )
            if write_mode == "append":
                _check_appended(path, schema)
                start = max(existing, default=-1) + 1
            else:
                _remove(root, existing)
        types = arrow_schema(schema)
        for number, block in enumerate(chunks(generator, block_size), start):
            fs, folder = open_file_system(f"{root}/chunk={number}")
            fs.makedirs(folder, exist_ok=True)
            name = f"{folder}/part-{secrets.token_hex(8)}.parquet"
            table = _table(schema, types, block)
            require("pyarrow.parquet", "orca").write_table(table, name, filesystem=fs, **kwargs)
        makedirs(root)
        write_text(f"{root}/{_METADATA}", encode_schema(schema))

    @staticmethod
    def schema(path: str) -> dict[str, SchemaField]:
        """Return the schema of the dataset at `path`."""
        metadata = f"{path.rstrip('/')}/{_METADATA}"
        if not is_file(metadata):
            raise UsageError(
                f"There is no complete ParquetDataset at {path!r}: no {_METADATA}",
                code="path-missing",
                path=path,
            )
        return decode_schema(read_bytes(metadata))

    @staticmethod
    def files(path: str) -> list[list[str]]:
        """Return the Parquet files of each chunk of the dataset at `path`, in order."""
        folders = [folder for _, folder in sorted(_chunks(path).items())]
        return [[p for p in listdir(folder) if p.endswith(".parquet")] for folder in folders]

    @staticmethod
    def read_as_torch(
        path: str,
        transforms: Callable | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> IterableDataset:
        """Read the records as a ``torch.utils.data.IterableDataset`` of dicts.

        For the parameters see :func:`~bigdl.orca.data.image.parquet_dataset.read_parquet`.
        """
        from bigdl.orca.data.image.torch_records import TorchRecords

        return TorchRecords(RecordReader(path, transforms, config).records)

    @staticmethod
    def read_as_tf(path: str) -> tf.data.Dataset:
        """Read the records as a ``tf.data.Dataset`` of dicts."""
        return tf_dataset(RecordReader(path))

    @staticmethod
    def read_as_xshards(path: str) -> SparkXShards:
        """Read the records as SparkXShards with one shard per chunk, a dict of columns.

        Arrays of a column are stacked if they have equal shapes; other values become an object
        array.
        """
        reader = RecordReader(path)
        rdd = parallelize(reader.chunks, max(len(reader.chunks), 1))
        schema = reader.schema
        return SparkXShards(rdd.map(lambda files: _columns(files, schema)), class_name="dict")


def _chunks(path: str) -> dict[int, str]:
    """Return the folder of each chunk of a dataset, by chunk number."""
    folders = listdir(path) if exists(path) else []
    matches = ((_CHUNK.fullmatch(folder.rpartition("/")[2]), folder) for folder in folders)
    return {int(match[1]): folder for match, folder in matches if match}


def _check_appended(path: str, schema: Mapping[str, SchemaField]) -> None:
    existing = ParquetDataset.schema(path)
    if existing != schema:
        raise UsageError(
            f"Cannot append records with schema {encode_schema(schema)} to the dataset at "
            f"{path!r} with schema {encode_schema(existing)}",
            code="data-schema",
            path=path,
        )


def _remove(root: str, folders: Mapping[int, str]) -> None:
    """Remove a dataset's schema and chunks, but keep other files in the folder."""
    fs, metadata = open_file_system(f"{root}/{_METADATA}")
    if fs.exists(metadata):
        fs.rm(metadata)
    for folder in folders.values():
        rmdir(folder)


def _table(schema, types, block):
    import pyarrow as pa

    rows = [encode_record(schema, record) for record in block]
    try:
        return pa.Table.from_pylist(rows, schema=types)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise UsageError(
            f"A record does not match the schema {types.names}: {error}",
            code="data-schema",
            columns=list(types.names),
        ) from error


_ROWS = 64  # records that are decoded at a time
_AS_FORMAT: Any = object()  # selects the default batch size of a format


def read_parquet(
    format: str,
    path: str,
    transforms: Callable | None = None,
    config: Mapping[str, Any] | None = None,
    batch_size: int | None = _AS_FORMAT,
    *,
    output_types: object = None,
    output_shapes: object = None,
) -> DataLoader | tf.data.Dataset:
    """Read a dataset that ``write_parquet`` or :meth:`ParquetDataset.write` wrote.

    Parameters
    ----------
    format : {"dataloader", "tf_dataset"}
    path : str
    transforms : callable, optional
        Function of one record, a dict by column: arrays are numpy arrays, images the bytes of
        the image file.
    config : dict, optional
        ``num_shards`` and ``rank``: read only every ``num_shards``-th chunk, starting with
        ``rank``.  For a DataLoader also ``num_workers`` and ``collate_fn``.
    batch_size : int or None
        Records per batch; None gives single records. By default 1 for a DataLoader, None for a
        ``tf.data.Dataset``.
    output_types, output_shapes : optional
        Arguments of ``tf.data.Dataset.from_generator`` for ``"tf_dataset"``; required with
        `transforms`, otherwise derived from the schema.

    Returns
    -------
    torch.utils.data.DataLoader or tf.data.Dataset
        Batches or single records.

    Raises
    ------
    UsageError
        If there is no dataset at `path`, or it has fewer chunks than ``num_shards``.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca.data.file import makedirs
    >>> from bigdl.orca.data.image import read_parquet, write_parquet
    >>> for label in ("cat", "dog"):
    ...     makedirs(f"pets/{label}")
    ...     Image.new("RGB", (8, 6)).save(f"pets/{label}/1.jpg")
    >>> write_parquet("image_folder", "dataset", "pets", {"cat": 0, "dog": 1}, shuffle=False)
    >>> loader = read_parquet(
    ...     "dataloader", "dataset", transforms=lambda record: record["label"], batch_size=2
    ... )
    >>> next(iter(loader))
    tensor([0, 1]...)
    """
    check_choice("format", format, ("dataloader", "tf_dataset"))
    if format == "tf_dataset":
        require("tensorflow", "tf")
        reader = RecordReader(path, transforms, config)
        records = tf_dataset(reader, output_types, output_shapes)
        return records if batch_size in (None, _AS_FORMAT) else records.batch(batch_size)
    loader = require("torch.utils.data", "orca").DataLoader
    options = {k: config[k] for k in ("num_workers", "collate_fn") if config and k in config}
    dataset = ParquetDataset.read_as_torch(path, transforms, config)
    return loader(dataset, batch_size=1 if batch_size is _AS_FORMAT else batch_size, **options)


class RecordReader:
    """Reader that returns the records of one shard of a dataset in the order they were written.

    Parameters
    ----------
    path : str
    transforms : callable, optional
        Function of one record.
    config : mapping, optional
        Selection of chunks with ``num_shards`` and ``rank``.
    """

    def __init__(
        self,
        path: str,
        transforms: Callable | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        if transforms is not None and not callable(transforms):
            raise UsageError(
                f"transforms must be a function of a record, got {transforms!r}",
                code="argument-type",
                argument="transforms",
            )
        self.schema = ParquetDataset.schema(path)
        self.transforms = transforms
        self.chunks = _shard(ParquetDataset.files(path), path, config or {})

    def records(self, part: int = 0, parts: int = 1) -> Iterator[Any]:
        """Yield the records of every `parts`-th chunk, starting with chunk number `part`."""
        for files in self.chunks[part::parts]:
            for record in read_chunk(files, self.schema):
                yield record if self.transforms is None else self.transforms(record)


def _shard(chunks: list[list[str]], path: str, config: Mapping[str, Any]) -> list[list[str]]:
    shards, rank = config.get("num_shards"), config.get("rank")
    if shards is None and rank is None:
        return chunks
    if not isinstance(shards, int) or not isinstance(rank, int):
        raise UsageError(
            f"config must have num_shards and rank, both integers, got {shards!r} and {rank!r}",
            code="argument-type",
            argument="config",
        )
    if shards > len(chunks):
        raise UsageError(
            f"num_shards should be not larger than partitions, but num_shards is {shards} and "
            f"{path!r} has {len(chunks)}; write it with a smaller block_size",
            code="argument-value",
            argument="num_shards",
            path=path,
        )
    if not 0 <= rank < shards:
        raise UsageError(
            f"rank must be from 0 to num_shards − 1 = {shards - 1}, got {rank}",
            code="argument-value",
            argument="rank",
        )
    return chunks[rank::shards]


def read_chunk(files: list[str], schema: Mapping[str, SchemaField]) -> Iterator[dict[str, Any]]:
    """Read the records of one chunk."""
    parquet = require("pyarrow.parquet", "orca")
    for name in files:
        fs, inside = open_file_system(name)
        # Arrow's threads may hold a remote Python file open while the process exits
        with parquet.ParquetFile(inside, filesystem=fs, pre_buffer=False) as file:
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


def tf_dataset(
    reader: RecordReader, output_types: object = None, output_shapes: object = None
) -> tf.data.Dataset:
    """Return a ``tf.data.Dataset`` of a reader's records."""
    tf = require("tensorflow", "tf")
    if output_types is not None:
        return tf.data.Dataset.from_generator(
            reader.records, output_types=output_types, output_shapes=output_shapes
        )
    if reader.transforms is not None:
        raise UsageError(
            "output_types is required with transforms; pass the types of its results",
            code="argument-missing",
            argument="output_types",
        )
    signature = {}
    for name, field in reader.schema.items():
        is_text = field.feature_type is FeatureType.IMAGE or field.dtype is DType.BYTES
        is_array = field.feature_type is FeatureType.NDARRAY
        shape = [None if size < 0 else size for size in field.shape] if is_array else []
        dtype = tf.string if is_text else tf.as_dtype(field.dtype.name.lower())
        signature[name] = tf.TensorSpec(shape, dtype)
    return tf.data.Dataset.from_generator(reader.records, output_signature=signature)


def write_parquet(format: str, output_path: str, *args: Any, **kwargs: Any) -> None:
    """Write MNIST, an image folder or PASCAL VOC as a :class:`ParquetDataset`.

    Parameters
    ----------
    format : {"mnist", "image_folder", "voc"}
    output_path : str
    *args, **kwargs
        Arguments of :func:`write_mnist`, :func:`write_from_directory` or :func:`write_voc`.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca.data.file import makedirs
    >>> from bigdl.orca.data.image import ParquetDataset, write_parquet
    >>> makedirs("pets/cat")
    >>> Image.new("RGB", (8, 6)).save("pets/cat/1.jpg")
    >>> write_parquet("image_folder", "dataset", "pets", {"cat": 0})
    >>> [record["label_str"] for record in ParquetDataset.read_as_torch("dataset")]
    ['cat']
    """
    writers: dict[str, Callable[..., None]]
    writers = {"mnist": write_mnist, "image_folder": write_from_directory, "voc": write_voc}
    writers[check_choice("format", format, writers)](*args, output_path=output_path, **kwargs)


def write_mnist(image_file: str, label_file: str, output_path: str, **kwargs: Any) -> None:
    """Write unpacked MNIST idx files as a :class:`ParquetDataset`.

    The columns are ``image``, uint8 of shape (rows, columns, 1), and ``label``, uint8 of shape ().

    Parameters
    ----------
    image_file, label_file : str
    output_path : str
    **kwargs
        Arguments of :meth:`ParquetDataset.write`.

    Examples
    --------
    >>> import struct
    >>> from pathlib import Path
    >>> from bigdl.orca.data.image import ParquetDataset, write_mnist
    >>> head = struct.pack(">4I", 2051, 2, 28, 28)  # two images of 28 x 28 pixels
    >>> _ = Path("images").write_bytes(head + bytes(2 * 28 * 28))
    >>> _ = Path("labels").write_bytes(struct.pack(">2I", 2049, 2) + bytes([7, 3]))
    >>> write_mnist("images", "labels", "mnist")
    >>> [int(record["label"]) for record in ParquetDataset.read_as_torch("mnist")]
    [7, 3]
    """
    images, labels = _idx(image_file, 2051, 3), _idx(label_file, 2049, 1)
    if len(images) != len(labels):
        raise UsageError(
            f"{image_file!r} has {len(images)} images, but {label_file!r} {len(labels)} labels",
            code="data-shape",
            path=label_file,
        )
    images = images[..., np.newaxis]
    schema = {
        "image": SchemaField(FeatureType.NDARRAY, DType.UINT8, images.shape[1:]),
        "label": SchemaField(FeatureType.NDARRAY, DType.UINT8),
    }
    records = ({"image": i, "label": n} for i, n in zip(images, labels, strict=True))
    ParquetDataset.write(output_path, records, schema, **kwargs)


def _idx(path: str, magic: int, ndim: int) -> np.ndarray:
    data = read_bytes(path)
    head = 4 + 4 * ndim
    number, *shape = struct.unpack(f">{1 + ndim}I", data[:head].ljust(head, b"\0"))
    if number != magic:
        advice = "; unpack it first" if data[:2] == b"\x1f\x8b" else ""
        raise UsageError(
            f"{path!r} has the magic number {number}, not {magic} of MNIST{advice}",
            code="file-format",
            path=path,
        )
    values = np.frombuffer(data, np.uint8, offset=head)
    if values.size != np.prod(shape):
        raise UsageError(
            f"The header of {path!r} declares shape {shape}, but the file has {values.size} values",
            code="file-damaged",
            path=path,
        )
    return values.reshape(shape)


def write_from_directory(
    directory: str,
    label_map: Mapping[str, int],
    output_path: str,
    shuffle: bool = True,
    seed: int | None = None,
    **kwargs: Any,
) -> None:
    """Write images from one directory per label as a :class:`ParquetDataset`.

    The columns are ``image`` (the bytes of the file), ``label`` (int), ``image_id`` (its path)
    and ``label_str``.

    Parameters
    ----------
    directory : str
        Parent directory of the label directories.
    label_map : dict of str to int
        Number of each label; other directories are ignored.
    output_path : str
        Directory of the dataset.
    shuffle : bool, default True
        Shuffle the images; otherwise sort them by path.
    seed : int, optional
        Random seed of the shuffle.
    **kwargs
        Arguments of :meth:`ParquetDataset.write`.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca.data.file import makedirs
    >>> from bigdl.orca.data.image import ParquetDataset, write_from_directory
    >>> for label in ("cat", "dog"):
    ...     makedirs(f"pets/{label}")
    ...     Image.new("RGB", (8, 6)).save(f"pets/{label}/1.jpg")
    >>> write_from_directory("pets", {"cat": 0, "dog": 1}, "dataset", shuffle=False)
    >>> dataset = ParquetDataset.read_as_torch("dataset")
    >>> [(record["label_str"], record["label"]) for record in dataset]
    [('cat', 0), ('dog', 1)]
    """
    if not isinstance(label_map, Mapping) or not label_map:
        raise UsageError(
            f"label_map must be a dict of label to number, got {label_map!r}",
            code="argument-type",
            argument="label_map",
        )
    folders = {path.rpartition("/")[2]: path for path in listdir(directory)}
    missing = [label for label in label_map if label not in folders]
    if missing:
        raise UsageError(
            f"{directory!r} has no directory {missing[0]!r} of label_map",
            code="path-missing",
            path=directory,
        )
    labelled = [
        (path, label) for label in label_map for path in listdir(folders[label]) if is_file(path)
    ]
    labelled.sort()
    if shuffle:
        random.Random(seed).shuffle(labelled)
    schema = {
        "image": SchemaField(FeatureType.IMAGE, DType.BYTES),
        "label": SchemaField(FeatureType.SCALAR, DType.INT32),
        "image_id": SchemaField(FeatureType.SCALAR, DType.STRING),
        "label_str": SchemaField(FeatureType.SCALAR, DType.STRING),
    }
    records = (
        {"image": path, "label": label_map[label], "image_id": path, "label_str": label}
        for path, label in labelled
    )
    ParquetDataset.write(output_path, records, schema, **kwargs)


def write_voc(
    voc_root_path: str,
    splits_names: list[tuple[int, str]],
    output_path: str,
    classes: list[str] | Mapping[str, int] | None = None,
    **kwargs: Any,
) -> None:
    r"""Write the images and bounding boxes of PASCAL VOC as a :class:`ParquetDataset`.

    The columns are ``image`` (the bytes of the file), ``label`` (float32, a row ``xmin, ymin,
    xmax, ymax, class, difficult`` per object, with the box relative to the image size) and
    ``image_id`` (its path).

    Parameters
    ----------
    voc_root_path : str
        The directory ``VOCdevkit``.
    splits_names : list of (int, str)
        Years and splits, e.g. ``[(2007, "trainval")]``.
    output_path : str
    classes : list of str or dict of str to int, optional
        Class names, or a dict of their numbers; by default the 20 VOC classes.
    **kwargs
        Arguments of :meth:`ParquetDataset.write`.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca.data.file import makedirs, write_text
    >>> from bigdl.orca.data.image import ParquetDataset, write_voc
    >>> for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
    ...     makedirs(f"VOCdevkit/VOC2007/{folder}")
    >>> Image.new("RGB", (100, 50)).save("VOCdevkit/VOC2007/JPEGImages/1.jpg")
    >>> _ = write_text("VOCdevkit/VOC2007/ImageSets/Main/train.txt", "1\n")
    >>> _ = write_text("VOCdevkit/VOC2007/Annotations/1.xml", '''<annotation>
    ...   <size><width>100</width><height>50</height></size>
    ...   <object><name>dog</name><difficult>0</difficult><bndbox>
    ...     <xmin>10</xmin><ymin>10</ymin><xmax>60</xmax><ymax>40</ymax>
    ...   </bndbox></object>
    ... </annotation>''')
    >>> write_voc("VOCdevkit", [(2007, "train")], "dataset", classes=["cat", "dog"])
    >>> [record["label"].shape for record in ParquetDataset.read_as_torch("dataset")]
    [(1, 6)]
    """
    schema = {
        "image": SchemaField(FeatureType.IMAGE, DType.BYTES),
        "label": SchemaField(FeatureType.NDARRAY, DType.FLOAT32, (-1, 6)),
        "image_id": SchemaField(FeatureType.SCALAR, DType.STRING),
    }
    records = (
        {"image": path, "label": boxes, "image_id": path}
        for path, boxes in voc_records(voc_root_path, splits_names, classes)
    )
    ParquetDataset.write(output_path, records, schema, **kwargs)
