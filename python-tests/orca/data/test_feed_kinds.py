"""Test fit, evaluate and predict with each input type on a local Spark."""

import sys

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from reference_training import largest_difference, rows_of, train_alone
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.data import SparkXShards, XShards
from bigdl.orca.data.feeds.in_memory import ArrayFeed
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.testing.feeds import FeedContract

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS = 23
(TABLE,) = rows_of([ROWS])
X, Y = TABLE["x"], TABLE["y"]
COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"]}


class Samples(Dataset):
    def __init__(self, noise=0.0):
        self.noise = noise

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        x = torch.from_numpy(X[i])
        return x + self.noise * torch.rand_like(x), torch.tensor(Y[i])


def frame():
    return pd.DataFrame({"x": list(X), "y": Y})


def pandas_shards(spark):
    """Return uneven shards, one of them empty, in fewer partitions than workers."""
    pieces = [frame()[:0], frame()[:17], frame()[17:]]
    return SparkXShards(spark.sparkContext.parallelize(pieces, 1))


def parquet(spark, folder):
    frame().to_parquet(folder / "a.parquet", row_group_size=4)
    return str(folder / "a.parquet")


INPUTS = {
    "arrays": lambda spark, folder: ((X, Y), {}),
    "a dict": lambda spark, folder: ({"x": [X], "y": Y}, {}),
    "a dict of columns": lambda spark, folder: (TABLE, COLUMNS),
    "pandas": lambda spark, folder: (frame(), COLUMNS),
    "tensors": lambda spark, folder: (TensorDataset(torch.tensor(X), torch.tensor(Y)), {}),
    "a dataset": lambda spark, folder: (Samples(), {}),
    "a loader": lambda spark, folder: (DataLoader(Samples(), 3), {}),
    "a function": lambda spark, folder: (lambda config, size: DataLoader(Samples(), size), {}),
    "XShards": lambda spark, folder: (XShards.partition({"x": X, "y": Y}, 3), {}),
    "XShards of pandas": lambda spark, folder: (pandas_shards(spark), COLUMNS),
    "Parquet": lambda spark, folder: (parquet(spark, folder), COLUMNS),
}
IN_ORDER = {"arrays", "pandas", "tensors", "a dataset", "a loader", "a function", "a dict"}


def net(config=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def sgd(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def estimator(model=net, config=None, **options):
    config = {"dtype": "float64", "shuffle": False, **(config or {})}
    return Estimator.from_torch(
        model=model,
        optimizer=sgd,
        loss=nn.MSELoss(),
        workers_per_node=2,
        config=config,
        log_to_driver=False,
        **options,
    )


def squared(model, batch):
    return nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])


@pytest.mark.slow_cases("XShards")
@pytest.mark.parametrize("input_type", INPUTS)
def test_every_kind_trains_like_one_process(orca_spark, tmp_path, input_type):
    data, options = INPUTS[input_type](orca_spark, tmp_path)
    # if the workers take rows in turn, their batches equal those of one process
    batch_size = 5 if input_type in IN_ORDER else ROWS
    table = [{"x": X, "y": Y}]
    expected, means = train_alone(
        net(), sgd, squared, table, epochs=2, batch_size=batch_size, seed=0, shuffle=False
    )
    est = estimator()
    stats = est.fit(data, epochs=2, batch_size=batch_size, validation_data=data, **options)
    assert largest_difference(est.get_model().state_dict(), expected.state_dict()) < 1e-12
    assert [s["train_loss"] for s in stats] == pytest.approx(means, rel=1e-12)
    with torch.no_grad():
        loss = squared(expected, {"x": torch.tensor(X), "y": torch.tensor(Y)}).item()
    assert (stats[-1]["val_loss"], stats[-1]["val_num_samples"]) == (pytest.approx(loss), ROWS)
    if input_type in ("a loader", "XShards"):
        metrics = est.evaluate(data, batch_size=6, **options)
        assert (metrics["val_loss"], metrics["num_samples"]) == (pytest.approx(loss), ROWS)


class TestFrame(FeedContract):
    feature_cols, label_cols = ["x"], ["y"]

    def data(self):
        return frame()

    def expected(self):
        return X, Y

    def predictions(self, predicted):
        return predicted["prediction"].to_numpy()


class TestParquetFile(TestFrame):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def data(self):
        return parquet(None, self.folder)


class Stop(Callback):
    def after_train_iter(self, runner):
        if runner.global_step == 7:
            raise ValueError("stopped on purpose")


@pytest.mark.parametrize("input_type", ["a loader that augments", "arrays larger than memory"])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(orca_spark, tmp_path, input_type):
    if input_type == "arrays larger than memory":
        data, config = (X, Y), {"shuffle": True, "shuffle_memory": 200}
    else:
        data, config = DataLoader(Samples(noise=1.0), 3, shuffle=True), {}
    options = {"epochs": 2, "batch_size": 5, "seed": 3, "max_failures": 0}
    whole = estimator(config=config)
    whole.fit(data, **options)
    resumed = {"resume": "auto", "checkpoint_trigger": SeveralIteration(3)}
    with pytest.raises(WorkerError, match="on purpose"):
        estimator(config=config, model_dir=str(tmp_path)).fit(
            data, callbacks=[Stop()], **options, **resumed
        )
    # a run keeps its initial windows, regardless of the current memory
    config = {k: v for k, v in config.items() if k != "shuffle_memory"}
    again = estimator(config=config, model_dir=str(tmp_path))
    again.fit(data, **options, **resumed)
    assert largest_difference(again.get_model().state_dict(), whole.get_model().state_dict()) == 0


# Prediction -------------------------------------------------------------------------------------


class Outputs(nn.Module):
    """Model whose output is a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, *columns):
        return self.function(*columns)


def predicting(function):
    return Estimator.from_torch(model=lambda config: Outputs(function), loss=nn.MSELoss())


def sums(x):
    return x.sum(1)


SUMS = X.astype(np.float32).sum(1)


def test_shards_are_predicted_lazily_in_their_partitions(orca_spark):
    dicts = predicting(sums).predict(XShards.partition({"x": X, "y": Y}, 3), batch_size=4)
    assert dicts.is_lazy
    predictions = dicts.collect()
    assert [set(shard) for shard in predictions] == [{"x", "y", "prediction"}] * 3
    assert np.concatenate([s["prediction"] for s in predictions]) == pytest.approx(SUMS, abs=1e-6)
    assert np.array_equal(np.concatenate([s["x"] for s in predictions]), X)
    frames = predicting(sums).predict(pandas_shards(orca_spark), feature_cols="x", batch_size=4)
    assert frames.num_partitions() == 1
    assert [len(f) for f in frames.collect()] == [0, 17, 6]
    joined = pd.concat(frames.collect())
    assert list(joined.columns) == ["x", "y", "prediction"]
    assert joined["prediction"].to_numpy() == pytest.approx(SUMS, abs=1e-6)


def test_arrays_and_frames_are_predicted_in_order(orca_spark):
    est = predicting(sums)
    assert est.predict(X, batch_size=3) == pytest.approx(SUMS, abs=1e-6)
    assert est.predict({"x": X, "y": Y}) == pytest.approx(SUMS, abs=1e-6)
    frame_ = frame().set_index(pd.Index(range(100, 100 + ROWS)))
    predictions = est.predict(frame_, feature_cols="x")
    assert predictions.index.equals(frame_.index)
    assert predictions["prediction"].to_numpy() == pytest.approx(SUMS, abs=1e-6)
    assert predicting(lambda x: x.sum(1).squeeze()).predict(X[:1]).shape == (1,)
    with refused("model-output"):
        predicting(lambda x: x.sum()).predict(X)


def test_outputs_have_the_form_of_the_model(orca_spark):
    two = predicting(lambda a, b: (a[:, :2], b.sum(1))).predict((X, X))
    assert [array.shape for array in two] == [(ROWS, 2), (ROWS,)]
    named = predicting(lambda x: {"a": x, "b": x[:, 0]}).predict(X)
    assert {key: value.shape for key, value in named.items()} == {"a": X.shape, "b": (ROWS,)}
    shards = XShards.partition({"x": X}, 2)
    pair = predicting(lambda x: [x, x[:, 0]])
    assert [a.ndim for a in pair.predict(shards).first()["prediction"]] == [2, 1]
    assert set(pair.predict(shards, output_cols=["p", "q"]).first()) == {"x", "p", "q"}


def test_files_are_predicted_by_spark(orca_spark, tmp_path):
    predictions = predicting(sums).predict(parquet(orca_spark, tmp_path), feature_cols=["x"])
    rows = predictions.collect()
    assert predictions.columns == ["x", "y", "prediction"]
    assert [row.prediction for row in rows] == pytest.approx(SUMS, abs=1e-6)


@pytest.mark.parametrize("data", [DataLoader(Samples()), Samples(), lambda c, b: Samples()])
def test_loaders_are_not_predicted(orca_spark, data):
    with pytest.raises(UsageError, match="Only XShards or Spark DataFrame are supported"):
        predicting(sums).predict(data)


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda s: XShards.partition({"x": X}, 2), {}, "The data has no targets"),
        (lambda s: pandas_shards(s), {}, "feature_cols is required"),
        (lambda s: pandas_shards(s), {"feature_cols": "x"}, "label_cols is required"),
        (
            lambda s: SparkXShards(s.sparkContext.parallelize([(X, Y), (X, Y > 0)], 2)),
            {},
            "is int64 in some|is float64 in some|is bool in some",
        ),
        (lambda s: (X, Y), {"validation_data": TensorDataset}, "should have the same type"),
        (lambda s: (X, Y), {"config": {"shuffle_memory": 0}}, "shuffle_memory"),
    ],
)
def test_wrong_inputs_are_refused(orca_spark, data, options, message):
    options = dict(options)
    with pytest.raises(UsageError, match=message):
        estimator(config=options.pop("config", None)).fit(data(orca_spark), **options)


def test_arrays_reach_workers_elsewhere_through_spark(orca_spark, monkeypatch):
    monkeypatch.setattr(ArrayFeed, "needs_packing", lambda feed, cluster: True)
    est = estimator()
    stats = est.fit((X, Y), batch_size=5, validation_data=(X, Y))
    expected, _ = train_alone(
        net(), sgd, squared, [{"x": X, "y": Y}], epochs=1, batch_size=5, seed=0, shuffle=False
    )
    assert largest_difference(est.get_model().state_dict(), expected.state_dict()) < 1e-12
    assert (stats[0]["num_samples"], stats[0]["val_num_samples"]) == (ROWS, ROWS)
