"""Test images in XShards, and records of images in Parquet files."""

import io
import json
import struct
import sys

import numpy as np
import pytest
from refusals import refused

from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.orca.data import image as names
from bigdl.orca.data.image.parquet_dataset import (
    ParquetDataset,
    read_parquet,
    write_from_directory,
    write_mnist,
    write_parquet,
    write_voc,
)
from bigdl.orca.data.image.preprocessing import pairs_of_images, read_coco, read_images, read_voc
from bigdl.orca.data.image.utils import (
    DType,
    FeatureType,
    SchemaField,
    chunks,
    decode_schema,
    encode_schema,
)

pil = pytest.importorskip("PIL.Image")


def picture(number, mode="RGB", size=(6, 4)):
    """Return an image whose pixels encode its number."""
    return pil.new(mode, size, number if mode == "L" else (number, number, number))


def png(number, **kwargs):
    data = io.BytesIO()
    picture(number, **kwargs).save(data, "PNG")
    return data.getvalue()


# Records in Parquet files ------------------------------------------------------------------------

SCHEMA = {
    "array": SchemaField(FeatureType.NDARRAY, DType.FLOAT32, (2, 3)),
    "image": SchemaField(FeatureType.IMAGE, DType.BYTES, ()),
    "name": SchemaField(FeatureType.SCALAR, DType.STRING, ()),
    "number": SchemaField(FeatureType.SCALAR, DType.INT32, ()),
    "part": SchemaField(FeatureType.SCALAR, DType.FLOAT32, ()),
}


def records(count, start=0):
    for i in range(start, start + count):
        yield {
            "array": np.full((2, 3), i, np.float32),
            "image": png(i),
            "name": f"row {i}",
            "number": np.int64(i),
            "part": i / 2,
        }


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """Return an absent path on local or remote storage."""
    if request.param == "local":
        yield str(tmp_path / "dataset")
        return
    import fsspec

    url = f"memory://{tmp_path.name}/dataset"
    yield url
    fs = fsspec.filesystem("memory")
    if fs.exists(f"/{tmp_path.name}"):
        fs.rm(f"/{tmp_path.name}", recursive=True)


def read(path, batch_size=None, **kwargs):
    """Read all records with a DataLoader."""
    return list(read_parquet("dataloader", path, batch_size=batch_size, **kwargs))


def same(actual, expected):
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(value))


@pytest.mark.parametrize("count", [0, 1, 9, 10, 25])
def test_records_come_back_in_order(root, count):
    ParquetDataset.write(root, records(count), SCHEMA, block_size=10)
    same(read(root), records(count))
    assert len(ParquetDataset.files(root)) == -(-count // 10)
    assert ParquetDataset.schema(root) == SCHEMA


def test_writing_holds_one_block_at_a_time(tmp_path):
    asked = []

    def endless():
        for number, record in enumerate(records(7)):
            asked.append((number, len(list(tmp_path.glob("chunk=*/*.parquet")))))
            yield record

    ParquetDataset.write(str(tmp_path), endless(), SCHEMA, block_size=3)
    assert asked == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)]


def test_a_dataset_that_was_not_finished_is_none(root):
    def failing():
        yield from records(25)
        raise KeyError("the source failed")

    ParquetDataset.write(root, records(3), SCHEMA)
    with pytest.raises(KeyError, match="the source failed"):
        ParquetDataset.write(root, failing(), SCHEMA, block_size=10)
    with refused("path-missing", "ParquetDataset"):
        read(root)
    ParquetDataset.write(root, records(2), SCHEMA)
    same(read(root), records(2))


def test_modes_of_writing(root):
    ParquetDataset.write(root, records(25), SCHEMA, block_size=10)
    ParquetDataset.write(root, records(1), SCHEMA, write_mode="ignore")
    with refused("path-exists"):
        ParquetDataset.write(root, records(1), SCHEMA, write_mode="error")
    same(read(root), records(25))
    ParquetDataset.write(root, records(12, 25), SCHEMA, block_size=10, write_mode="append")
    same(read(root), records(37))
    with refused("data-schema"):
        ParquetDataset.write(root, [], {"x": SCHEMA["name"]}, write_mode="append")
    with refused("argument-value", "write_mode"):
        ParquetDataset.write(root, records(1), SCHEMA, write_mode="replace")
    ParquetDataset.write(root, records(4), SCHEMA)  # leaves no part of the longer one
    same(read(root), records(4))


def test_replacing_a_dataset_keeps_other_files(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for count in (3, 2):
        ParquetDataset.write(str(tmp_path), records(count), SCHEMA, block_size=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "_orca_metadata",
        "chunk=0",
        "chunk=1",
        "mine.txt",
    ]


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_shards_are_disjoint_and_complete(root, shards):
    ParquetDataset.write(root, records(38), SCHEMA, block_size=10)
    parts = [read(root, config={"num_shards": shards, "rank": rank}) for rank in range(shards)]
    numbers = sorted(record["number"] for part in parts for record in part)
    assert numbers == list(range(38))
    assert [record["number"] // 10 % shards for record in parts[-1]] == [shards - 1] * len(
        parts[-1]
    )


def test_batches_and_transforms(root):
    ParquetDataset.write(root, records(7), SCHEMA, block_size=3)

    def of(record):
        return {"x": record["array"] * 2, "y": record["number"]}

    batches = list(read_parquet("dataloader", root, transforms=of, batch_size=4))
    assert [tuple(batch["x"].shape) for batch in batches] == [(4, 2, 3), (3, 2, 3)]
    assert [n for batch in batches for n in batch["y"].tolist()] == list(range(7))
    assert [float(n) for batch in batches for n in batch["x"][:, 0, 0]] == list(range(0, 14, 2))


def test_workers_of_a_loader_share_the_chunks(tmp_path):
    from torch.utils.data import get_worker_info

    ParquetDataset.write(str(tmp_path), records(7), SCHEMA, block_size=2)
    loader = read_parquet("dataloader", str(tmp_path), config={"num_workers": 2, "lr": 0.1})
    assert loader.num_workers == 2
    assert get_worker_info() is None
    records_of = loader.dataset.records
    numbers = [[r["number"] for r in records_of(part, 3)] for part in range(3)]
    assert numbers == [[0, 1, 6], [2, 3], [4, 5]]


def test_records_as_a_dataset_of_tensorflow(tmp_path):
    tf = pytest.importorskip("tensorflow")
    path = str(tmp_path)
    ParquetDataset.write(path, records(7), SCHEMA, block_size=3)
    batches = list(read_parquet("tf_dataset", path, batch_size=4).as_numpy_iterator())
    assert [batch["array"].shape for batch in batches] == [(4, 2, 3), (3, 2, 3)]
    assert [n for batch in batches for n in batch["number"].tolist()] == list(range(7))
    assert batches[0]["image"][1] == png(1)
    singles = list(read_parquet("tf_dataset", path).as_numpy_iterator())
    assert [record["array"].shape for record in singles] == [(2, 3)] * 7

    def of(record):
        return record["array"], record["number"]

    types, config = (tf.float32, tf.int32), {"num_shards": 2, "rank": 1}
    pairs = read_parquet("tf_dataset", path, of, config, 2, output_types=types)
    assert [n for _, ns in pairs.as_numpy_iterator() for n in ns.tolist()] == [3, 4, 5]
    with refused("argument-missing", "output_types"):
        read_parquet("tf_dataset", path, of)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_shards": 4, "rank": 0}, "num_shards should be not larger than partitions"),
        ({"num_shards": 2, "rank": 2}, "rank must be from 0 to"),
        ({"num_shards": 2, "rank": -1}, "rank must be from 0 to"),
        ({"num_shards": 2}, "num_shards and rank"),
    ],
)
def test_shards_that_cannot_be_are_refused(tmp_path, config, message):
    ParquetDataset.write(str(tmp_path), records(3), SCHEMA, block_size=1)
    with pytest.raises(UsageError, match=message):
        read_parquet("dataloader", str(tmp_path), config=config)


def test_wrong_use_is_one_sentence(tmp_path, monkeypatch):
    path = str(tmp_path / "x")
    with refused("path-missing", "ParquetDataset"):
        read_parquet("dataloader", path)
    with refused("argument-value", "'dataloader'", "'tf_dataset'"):
        read_parquet("numpy", path)
    with refused("argument-value", "'mnist'", "'image_folder'", "'voc'"):
        write_parquet("cifar", path)
    with refused("argument-value", "block_size"):
        ParquetDataset.write(path, [], SCHEMA, block_size=0)
    with refused("argument-type", "SchemaField"):
        ParquetDataset.write(path, [], {"x": int})
    with refused("data-schema"):
        ParquetDataset.write(path, [{"name": "x"}], SCHEMA)
    with refused("data-schema"):
        ParquetDataset.write(path, [{"name": 3}], {"name": SCHEMA["name"]})
    with pytest.raises(UsageError, match="Python objects"):
        ParquetDataset.write(path, [{"array": [{}]}], {"array": SCHEMA["array"]})
    ParquetDataset.write(path, records(1), SCHEMA)
    with refused("argument-type"):
        read_parquet("dataloader", path, transforms=3)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises((MissingExtraError, ImportError), match="tensorflow"):
        read_parquet("tf_dataset", path)
    for call in (names.write_tfrecord, names.read_tfrecord):
        with refused("name-dropped"):
            call("imagenet", path)


def test_the_schema_is_json_and_that_of_older_files_is_read():
    assert decode_schema(encode_schema(SCHEMA)) == SCHEMA
    old = {
        "image": {
            "feature_type": {"__enum__": "FeatureType.IMAGE"},
            "dtype": {"__enum__": "DType.FLOAT32"},
            "shape": [],
        }
    }
    field = SchemaField(FeatureType.IMAGE, DType.FLOAT32, ())
    assert decode_schema(json.dumps(old)) == {"image": field}
    with refused("file-damaged"):
        decode_schema("[]")


def test_chunks_read_nothing_ahead():
    numbers = iter(range(7))
    first = next(chunks(numbers, 3))
    assert (first, next(numbers)) == ([0, 1, 2], 3)
    assert list(chunks(numbers, 2)) == [[4, 5], [6]]
    assert list(chunks([], 2)) == []


def test_a_dataset_as_xshards(orca_spark, tmp_path):
    ParquetDataset.write(str(tmp_path), records(5), SCHEMA, block_size=2)
    shards = ParquetDataset.read_as_xshards(str(tmp_path)).collect()
    assert [shard["array"].shape for shard in shards] == [(2, 2, 3), (2, 2, 3), (1, 2, 3)]
    assert [n for shard in shards for n in shard["number"].tolist()] == list(range(5))
    assert [n for shard in shards for n in shard["name"].tolist()] == [f"row {i}" for i in range(5)]


def test_the_names_that_programs_import():
    actual = {}
    exec("from bigdl.orca.data import *\nfrom bigdl.orca.data import read_images", actual)
    assert actual["read_images"] is read_images is names.read_images
    assert actual["SparkXShards"]
    exec("from bigdl.orca.data.image import *", actual)
    assert {"write_mnist", "write_voc", "write_from_directory"} <= set(actual)


# Known data sets -----------------------------------------------------------------------------


def idx(array, magic):
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def test_mnist(tmp_path):
    images = np.arange(5 * 28 * 28).astype(np.uint8).reshape(5, 28, 28)
    labels = np.arange(5, dtype=np.uint8)
    image_file, label_file = tmp_path / "images", tmp_path / "labels"
    image_file.write_bytes(idx(images, 2051))
    label_file.write_bytes(idx(labels, 2049))
    files, out = [str(image_file), str(label_file)], str(tmp_path / "out")
    write_parquet("mnist", out, *files, block_size=2)
    assert len(ParquetDataset.files(out)) == 3
    actual = read(out)
    np.testing.assert_array_equal([r["image"] for r in actual], images[..., np.newaxis])
    np.testing.assert_array_equal([r["label"] for r in actual], labels)
    with refused("file-format", "2049"):
        write_mnist(files[1], files[1], out)
    image_file.write_bytes(idx(images, 2051)[:-1])
    with refused("file-damaged"):
        write_mnist(*files, out)
    image_file.write_bytes(idx(images[1:], 2051))
    with refused("data-shape", "4"):
        write_mnist(*files, out)


@pytest.fixture
def folders(tmp_path):
    for label, numbers in {"cat": [1, 2, 3], "dog": [11, 12], "cow": [21]}.items():
        (tmp_path / "in" / label).mkdir(parents=True)
        for number in numbers:
            (tmp_path / "in" / label / f"{number}.png").write_bytes(png(number))
    return tmp_path / "in"


def test_directories_of_images(folders, tmp_path):
    out, label_map = str(tmp_path / "out"), {"cat": 0, "dog": 1}
    write_from_directory(str(folders), label_map, out, shuffle=False, block_size=2)
    actual = read(out)
    assert [r["label_str"] for r in actual] == ["cat"] * 3 + ["dog"] * 2
    for record in actual:
        with open(record["image_id"], "rb") as source:
            assert record["image"] == source.read()
        assert label_map[record["label_str"]] == record["label"]
    ids = [record["image_id"] for record in actual]
    orders = []
    for seed in (1, 1, 2, 3):
        write_parquet("image_folder", out, str(folders), label_map, seed=seed)
        orders.append([record["image_id"] for record in read(out)])
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == sorted(ids) for order in orders)
    with refused("path-missing"):
        write_from_directory(str(folders), {"horse": 1}, out)


@pytest.fixture
def voc(tmp_path):
    """Create a VOCdevkit with two images of 8 × 4 pixels."""
    top = tmp_path / "VOCdevkit" / "VOC2007"
    for name in ("ImageSets/Main", "Annotations", "JPEGImages"):
        (top / name).mkdir(parents=True)
    (top / "ImageSets" / "Main" / "trainval.txt").write_text("000001\n000002\n")
    item = (
        "<object><name>{}</name><difficult>{}</difficult><bndbox><xmin>{}</xmin><ymin>{}</ymin>"
        "<xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
    )
    objects = {
        "000001": [("cat", 0, 2, 1, 4, 3), ("unicorn", 0, 1, 1, 2, 2), ("dog", 1, 0, 0, 8, 4)],
        "000002": [],
    }
    for number, boxes in objects.items():
        picture(int(number), size=(8, 4)).save(top / "JPEGImages" / f"{number}.jpg")
        inside = "".join(item.format(*each) for each in boxes)
        size = "<size><width>8</width><height>4</height><depth>3</depth></size>"
        (top / "Annotations" / f"{number}.xml").write_text(
            f"<annotation>{size}{inside}</annotation>"
        )
    return str(tmp_path / "VOCdevkit")


BOXES = [[0.25, 0.25, 0.5, 0.75, 7, 0], [0, 0, 1, 1, 11, 1]]


def test_voc_records(voc, tmp_path):
    out = str(tmp_path / "out")
    write_parquet("voc", out, voc, [(2007, "trainval")])
    first, second = read(out)
    assert first["label"].tolist() == BOXES
    assert second["label"].shape == (0, 6)
    assert first["image_id"].endswith("000001.jpg")
    assert pil.open(io.BytesIO(first["image"])).size == (8, 4)
    write_voc(voc, [(2007, "trainval")], out, classes=["unicorn"])
    assert read(out)[0]["label"][:, 4].tolist() == [0]
    write_voc(voc, [(2007, "trainval")], out, classes={"dog": 5})
    assert read(out)[0]["label"][:, 4].tolist() == [5]
    with refused("path-missing", "'test'"):
        write_voc(voc, [(2007, "test")], out)


def test_voc_in_xshards(orca_spark, voc):
    (image, boxes), (_, none) = read_voc(voc, [(2007, "trainval")], diff=True).collect()
    assert image.size == (8, 4)
    assert boxes.tolist() == BOXES
    assert none.shape == (0, 6)
    ((_, boxes),) = read_voc(voc, [(2007, "trainval")], classes=["dog"], max_samples=1).collect()
    assert boxes.tolist() == [[0, 0, 1, 1, 0]]


def test_coco_in_xshards(orca_spark, tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "train2017").mkdir()
    for number in (1, 2):
        picture(number, size=(8, 4)).save(tmp_path / "train2017" / f"{number}.jpg")
    content = {
        "images": [{"id": n, "file_name": f"{n}.jpg", "width": 8, "height": 4} for n in (1, 2)],
        "categories": [{"id": 90, "name": "b"}, {"id": 3, "name": "a"}],
        "annotations": [{"image_id": 2, "category_id": 90, "bbox": [2, 1, 4, 2]}],
    }
    listed = tmp_path / "annotations" / "instances_train2017.json"
    listed.write_text(json.dumps(content))
    (image, none), (_, boxes) = read_coco(str(tmp_path)).collect()
    assert image.size == (8, 4)
    assert none.shape == (0, 5)
    assert boxes.tolist() == [[0.25, 0.25, 0.75, 0.75, 1]]
    with refused("path-missing", "instances_val"):
        read_coco(str(tmp_path), "val")
    listed.write_text("{}")
    with refused("file-format"):
        read_coco(str(tmp_path))


# Images in XShards -------------------------------------------------------------------------------


def pixels(shards):
    return [np.asarray(image).flat[0] for image in shards]


def digits(path):
    return int(path.rpartition("/")[2].partition(".")[0])


@pytest.mark.slow_cases("spark")
@pytest.mark.parametrize("backend", ["spark", "pillow"])
def test_images_come_in_the_order_of_their_paths(orca_spark, tmp_path, backend):
    top = tmp_path / "with space"
    (top / "deeper").mkdir(parents=True)
    for number in range(12):
        (top / f"{number:02}.{'PNG' if number % 2 else 'png'}").write_bytes(png(number))
    (top / "deeper" / "99.png").write_bytes(png(99))
    (top / "_98.png").write_bytes(png(98))
    (top / "97.txt").write_text("text")
    shards = read_images(str(top), image_type=".png", backend=backend)
    images = shards.collect()
    assert pixels(images) == list(range(12))
    assert {(type(image), image.mode, image.size) for image in images} == {
        (pil.Image, "RGB", (6, 4))
    }
    assert shards.num_partitions() == 2
    labelled = read_images(str(top), digits, image_type=".png", backend=backend).collect()
    assert [(np.asarray(i).flat[0], n) for i, n in labelled] == [(n, n) for n in range(12)]
    several = [str(top / "0[23].*"), str(top / "deeper")]
    assert pixels(read_images(several, image_type=".png", backend=backend).collect()) == [2, 3, 99]


@pytest.mark.slow_cases("spark")
@pytest.mark.parametrize("backend", ["spark", "pillow"])
def test_masks_belong_to_their_images(orca_spark, tmp_path, backend):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(5):
        picture(10).save(tmp_path / "images" / f"x{number}.jpg")
        (tmp_path / "masks" / f"x{number}_mask.png").write_bytes(png(number, mode="L"))
    (tmp_path / "masks" / "other.png").write_bytes(png(50, mode="L"))
    paths = {"file_path": str(tmp_path / "images"), "target_path": str(tmp_path / "masks")}
    pairs = read_images(**paths, backend=backend).collect()
    assert [np.asarray(mask).flat[0] for _, mask in pairs] == list(range(5))
    assert {(image.mode, mask.mode) for image, mask in pairs} == {("RGB", "L")}
    (tmp_path / "masks" / "x3_mask.png").unlink()
    with refused("path-missing", "x3.jpg"):
        read_images(**paths, backend=backend)
    with refused("argument-conflict"):
        read_images(**paths, label_func=digits, backend=backend)
    with refused("path-missing", "'.gif'"):
        read_images(**paths, target_type=".gif", backend=backend)


@pytest.mark.parametrize(
    ("images", "masks", "expected"),
    [
        (["a.jpg", "b.jpg"], ["b.png", "a.png"], ["a.png", "b.png"]),
        (["a.jpg", "a_b.jpg"], ["a_b.png", "a_mask.png"], ["a_mask.png", "a_b.png"]),
        (["a.jpg", "a_b.jpg"], ["a_b_mask.png", "a_mask.png"], ["a_mask.png", "a_b_mask.png"]),
        (["1.jpg", "11.jpg"], ["11.png", "1.png"], ["1.png", "11.png"]),
    ],
)
def test_which_mask_belongs_to_which_image(images, masks, expected):
    assert pairs_of_images(images, masks) == list(zip(images, expected, strict=True))


@pytest.mark.parametrize("masks", [["a_1.png", "a_2.png"], ["ab.png"], []])
def test_a_mask_that_is_not_clear_is_refused(masks):
    with refused("path-missing"):
        pairs_of_images(["a.jpg"], masks)


def test_images_that_are_missing_or_none_are_named(orca_spark, tmp_path):
    for backend in ("spark", "pillow"):
        with pytest.raises((UsageError, NotADirectoryError), match="absent"):
            read_images(str(tmp_path / "absent"), backend=backend)
    with refused("argument-value"):
        read_images(str(tmp_path), backend="opencv")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(Exception, match=r"broken\.jpg' is not an image"):
        read_images(str(tmp_path), backend="pillow")


@pytest.mark.slow
def test_photographs(orca_spark, data_dir):
    """Compare both backends with Pillow on real JPEG files."""
    paths = sorted(str(p) for p in (data_dir / "cats-dogs" / "val").glob("*/*.30[0-4].jpg"))
    if not paths:
        pytest.skip("there is no cats-dogs/val in BIGDL_DATA")
    expected = [np.asarray(pil.open(path)) for path in paths]

    def is_dog(path):
        return int("dog" in path.rpartition("/")[2])

    for backend in ("spark", "pillow"):
        pattern = str(data_dir / "cats-dogs" / "val" / "*" / "*.30[0-4].jpg")
        images = read_images(pattern, is_dog, backend=backend).collect()
        assert [label for _, label in images] == [is_dog(path) for path in paths]
        for (image, _), array in zip(images, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(image), array)
