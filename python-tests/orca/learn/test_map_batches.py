"""map_batches runs a program of several models over the rows of a DataFrame."""

import io
import os
import signal

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.inference import InferenceModel, map_batches


def picture(grey, form="JPEG", size=(64, 48)):
    """A file with a gradient, of (width, height)."""
    pixels = np.clip(np.linspace(0, 60, size[0])[None, :, None] + grey, 0, 255)
    pixels = np.broadcast_to(pixels, (size[1], size[0], 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return bytearray(file.getvalue())


@pytest.fixture(scope="module")
def pictures(orca_spark):
    rows = [(i, picture(i)) for i in range(40)]
    return orca_spark.createDataFrame(rows, "id long, picture binary").repartition(5).cache()


def double(batch, models):
    assert len(batch["x"]) <= 7
    return {"y": models["double"].predict(batch["x"][:, None].astype(np.float32))[:, 0]}


def linear(factor):
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, factor)
    return module


@pytest.mark.slow_cases("openvino_fp32")
@pytest.mark.parametrize(
    "accelerate", [None, "openvino_fp32", pytest.param("onnxruntime_fp32", marks=pytest.mark.slow)]
)
def test_rows_keep_their_order_and_columns(orca_spark, accelerate):
    sample = np.ones((4, 1), np.float32)
    model = InferenceModel().load_module(linear(2.0), accelerate=accelerate, sample=sample)
    frame = orca_spark.range(0, 100, 1, 3).selectExpr("id as x", "string(id) as `a.b`")
    done = map_batches(
        frame, double, "y float", models={"double": model}, columns="x", batch_size=7
    )
    assert done.columns == ["x", "a.b", "y"]
    assert [tuple(row) for row in done.collect()] == [(i, str(i), 2.0 * i) for i in range(100)]


def test_a_deferred_result_is_awaited_after_the_next_batch_started(orca_spark):
    calls = []

    def start(batch, models):
        calls.append(batch["x"])
        return lambda: {"y": 2 * batch["x"], "started": [len(calls)] * len(batch["x"])}

    frame = orca_spark.range(0, 20, 1, 1).selectExpr("id as x")
    done = map_batches(frame, start, "y long, started int", columns="x", batch_size=7)
    counts = [2] * 7 + [3] * 13
    assert [tuple(row) for row in done.collect()] == [(i, 2 * i, counts[i]) for i in range(20)]


def test_a_worker_builds_its_models_once(orca_spark):
    def which(batch, models):
        rows = len(batch["id"])
        return {"process": np.full(rows, os.getpid()), "model": np.full(rows, id(models["m"]))}

    models = {"m": InferenceModel().load_module(linear(1.0))}
    frame = orca_spark.range(0, 64, 1, 8)
    done = map_batches(frame, which, "process long, model long", models=models, columns="id")
    seen = done.select("process", "model").distinct().collect()
    assert len(seen) == len({row.process for row in seen})


def test_columns_come_as_arrays_and_go_as_types_of_spark(orca_spark):
    rows = [
        ("a", [1.0, 2.0], [[1], [2]], True, bytearray(b"x")),
        ("b", [3.0, 4.0], [[3], [4]], False, None),
    ]
    frame = orca_spark.createDataFrame(
        rows,
        "text string, vector array<double>, matrix array<array<int>>, flag boolean, data binary",
    ).coalesce(1)

    def look(batch, models):
        assert batch["text"].tolist() == ["a", "b"]
        assert batch["vector"].tolist() == [[1, 2], [3, 4]]
        assert batch["matrix"].shape == (2, 2, 1)
        assert batch["flag"].dtype == bool
        assert batch["data"].tolist() == [b"x", None]
        return {
            "matrix2": batch["vector"][:, None, :] * np.ones((1, 3, 1)),
            "code": np.array([[1, 2], [3, 4]], np.uint8),
            "name": ["n", None],
        }

    returns = "matrix2 array<array<float>>, code binary, name string"
    done = map_batches(frame, look, returns, columns=frame.columns, keep=[]).collect()
    assert done[1].matrix2 == [[3.0, 4.0]] * 3
    assert [row.name for row in done] == ["n", None]
    assert [bytes(row.code) for row in done] == [b"\1\2", b"\3\4"]


def shown(batch, models):
    return {"pixels": batch["picture"].reshape(len(batch["picture"]), -1)}


def pixels_of(row, height, width):
    return np.array(row.pixels, np.uint8).reshape(height, width, 3)


@pytest.mark.slow
def test_images_are_decoded_to_their_size(orca_spark):
    frame = orca_spark.createDataFrame([(picture(9, "PNG"),)], "picture binary")
    wanted = cv2.cvtColor(
        cv2.imdecode(np.frombuffer(picture(9, "PNG"), np.uint8), 1), cv2.COLOR_BGR2RGB
    )
    options = {"returns": "pixels array<int>", "images": {"picture": (48, 64)}}
    (row,) = map_batches(frame, shown, **options).collect()
    assert np.array_equal(pixels_of(row, 48, 64), wanted)


def test_a_reduced_jpeg_is_nearly_the_whole_one(orca_spark, pictures):
    options = {"returns": "pixels array<int>", "images": {"picture": (12, 16)}}
    small, whole = (
        map_batches(pictures.limit(3), shown, reduced=reduced, **options).collect()
        for reduced in (True, False)
    )
    for one, other in zip(small, whole, strict=True):
        apart = np.abs(np.array(one.pixels) - np.array(other.pixels))
        assert apart.max() <= 4


def test_damaged_images_are_null_or_an_error(orca_spark):
    rows = [(0, picture(5)), (1, bytearray(b"no image")), (2, None), (3, picture(7))]
    frame = orca_spark.createDataFrame(rows, "id int, picture binary").coalesce(1)

    def grey(batch, models):
        return {"grey": batch["picture"][:, 0, 0, 0].astype(np.int32)}

    options = {"returns": "grey int", "images": {"picture": (48, 64)}}
    found = map_batches(frame, grey, damaged="null", **options).collect()
    assert [(row.id, row.grey is None) for row in found] == [
        (0, False), (1, True), (2, True), (3, False),
    ]  # fmt: skip
    with pytest.raises(Exception, match="An image of the batch cannot be decoded"):
        map_batches(frame, grey, **options).collect()


def lengths(batch, models):
    return {"y": [len(text or "") + len(data) for text, data in zip(*batch.values(), strict=True)]}


@pytest.fixture(scope="module")
def files(orca_spark, tmp_path_factory):
    """A folder of three files of three row groups each, and one of no rows."""
    written, path = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("files")
    frame = orca_spark.range(0, 60, 1, 3).selectExpr(
        "id", "if(id % 7 = 0, null, string(id)) as text", "array(float(id), float(1)) as vector",
        "binary(repeat('x', int(id))) as data", "date_add(date'1900-01-01', int(id)) as day",
        "id as `a.b`", "cast(id as decimal(10, 2)) as amount",
    )  # fmt: skip
    frame.write.mode("overwrite").parquet(str(written))
    for number, file in enumerate(sorted(written.glob("*.parquet"))):
        table = pq.read_table(file)
        pq.write_table(table, path / f"{number}.parquet", row_group_size=8)
        pq.write_table(table.slice(0, 0), path / "no-rows.parquet")
    return str(path)


@pytest.mark.slow_cases("keep0-True")
@pytest.mark.parametrize(
    ("keep", "is_read_in_tasks"),
    [(["id", "vector", "day"], True), (["data", "id"], True), ("a.b", False), ("amount", True)],
)
def test_columns_of_files_are_those_of_spark(
    orca_spark, files, monkeypatch, keep, is_read_in_tasks
):
    def done(frame):
        return map_batches(
            frame, lengths, "y long", columns=["text", "data"], keep=keep, batch_size=7
        )

    read = orca_spark.read.parquet(files)
    ours = done(read)
    with monkeypatch.context() as patched:
        patched.setenv("BIGDL_NO_PLAN_INSPECTION", "1")
        theirs = done(read)
    plans = [each._jdf.queryExecution().toString() for each in (ours, theirs)]
    assert ["FileScan parquet" in plan for plan in plans] == [not is_read_in_tasks, True]
    assert ours.rdd.glom().collect() == theirs.rdd.glom().collect()
    assert ours.count() == 60
    assert "FileScan parquet" in done(read.where("id % 2 = 0"))._jdf.queryExecution().toString()


def test_a_column_of_files_may_have_two_names(orca_spark, files):
    def joined(batch, models):
        return {"y": batch["twice"] + batch["id"]}

    read = orca_spark.read.parquet(files).selectExpr("id as twice", "text", "id")
    done = map_batches(read, joined, "y long", columns=["id", "twice"], keep=["text", "id"])
    assert sorted(row.y - 2 * row.id for row in done.collect()) == [0] * 60


def test_a_file_that_is_gone_is_told(orca_spark, tmp_path):
    orca_spark.range(9).coalesce(1).write.parquet(str(tmp_path / "numbers"))
    done = map_batches(
        orca_spark.read.parquet(str(tmp_path / "numbers")),
        lambda batch, models: {"y": batch["id"]}, "y long", columns="id",
    )  # fmt: skip
    (file,) = (tmp_path / "numbers").glob("*.parquet")
    file.unlink()
    with pytest.raises(Exception, match=r"numbers.*is no longer there; read the table again"):
        done.collect()


@pytest.mark.slow
@pytest.mark.fault
def test_no_row_is_lost_or_doubled_when_workers_are_killed(orca_spark, pictures, tmp_path):
    def bright(batch, models):
        for number in range(2):  # two workers, one after the other
            try:
                os.close(os.open(tmp_path / str(number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return {"bright": batch["picture"].mean((1, 2, 3)).astype(np.float32)}

    done = map_batches(pictures, bright, "bright float", images={"picture": (6, 8)}, batch_size=4)
    done.write.parquet(str(tmp_path / "done"))
    rows = orca_spark.read.parquet(str(tmp_path / "done")).collect()
    assert sorted(row.id for row in rows) == list(range(40))
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}


WRONG = {
    "no function": ({"function": 3}, "function must be callable, got int"),
    "no columns": ({"images": None}, "The function would get no column"),
    "no schema": ({"returns": "a b c d"}, "is not a valid Spark schema"),
    "empty schema": ({"returns": ""}, "returns must name the new columns"),
    "a taken name": ({"returns": "ID int"}, "two columns 'ID'"),
    "a module": ({"models": {"m": linear(1.0)}}, "must be an InferenceModel, got Linear"),
    "one side": ({"images": {"picture": 4}}, r"\(height, width\)"),
    "numbers": ({"images": {"id": (4, 4)}}, "must be binary"),
    "another column": ({"columns": "other"}, "other"),
    "damaged": ({"damaged": "drop"}, "damaged"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_told(pictures, case):
    changed, message = WRONG[case]
    arguments = {"function": shown, "returns": "pixels array<int>", "images": {"picture": (4, 4)}}
    with pytest.raises(UsageError, match=message):
        map_batches(pictures, **{**arguments, **changed})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch, models: {"other": batch["id"]}, "must return a dict of"),
        (lambda batch, models: {"y": batch["id"][:1]}, "must return one value per row"),
        (lambda batch, models: {"y": ["text"] * len(batch["id"])}, "Column 'y' cannot be"),
    ],
)
def test_what_a_function_returns_is_checked(orca_spark, function, message):
    frame = orca_spark.range(0, 9, 1, 1)
    with pytest.raises(Exception, match=message):
        map_batches(frame, function, "y int", columns="id").collect()


def test_acceleration_needs_a_method_and_a_sample():
    with refused("name-unknown"):
        InferenceModel().load_module(linear(1.0), accelerate="faster")
    with refused("argument-missing"):
        InferenceModel().load_module(linear(1.0), accelerate="openvino_fp32")
