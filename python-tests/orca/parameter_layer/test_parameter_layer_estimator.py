"""The Estimator with ``backend="bigdl"``."""

import functools
import os
import signal

import numpy as np
import pytest
import torch
from reference_training import largest_difference
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.metrics import MSE
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import MaxIteration, MaxScore, MinLoss, SeveralIteration, TriggerOr

ROWS = 40
COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, x):
        return self.layers(x)


def net(config):
    return Net()


def normed(config):
    return Normed()


def adam(model, config):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def stepped(optimizer, config):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def estimator(backend="bigdl", **options):
    given = {"model": net, "optimizer": adam, "loss": nn.MSELoss(), "workers_per_node": 2}
    return Estimator.from_torch(**{**given, "backend": backend, **options})


def arrays():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 4)).astype(np.float32)
    return x, (x.sum(axis=1) + 0.1).astype(np.float32)


@pytest.fixture(scope="module")
def frame(orca_spark):
    x, y = arrays()
    rows = [(a.tolist(), float(b)) for a, b in zip(x, y, strict=True)]
    return orca_spark.createDataFrame(rows, "x array<float>, y float")


def fitted(data=None, *, epochs=2, options=None, **fit):
    est = estimator(**(options or {}))
    stats = est.fit(data or arrays(), epochs=epochs, batch_size=8, seed=3, **fit)
    return est, stats


def weights(est):
    return est.get_model().state_dict()


def same(one, other):
    return largest_difference(weights(one), weights(other)) == 0


# -- results --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shuffle_gives_the_weights_of_torch_distributed(orca_spark):
    """Both sum two gradients of equal rows, so not even the last bit differs much."""
    one, stats = fitted(options={"scheduler_creator": stepped, "scheduler_step_freq": "batch"})
    options = {"scheduler_creator": stepped, "scheduler_step_freq": "batch", "backend": "spark"}
    other, known = fitted(options=options)
    assert largest_difference(weights(one), weights(other)) < 1e-6
    assert [s["num_samples"] for s in stats] == [ROWS, ROWS]
    for a, b in zip(stats, known, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a.keys() == b.keys()
    state, others = one.get_state_dict(), other.get_state_dict()
    assert state["schedulers"][0]["_last_lr"] == others["schedulers"][0]["_last_lr"]


@pytest.fixture(scope="module")
def by_shuffle(orca_spark):
    return fitted(options={"model": normed}, group_size=3)


@pytest.mark.slow_cases("barrier")
@pytest.mark.parametrize(
    "fit", [{"group_size": 10}, {"transport": "barrier"}], ids=["longer group", "barrier"]
)
def test_weights_and_buffers_depend_on_nothing_but_the_rows(by_shuffle, fit):
    est, stats = by_shuffle
    other, others = fitted(options={"model": normed}, **fit)
    assert same(est, other)
    assert [s["train_loss"] for s in stats] == [s["train_loss"] for s in others]
    assert not torch.equal(weights(est)["layers.1.running_mean"], torch.zeros(8))
    assert int(weights(est)["layers.1.num_batches_tracked"]) == 10


@pytest.mark.slow
def test_a_frame_with_validation_and_what_follows(frame):
    est = estimator(metrics=[MSE()])
    est.set_l2_norm_gradient_clipping(1.0)
    seen = []

    class Watch(Callback):
        def after_train_epoch(self, runner):
            seen.append((runner.epochs, runner.model.layers[0].weight.detach().clone()))

    stats = est.fit(
        frame,
        epochs=2,
        batch_size=8,
        seed=3,
        validation_data=frame,
        callbacks=[Watch()],
        compression="bf16",
        profile=True,
        **COLUMNS,
    )
    found = est.evaluate(frame, **COLUMNS)
    assert stats[-1]["val_loss"] == pytest.approx(found["val_loss"])
    assert float(stats[-1]["val_mse"]) == pytest.approx(float(found["MSE"]))
    assert stats[1]["train_loss"] < stats[0]["train_loss"]
    profile = stats[0]["profile"]
    assert {"launch_s", "dispatch_s", "get_weights_s", "compute_s", "sync_s"} <= profile.keys()
    assert profile["bytes_per_step"] >= 2 * sum(w.numel() for w in weights(est).values())
    assert all(value >= 0 for value in profile.values())
    assert [epoch for epoch, _ in seen] == [0, 1]
    assert torch.equal(seen[1][1], weights(est)["layers.0.weight"])
    predicted = est.predict(frame, feature_cols=["x"]).collect()
    x = torch.from_numpy(np.array([row["x"] for row in predicted], np.float32))
    with torch.no_grad():
        expected = est.get_model()(x)[:, 0]
    assert np.allclose([row["prediction"] for row in predicted], expected, atol=1e-6)


def test_groups_say_what_they_spent_their_time_on(orca_spark, tmp_path):
    est = estimator()
    with refused("state", "set_tensorboard"):
        est.plot_phases(tmp_path / "nothing.svg")
    est.set_tensorboard(str(tmp_path), "app")
    est.fit(arrays(), epochs=2, batch_size=8, seed=3, group_size=3)
    found = est.get_train_summary()
    whole = found["Phases/step_s"]
    assert [step for step, *_ in whole] == [3, 5, 8, 10]
    assert {"Loss", "Phases/compute_s", "Phases/aggregate_s", "Phases/rest_s"} <= found.keys()
    parts = [rows for tag, rows in found.items() if tag.startswith("Phases/") and rows is not whole]
    for number, (_, seconds, _) in enumerate(whole):
        assert sum(rows[number][1] for rows in parts) == pytest.approx(seconds)
    assert est.get_train_summary("Phases/step_s") == whole
    for name in ("phases.svg", "phases.html"):
        est.plot_phases(tmp_path / name)
        drawn = (tmp_path / name).read_text()
        assert drawn.count("<rect") == 4 * len(parts) + len(parts)
        assert "step 8, compute weight: " in drawn


@pytest.mark.slow_cases("bigdl")
@pytest.mark.parametrize("backend", ["bigdl", "spark"])
def test_a_trigger_ends_the_fit(orca_spark, backend):
    est = estimator(backend, metrics=[MSE()])
    options = {"epochs": 5, "batch_size": 8, "seed": 3, "validation_data": arrays()}
    found = est.fit(arrays(), end_trigger=TriggerOr(MaxIteration(7), MinLoss(0.0)), **options)
    assert [entry["batch_count"] for entry in found] == [5, 2]
    for trigger in (MinLoss(1e9), MaxScore(0.0)):
        assert len(est.fit(arrays(), end_trigger=trigger, **options)) == 1


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x, y = arrays()
        return x[index], y[index]


def loader():
    return torch.utils.data.DataLoader(Samples(), batch_size=4, shuffle=True)


@pytest.mark.slow_cases("xshards")
@pytest.mark.parametrize(
    "kind",
    [
        "loader",
        "xshards",
        "parquet",
    ],
)
def test_input_of_any_kind_trains(frame, tmp_path, kind):
    columns = {}
    if kind == "loader":
        data = loader()
    elif kind == "xshards":
        from bigdl.orca.data import XShards

        x, y = arrays()
        data = XShards.partition({"x": x, "y": y}, num_shards=3)
    else:
        frame.write.parquet(str(tmp_path / "rows"))
        data, columns = str(tmp_path / "rows"), COLUMNS
    est = estimator()
    stats = est.fit(data, epochs=2, batch_size=8, seed=3, **columns)
    assert [s["num_samples"] for s in stats] == [ROWS, ROWS]
    assert stats[1]["train_loss"] < stats[0]["train_loss"]


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_inside_an_epoch_as_if_it_had_not_stopped(orca_spark, tmp_path):
    options = {"scheduler_creator": stepped, "model_dir": str(tmp_path)}
    whole, known = fitted(options={**options, "model_dir": None}, compression="int8")
    first = estimator(**options)
    fit = {"batch_size": 8, "seed": 3, "compression": "int8", "group_size": 3}
    first.fit(arrays(), max_steps=7, checkpoint_trigger=SeveralIteration(3), **fit)
    path = sorted(tmp_path.glob("run-*/checkpoint-000001-00000001"))
    assert path, "SeveralIteration(3) cuts the group after step 6"
    again = estimator(**options)
    stats = again.fit(arrays(), epochs=2, resume=str(path[0]), **fit)
    assert same(again, whole)
    assert [s["train_loss"] for s in stats] == pytest.approx([s["train_loss"] for s in known])


@pytest.mark.slow
def test_a_checkpoint_is_cut_anew_for_other_workers(orca_spark, tmp_path):
    options = {"config": {"shuffle": False}}
    whole, _ = fitted(options=options)
    estimator(model_dir=str(tmp_path), **options).fit(arrays(), batch_size=8, seed=3)
    for others in ({"workers_per_node": 1}, {"backend": "spark"}):
        est = estimator(model_dir=str(tmp_path), **options, **others)
        est.fit(arrays(), epochs=2, batch_size=8, resume=Estimator.latest_checkpoint(str(tmp_path)))
        assert largest_difference(weights(est), weights(whole)) < 1e-5


@pytest.mark.slow
def test_windows_see_as_many_rows_and_learn(orca_spark):
    _, stats = fitted(epochs=3, sampling="window")
    assert [s["num_samples"] for s in stats] == [ROWS] * 3
    assert stats[-1]["train_loss"] < stats[0]["train_loss"]


# -- what cannot work -----------------------------------------------------------------------------


class PerStep(Callback):
    def after_train_iter(self, runner):
        pass


def double(config):
    return Net().double()


def adafactor(model, config):
    return torch.optim.Adafactor(model.parameters())


WRONG = {
    "transport": ({}, {"transport": "pigeon"}, "transport should be one of"),
    "compression": ({}, {"compression": "int4"}, "compression should be one of"),
    "sampling": ({}, {"sampling": "some"}, "sampling should be one of"),
    "group_size": ({}, {"group_size": 0}, "group_size"),
    "hooks of steps": ({}, {"callbacks": [PerStep()]}, "PerStep has after_train_iter"),
    "accumulation": ({}, {"accumulate_grad_batches": 2}, "2 times as large"),
    "local steps": ({}, {"local_steps": 2}, "have no local optimizer"),
    "float64": ({"model": double}, {}, "trains float32 parameters"),
    "optimizer": ({"optimizer": adafactor}, {}, "Adafactor cannot be sliced"),
    "windows of a loader": ({}, {"sampling": "window", "data": loader()}, "contiguous rows"),
    "a rule without shares": ({}, {"drop_stragglers": {}}, "drop_stragglers should be a dict"),
    "a share of nobody": (
        {},
        {"drop_stragglers": {"drop_percentage": 0.001, "max_drop_percentage": 0.5}},
        "less than one",
    ),
    "slices by barrier": (
        {},
        {"min_workers": 1, "transport": "barrier"},
        "min_workers=1 needs transport='shuffle'",
    ),
    "slices and residuals": (
        {},
        {"min_workers": 1, "compression": "int8"},
        "is not supported with compression='int8'",
    ),
    "too many slices": ({}, {"min_workers": 3}, "at most the number of workers, 2, got 3"),
    "backend": ({"backend": "spark"}, {"transport": "shuffle"}, "create it with backend='bigdl'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_work_is_refused(orca_spark, case):
    options, fit, message = WRONG[case]
    with pytest.raises(UsageError, match=message):
        estimator(**options).fit(**{"data": arrays(), "batch_size": 8, **fit})


def test_an_error_in_the_model_is_raised_once(orca_spark):
    class Broken(Net):
        def forward(self, x):
            raise ArithmeticError("on purpose")

    with pytest.raises(WorkerError, match="on purpose"):
        estimator(model=lambda config: Broken()).fit(arrays(), batch_size=8)


def test_rows_that_are_no_numbers_are_named(orca_spark):
    frame = orca_spark.createDataFrame([([1.0] * 4, 1.0), (None, 2.0)], "x array<float>, y float")
    with refused("data-null", "'x'"):
        estimator().fit(frame, batch_size=8, **COLUMNS)


# -- losses ---------------------------------------------------------------------------------------


class Killer(Net):
    """Kills the process of rank 1 in its 12th and the following forward passes, `times` times."""

    def __init__(self, folder, times):
        super().__init__()
        self.folder, self.times = folder, times

    def forward(self, x):
        from pyspark import TaskContext

        is_late = TaskContext.get().partitionId() == 1 and self._count("passes", 1) >= 12
        if is_late and self._count("kills", 0) < self.times:
            self._count("kills", 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

    def _count(self, name, more):
        with open(os.path.join(self.folder, name), "a") as file:
            file.write("." * more)
            return file.tell()


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shuffle", "barrier"])
def test_a_job_that_was_lost_is_taken_up_again(orca_spark, tmp_path, transport):
    """Spark gives up after four losses of a task; the fit goes on from the last state."""
    times = 4 if transport == "shuffle" else 1
    undisturbed, _ = fitted(epochs=3)
    model = functools.partial(killing, str(tmp_path), times)
    est, _ = fitted(epochs=3, options={"model": model}, transport=transport, group_size=4)
    assert len((tmp_path / "kills").read_text()) == times
    assert same(est, undisturbed)


def killing(folder, times, config):
    return Killer(folder, times)


@pytest.mark.slow
@pytest.mark.fault
def test_a_worker_that_is_lost_at_the_very_start_is_replaced(orca_spark, tmp_path):
    model = functools.partial(killed_at_the_start, str(tmp_path))
    _, stats = fitted(epochs=1, options={"model": model}, transport="barrier")
    assert (tmp_path / "killed").exists()
    assert [s["num_samples"] for s in stats] == [ROWS]


def killed_at_the_start(folder, config):
    from pyspark import TaskContext

    if TaskContext.get() is not None and not os.path.exists(os.path.join(folder, "killed")):
        with open(os.path.join(folder, "killed"), "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return Net()
