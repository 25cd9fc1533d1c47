"""dtypes of predictions follow the model's outputs, those of inputs the model and its fit."""

import traceback

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError
from bigdl.mlflow.flavour import PyfuncPredictor
from bigdl.orca.data.xshards import frames
from bigdl.orca.learn.prediction.outputs import as_array
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.forward import accepted_inputs, call_model

BIG = np.array([16777215, 1099511627777])


class NextItem(torch.nn.Module):
    def forward(self, item):
        return item + 2


class Ranked(torch.nn.Module):
    def forward(self, item):
        both = torch.stack([item, item + 1], 1)
        return {"ids": both, "scores": both.double() / 3, "odd": item % 2 == 1}


def local(model, **options):
    return Estimator.from_torch(model=model, backend="local", **options)


def trainable(model):
    sgd = lambda model, config: torch.optim.SGD(model.parameters(), 1e-3)  # noqa: E731
    return local(model, optimizer=sgd, loss=torch.nn.MSELoss())


# -- outputs ---------------------------------------------------------------------------------------


def test_whole_numbers_are_exact_in_every_form():
    est = local(NextItem())
    found = est.predict(BIG)
    assert (found.dtype, found.tolist()) == (np.int64, (BIG + 2).tolist())
    frame = est.predict(pd.DataFrame({"item": BIG}), feature_cols=["item"])
    assert frame["prediction"].dtype == np.int64
    assert frame["prediction"].tolist() == (BIG + 2).tolist()
    data, options = est.packed_model(BIG)
    found = PyfuncPredictor(data, options).predict(BIG)
    assert (found.dtype, found.tolist()) == (np.int64, (BIG + 2).tolist())


def test_several_outputs_keep_their_dtypes_also_without_rows():
    est = local(Ranked())
    for rows in (BIG, BIG[:0]):
        found = est.predict(rows)
        assert {key: (a.dtype.name, a.shape) for key, a in found.items()} == {
            "ids": ("int64", (len(rows), 2)),
            "scores": ("float64", (len(rows), 2)),
            "odd": ("bool", (len(rows),)),
        }
    frame = est.predict(pd.DataFrame({"item": BIG}), feature_cols=["item"])
    assert frame["ids"][1].tolist() == [BIG[1], BIG[1] + 1]
    assert frame["odd"].dtype == bool


def test_xshards_keep_the_dtype_in_empty_shards(orca_spark):
    from bigdl.orca.data import SparkXShards

    shards = [{"x": BIG}, {"x": BIG[:0]}]
    shards = SparkXShards(orca_spark.sparkContext.parallelize(shards, 2))
    found = Estimator.from_torch(model=NextItem()).predict(shards).collect()
    assert [shard["prediction"].dtype for shard in found] == [np.int64] * 2
    assert found[0]["prediction"].tolist() == (BIG + 2).tolist()


@pytest.mark.parametrize(
    ("output", "dtype"),
    [
        (torch.ones(2, dtype=torch.int8), "int8"),
        (torch.ones(2, dtype=torch.uint16), "uint16"),
        (torch.ones(2, dtype=torch.float16), "float32"),
        (torch.ones(2, dtype=torch.bfloat16), "float32"),
        (torch.ones(2).to(torch.float8_e4m3fn), "float32"),
        (torch.ones(2).to_sparse(), "float32"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "float32"),
        (np.ones(2, ">f8"), "float64"),
        (np.ones(2, np.float16), "float32"),
        (np.ones(2, np.longdouble), "float64"),
        (np.array([b"a", "b"], object), "object"),
    ],
    ids=str,
)
def test_an_output_becomes_an_array_of_its_dtype(output, dtype):
    array = as_array(output)
    assert array.dtype == dtype
    assert array.dtype.isnative
    assert array.tolist() == (["a", "b"] if dtype == "object" else [1, 1])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.ones(1, dtype=torch.complex64), ("model-output",)),
        (np.array(["2024-01-01"], "M8[D]"), ("model-output", "datetime64")),
        (np.array([None]), ("model-output", "NoneType")),
    ],
    ids=["complex", "times", "objects"],
)
def test_an_output_without_a_column_is_refused(output, message):
    with refused(*message):
        as_array(output)


@pytest.mark.parametrize("method", ["jit_fp32", "onnxruntime_fp32", "openvino_fp32"])
def test_an_accelerated_model_returns_the_dtypes_of_the_original(method):
    found = local(NextItem()).predict(np.array([5, 7]), accelerate=method)
    assert (found.dtype, found.tolist()) == (np.int64, [7, 9])
    ints = np.array([[3, 1], [1, 2]])
    est = local(torch.nn.Linear(2, 1))
    fast = est.predict(ints, accelerate=method)
    assert fast.dtype == np.float32
    assert np.allclose(fast, est.predict(ints), atol=1e-5)


# -- inputs ----------------------------------------------------------------------------------------


def test_whole_numbers_reach_a_model_of_floats_as_floats():
    est, x = trainable(torch.nn.Linear(2, 1)), np.array([[3, 1], [2, 5]])
    y = np.ones((2, 1), "float32")
    before = est.predict(x.astype("float32"))
    assert est.predict(x).tolist() == before.tolist()  # it was never fitted
    est.fit((x.astype("float32"), y), batch_size=2)
    expected = est.predict(x.astype("float32")).tolist()
    assert est.predict(x).tolist() == expected
    frame = pd.DataFrame({"x": x.tolist()})
    assert est.predict(frame, feature_cols=["x"])["prediction"].tolist() == expected
    of_floats = est.evaluate((x.astype("float32"), y))["val_loss"]
    assert est.evaluate((x, y))["val_loss"] == of_floats
    est.fit((x, y), batch_size=2)
    assert est.predict(x[:0]).dtype == np.float32


def test_a_first_fit_on_whole_numbers_fits_a_model_of_floats():
    """What it takes are floats, so that 1.5 is not refused later."""
    est = trainable(torch.nn.Linear(2, 1))
    est.fit((np.array([[3, 1], [2, 5]]), np.ones((2, 1), "float32")), batch_size=2)
    assert est.predict(np.array([[1.5, 2.0]])).shape == (1,)


def test_whole_floats_reach_a_model_of_ids_as_ids():
    est = trainable(torch.nn.Sequential(torch.nn.Embedding(9, 1), torch.nn.Flatten(0)))
    ids = np.array([3, 8])
    expected = est.predict(ids).tolist()
    assert est.predict(ids.astype(float)).tolist() == expected
    est.fit((ids, np.ones(2, "float32")), batch_size=2)
    expected = est.predict(ids).tolist()
    assert est.predict(ids.astype(float)).tolist() == expected
    loss = est.evaluate((ids, np.ones(2, "float32")))["val_loss"]
    assert est.evaluate((ids.astype(float), np.ones(2, "float32")))["val_loss"] == loss
    with refused("data-value", "3", "5", "int64"):
        est.predict(np.array([3.5, 1]))
    with refused("data-schema", "int64"):
        est.predict(np.array([True, False]))


class Layers(torch.nn.Module):
    """Layers that say in as many ways that they do not take whole numbers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        made = self.layer(x)
        return made[0] if isinstance(made, tuple) else made


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (torch.nn.Linear(4, 1), (2, 4)),
        (torch.nn.Linear(4, 1).double(), (2, 4)),
        (torch.nn.Linear(4, 1).bfloat16(), (2, 4)),
        (torch.nn.LayerNorm(4), (2, 4)),
        (torch.nn.BatchNorm1d(4), (2, 4)),
        (torch.nn.Conv1d(4, 1, 1), (2, 4, 4)),
        (torch.nn.LSTM(4, 2), (2, 4, 4)),
        (torch.nn.GRU(4, 2), (2, 4, 4)),
        (torch.nn.MultiheadAttention(4, 1), None),
        (torch.nn.Softmax(1), (2, 4)),
        (torch.nn.Bilinear(4, 4, 1), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_get_whole_numbers_as_floats(layer, shape):
    arrays = [torch.arange(torch.tensor(shape).prod()).reshape(shape) if shape else None]
    if shape is None:
        arrays = [torch.ones(2, 2, 4, dtype=torch.int64)] * (
            3 if hasattr(layer, "num_heads") else 2
        )
        model = layer.eval()
    else:
        model = Layers(layer).eval()
    floats = next((p.dtype for p in layer.parameters()), torch.float32)

    def first(made):
        return made[0] if isinstance(made, tuple) else made

    expected = first(model(*[a.to(floats) for a in arrays]))
    for _ in range(2):  # the second time it is known
        assert torch.equal(first(call_model(model, arrays)), expected)
    assert [a.dtype for a in accepted_inputs(model, arrays)] == [floats] * len(arrays)


class Priced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ids, self.prices = torch.nn.Embedding(9, 2), torch.nn.Linear(1, 2)

    def forward(self, price, item):
        return self.ids(item) + self.prices(price[:, None])


def test_each_input_gets_the_dtype_that_its_layers_take():
    model = Priced()
    price, item = torch.tensor([3.0, 4.0]), torch.tensor([1, 8])
    expected = model(price, item)
    assert torch.equal(call_model(model, [price.long(), item]), expected)
    assert torch.equal(call_model(model, [price.long(), item.float()]), expected)


def test_ids_that_float32_does_not_tell_apart_are_refused():
    model = torch.nn.Embedding(9, 1)
    assert call_model(model, [torch.tensor([3.0])]).shape == (1, 1)
    with refused("data-value", "16777216.0", "float32"):
        call_model(model, [torch.tensor([2.0**24])])


def test_an_error_of_another_kind_is_the_models_own():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        call_model(torch.nn.Linear(2, 1), [torch.ones(2, 3)])
    assert "inputs had the shapes (2, 3) of float32" in error.value.__notes__[0]


# -- messages --------------------------------------------------------------------------------------


class Failing(torch.nn.Module):
    def forward(self, x):
        raise KeyError("no such key")


def test_an_error_of_the_model_shows_the_frames_of_the_user_only():
    with pytest.raises(WorkerError, match="no such key") as error:
        local(Failing()).predict(np.ones((2, 2)))
    text = "".join(traceback.format_exception(error.value))
    files = [line for line in text.splitlines() if line.lstrip().startswith("File ")]
    assert sum("bigdl/" in file for file in files) <= 2  # predict itself
    assert len(text.splitlines()) < 20
    assert "return torch" not in text


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"junk", "its content is something else"), (b"e", "its content"), (b"", "it is empty")],
)
def test_a_file_of_something_else_is_told_from_weights(tmp_path, content, said):
    (tmp_path / "junk.pt").write_bytes(content)
    with pytest.raises(UsageError, match=f"junk.pt' is not a file that torch can load: {said}"):
        local(torch.nn.Linear(2, 1)).load(str(tmp_path / "junk.pt"))


def test_ids_beyond_floats_beside_floats_are_refused_by_name():
    def types(values):
        return frames.column_types(pd.DataFrame({"item": values}))

    with refused("data-schema", "'item'", "2", "53"):
        frames.unified_types([types([2**53 + 1]), types([1.5])])
    assert frames.unified_types([types([2**53]), types([1.5])])["item"] == "double"


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2)])
def test_predictions_of_shards_have_the_shape_of_the_label(orca_spark, shape):
    from bigdl.orca.data import XShards

    est = Estimator.from_torch(model=torch.nn.Linear(3, 1))
    rows = {"x": np.ones((6, 3), "float32"), "y": np.zeros(shape, "float32")}
    collected = est.predict(XShards.partition(rows, num_shards=2)).collect()
    expected = (3, 1) if shape == (6, 1) else (3,)
    assert [shard["prediction"].shape for shard in collected] == [expected, expected]
    assert est.predict(rows["x"]).shape == (6,)  # without a label as in BigDL 2.x
