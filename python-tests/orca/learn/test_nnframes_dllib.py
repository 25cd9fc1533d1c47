"""Losses and layers under the names of BigDL 2.x, and conversions of DataFrames."""

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.dllib.nn import criterion
from bigdl.dllib.nn.layer import (
    Linear,
    LogSoftMax,
    Model,
    ReLU,
    Reshape,
    Sequential,
    SpatialConvolution,
    SpatialMaxPooling,
    View,
)


def test_losses_are_those_of_torch():
    torch.manual_seed(0)
    scores, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    chances = scores.softmax(1)
    wanted = nn.functional.cross_entropy(scores, labels)
    for loss, output in (
        (criterion.CrossEntropyCriterion(), scores),
        (criterion.ClassNLLCriterion(), chances.log()),
        (criterion.ClassNLLCriterion(logProbAsInput=False), chances),
    ):
        torch.testing.assert_close(loss(output, labels), wanted)
    weighted = criterion.CrossEntropyCriterion([1, 2, 3])
    assert type(weighted) is nn.CrossEntropyLoss
    assert weighted.weight.tolist() == [1, 2, 3]
    assert criterion.MSECriterion(size_average=False).reduction == "sum"


def test_layers_make_a_model():
    model = (
        Sequential()
        .add(Reshape([1, 4, 6]))
        .add(SpatialConvolution(1, 2, 3, 1))
        .add(ReLU())
        .add(SpatialMaxPooling(2, 4, 2, 4))
        .add(View([4]))
        .add(Linear(4, 3))
        .add(LogSoftMax())
    )
    found = model(torch.randn(5, 24))
    assert found.shape == (5, 3)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(5))
    with refused("file-format"):
        Model.loadModel("a.bigdl")


# -- bigdl.orca.learn.utils ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def frame(orca_spark):
    from pyspark.ml.linalg import Vectors

    rows = [(i, float(i), [i, i + 1], Vectors.sparse(3, [i % 3], [2.0]), str(i)) for i in range(7)]
    return orca_spark.createDataFrame(rows, ["i", "a.b", "pair", "vector", "text"]).coalesce(2)


def test_a_frame_becomes_shards_and_predictions_a_frame(frame):
    from bigdl.orca.learn.utils import (
        convert_predict_rdd_to_dataframe,
        convert_predict_xshards_to_dataframe,
        maybe_dataframe_to_xshards,
        update_predict_xshards,
    )

    data, none = maybe_dataframe_to_xshards(frame, None, ["a.b", "pair", "vector"], ["i"])
    assert none is None
    shards = data.collect()
    number, pair, vector = (np.concatenate([s["x"][i] for s in shards]) for i in range(3))
    np.testing.assert_array_equal(number, np.arange(7))
    np.testing.assert_array_equal(pair, [[i, i + 1] for i in range(7)])
    np.testing.assert_array_equal(vector.argmax(1), np.arange(7) % 3)
    assert (number.dtype, vector.dtype) == (np.float32, np.float32)
    assert shards[0]["y"].dtype == np.int64

    predicted = data.transform_shard(lambda s: {"prediction": s["x"][0] * 2})
    found = convert_predict_xshards_to_dataframe(frame, predicted)
    assert found.columns == [*frame.columns, "prediction"]
    assert all(row["prediction"] == row["i"] * 2 for row in found.collect())
    both = update_predict_xshards(data, predicted).collect()
    assert set(both[0]) == {"x", "y", "prediction"}

    several = data.transform_shard(lambda s: {"prediction": [s["x"][1], s["x"][2]]})
    row = convert_predict_xshards_to_dataframe(frame, several).first()
    assert row["prediction"][0].toArray().tolist() == [0.0, 1.0]
    vectors = convert_predict_rdd_to_dataframe(frame, frame.rdd.map(lambda r: np.ones((2, 2))))
    assert vectors.first()["prediction"] == [[1.0, 1.0], [1.0, 1.0]]


def test_shards_have_the_size_that_was_asked_for(frame):
    from bigdl.orca.learn.utils import maybe_dataframe_to_xshards

    data, _ = maybe_dataframe_to_xshards(frame, None, ["i"], None, "predict", shard_size=2)
    shards = data.collect()
    assert all(len(s["x"]) <= 2 and "y" not in s for s in shards)
    assert sum(len(s["x"]) for s in shards) == 7
    assert maybe_dataframe_to_xshards(data, None, None, None)[0] is data


def test_wrong_frames_are_named(frame):
    from bigdl.orca.learn.utils import maybe_dataframe_to_xshards

    for arguments, text in (
        (([], 3), "validation_data should have the same type"),
        ((frame, None, ["i"], None), "label_cols is required"),
        ((frame, None, ["nothing"], ["i"]), "no column 'nothing'"),
        ((frame, None, ["text"], ["i"]), "Column 'text' holds strings"),
        ((frame, None, ["i"], ["i"], "guess"), "mode should be"),
    ):
        arguments = (*arguments, None, None)[: max(4, len(arguments))]
        with pytest.raises(UsageError, match=text):
            maybe_dataframe_to_xshards(*arguments)
