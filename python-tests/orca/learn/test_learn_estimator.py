"""Keywords of both generations, summaries, files and options of the PyTorch Estimator on Spark."""

import sys

import numpy as np
import pytest
import torch
from reference_training import largest_difference, rows_of
from refusals import refused
from torch import nn

from bigdl.common.errors import MissingExtraError
from bigdl.orca.learn import arguments
from bigdl.orca.learn.metrics import MAE, MSE
from bigdl.orca.learn.optimizers import Adam
from bigdl.orca.learn.pytorch import Estimator, TrainingOperator
from bigdl.orca.learn.pytorch.callbacks import (
    MainCallback,
    ModelCheckpoint,
    TensorBoardCallback,
    TqdmCallback,
    WandbLoggerCallback,
)

ROWS = 20
COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


def net(config):
    return Net()


def sgd(model, config):
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1))


def estimator(**options):
    given = {"model": net, "optimizer": sgd, "loss": nn.MSELoss(), "workers_per_node": 2}
    return Estimator.from_torch(**{**given, **options})


@pytest.fixture(scope="module")
def frame(orca_spark):
    """An array `x`, a number `y` and a weight `w`."""
    (shard,) = rows_of([ROWS], dtype="float32")
    rows = [
        (x.tolist(), float(y), float(i % 3))
        for i, (x, y) in enumerate(zip(shard["x"], shard["y"], strict=True))
    ]
    return orca_spark.createDataFrame(rows, "x array<float>, y float, w float").cache()


@pytest.fixture
def forgotten(monkeypatch):
    """Warnings that are given once are given again."""
    monkeypatch.setattr(arguments, "warned_texts", set())


def weights(est):
    return est.get_model().state_dict()


# -- keywords -----------------------------------------------------------------------------------


def test_a_program_of_2_0_runs(frame, tmp_path, forgotten, caplog):
    def creator(optimizer, config):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    est = Estimator.from_torch(
        model=net,
        optimizer=sgd,
        loss=nn.MSELoss(),
        scheduler_creator=creator,
        training_operator_cls=TrainingOperator,
        initialization_hook=lambda: print("hook was called", flush=True),
        config={"lr": 0.1},
        scheduler_step_freq="batch",
        use_tqdm=False,
        workers_per_node=2,
        backend="bigdl",
        sync_stats=True,
    )
    stats = est.fit(frame, epochs=1, batch_size=10, info={"a": 1}, callbacks=[], **COLUMNS)
    assert [s["num_samples"] for s in stats] == [ROWS]
    state = est.get_state_dict()
    assert state["schedulers"][0]["_last_lr"] == [0.025]  # two steps
    found = est.evaluate(frame, info=None, validation_metrics=[MAE()], **COLUMNS)
    assert set(found) == {"num_samples", "val_loss", "MAE"}
    est.save_checkpoint(model_path=f"{tmp_path}/all.ckpt")
    est.save(model_path=f"{tmp_path}/net.pt")
    again = estimator()
    again.load(model_path=f"{tmp_path}/net.pt")
    again.load_checkpoint(model_path=f"{tmp_path}/all.ckpt")
    assert largest_difference(weights(again), weights(est)) == 0
    est.fit(frame, info={"a": 1}, **COLUMNS)
    said = [r.message for r in caplog.records]
    assert sum("fit(info=) has no effect" in text for text in said) == 1


def test_arguments_come_by_position_too(frame):
    named, placed = estimator(), estimator()
    named.fit(frame, epochs=2, max_steps=3, batch_size=10, seed=1, **COLUMNS)
    placed.fit(frame, 2, 3, 10, False, True, ["x"], ["y"], None, None, seed=1)
    assert largest_difference(weights(named), weights(placed)) == 0
    assert placed.evaluate(frame, 10, None, False, True, ["x"], ["y"])["num_samples"] == ROWS


# -- training -----------------------------------------------------------------------------------


def test_clipping_is_set_and_cleared(frame):
    def moved(est):
        before = net({}).state_dict()
        est.fit(frame, batch_size=ROWS, seed=1, **COLUMNS)
        after = weights(est)
        return np.concatenate([(after[k] - before[k]).numpy().ravel() for k in before])

    free, clipped, limited, cleared = (estimator(config={"lr": 1.0}) for _ in range(4))
    clipped.set_constant_gradient_clipping(-0.1, 0.05)
    limited.set_l2_norm_gradient_clipping(0.25)
    cleared.set_l2_norm_gradient_clipping(0.25)
    cleared.clear_gradient_clipping()
    step = moved(free)
    assert np.allclose(moved(clipped), np.clip(step, -0.05, 0.1), atol=1e-6)
    assert np.allclose(moved(limited), step * 0.25 / np.linalg.norm(step), atol=1e-5)
    assert np.array_equal(moved(cleared), step)


def test_weights_of_rows_come_from_a_column(frame):
    est = estimator(metrics=[MSE()])
    (stats,) = est.fit(frame, batch_size=ROWS, weight_col="w", validation_data=frame, **COLUMNS)
    found = est.evaluate(frame, weight_col="w", **COLUMNS)
    assert stats["val_loss"] == pytest.approx(found["val_loss"], rel=1e-6)
    rows = frame.toPandas()
    y, w = rows["y"].to_numpy(), rows["w"].to_numpy()
    x = torch.tensor(np.stack(rows["x"]))
    with torch.no_grad():
        start = (net({})(x)[:, 0].numpy() - y) ** 2
        end = (est.get_model()(x)[:, 0].numpy() - y) ** 2
    assert stats["train_loss"] == pytest.approx((w * start).sum() / w.sum(), rel=1e-5)
    assert found["val_loss"] == pytest.approx((w * end).sum() / w.sum(), rel=1e-5)
    assert found["MSE"] == pytest.approx((w * end).sum() / w.sum(), rel=1e-5)
    assert stats["val_mse"] == pytest.approx(float(found["MSE"]), rel=1e-6)


def test_bf16_and_an_optimizer_of_orca(frame):
    est = estimator(optimizer=Adam(0.1, learningrate_decay=0.1), precision="bf16")
    first, *_, last = est.fit(frame, epochs=6, batch_size=10, **COLUMNS)
    assert last["train_loss"] < first["train_loss"]
    assert weights(est)["layer.weight"].dtype == torch.float32


def test_the_callbacks_of_a_call_stay_as_they_are(frame, tmp_path, capfd):
    callbacks = [TqdmCallback(), MainCallback(), ModelCheckpoint(f"{tmp_path}/{{epoch}}")]
    before = list(callbacks)
    est = estimator()
    est.fit(frame, callbacks=callbacks, **COLUMNS)
    assert callbacks == before
    assert "epoch 1/1" in capfd.readouterr().err
    path = Estimator.latest_checkpoint(str(tmp_path))
    assert path == f"{tmp_path}/last.ckpt"
    other = estimator()
    other.load_checkpoint(path)
    (stats,) = other.fit(frame, **COLUMNS)
    assert stats["epoch"] == 2


# -- prediction ---------------------------------------------------------------------------------


def test_a_main_callback_predicts(frame):
    class Doubles(MainCallback):
        def on_pred_forward(self, runner):
            super().on_pred_forward(runner)
            runner.output = runner.output.numpy() * runner.config["factor"]

    est = estimator(config={"factor": 2})
    plain = est.predict(frame, feature_cols=["x"]).toPandas()["prediction"]
    double = est.predict(frame, feature_cols=["x"], callbacks=[Doubles()]).toPandas()
    assert np.allclose(double["prediction"], 2 * plain, rtol=1e-6)


def test_a_main_callback_may_return_what_it_predicts(frame):
    class Returns(MainCallback):
        def on_pred_forward(self, runner):
            output = runner.model(*runner.batch).numpy()
            return {"twice": 2 * output, "half": output / 2}

    est = estimator()
    plain = est.predict(frame, feature_cols=["x"]).toPandas()["prediction"]
    both = est.predict(
        frame, feature_cols=["x"], output_cols=["twice", "half"], callbacks=[Returns()]
    ).toPandas()
    assert np.allclose(both["twice"], 2 * plain, rtol=1e-6)
    assert np.allclose(both["half"], plain / 2, rtol=1e-6)


class Gives(MainCallback):
    """A prediction in the form that a function makes of the output as an array."""

    def __init__(self, form):
        self.form = form

    def on_pred_forward(self, runner):
        runner.output = self.form(runner.model(*runner.batch).numpy())


@pytest.mark.parametrize(
    "form",
    [
        lambda y: y,
        lambda y: y.tolist(),
        lambda y: {"a": y, "b": y},
        lambda y: {"a": y.tolist(), "b": y},
        lambda y: [y, y],
        lambda y: (y, y.tolist()),
    ],
    ids=["array", "numbers", "dict", "dict of numbers", "list", "tuple"],
)
def test_a_main_callback_gives_arrays_in_any_form(form):
    local = Estimator.from_torch(model=torch.nn.Linear(3, 2), backend="local")
    rows = np.random.default_rng(0).random((5, 3), "float32")
    plain = local.predict(rows)
    given = local.predict(rows, callbacks=[Gives(form)])
    outputs = given.values() if isinstance(given, dict) else given
    for each in [given] if isinstance(given, np.ndarray) else outputs:
        np.testing.assert_allclose(each, plain, rtol=1e-6)
    with refused("model-output", "U1"):
        local.predict(rows, callbacks=[Gives(lambda y: np.array(["a", "b"])[y.argmax(1)])])


# -- summaries ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_summaries_hold_every_step_and_validation(frame, tmp_path, forgotten):
    est = estimator(metrics=[MAE()])
    est.set_tensorboard(str(tmp_path), "app")
    stats = est.fit(frame, epochs=2, batch_size=10, validation_data=frame, **COLUMNS)
    stats += est.fit(frame, batch_size=10, validation_data=frame, **COLUMNS)
    losses = est.get_train_summary("Loss")
    assert [row[0] for row in losses] == [1, 2, 3, 4, 5, 6]
    for epoch, figures in enumerate(stats):
        pair = [row[1] for row in losses[2 * epoch : 2 * epoch + 2]]
        assert np.mean(pair) == pytest.approx(figures["train_loss"], rel=1e-6)
    assert [row[1] for row in est.get_train_summary("LearningRate")] == [0.1] * 6
    assert all(row[1] > 0 for row in est.get_train_summary("Throughput"))
    assert set(est.get_train_summary()) == {"Loss", "LearningRate", "Throughput"}
    for tag, key in (("MAE", "val_mae"), ("Loss", "val_loss")):
        found = est.get_validation_summary(tag)
        assert [row[0] for row in found] == [2, 4, 6]
        assert [row[1] for row in found] == pytest.approx([float(s[key]) for s in stats])
    times = [row[2] for row in losses]
    assert times == sorted(times)


def test_event_files_hold_what_the_summaries_do(frame, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    est = estimator()
    est.set_tensorboard(str(tmp_path), "app")
    for _ in range(2):
        est.fit(frame, batch_size=10, validation_data=frame, **COLUMNS)
    for kind, tag, rows in (
        ("train", "Loss", est.get_train_summary("Loss")),
        ("validation", "loss", est.get_validation_summary("Loss")),
    ):
        # Files of one second have no order, in which steps could fall.
        files = EventAccumulator(f"{tmp_path}/app/{kind}", purge_orphaned_data=False).Reload()
        events = sorted((event.step, event.value) for event in files.Scalars(tag))
        assert events == [(row[0], pytest.approx(row[1], rel=1e-6)) for row in rows]


@pytest.mark.parametrize(
    ("package", "callback"),
    [
        ("torch.utils.tensorboard", TensorBoardCallback()),
        ("wandb", WandbLoggerCallback("project")),
    ],
)
def test_a_package_that_is_missing_is_named(monkeypatch, package, callback):
    monkeypatch.setitem(sys.modules, package, None)
    runner = type("Runner", (), {"rank": 0, "config": {}})
    name = package.rpartition(".")[2]
    with pytest.raises(
        MissingExtraError, match=f"{name} is not installed; run: pip install {name}"
    ):
        callback.before_run(runner)


# -- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_checkpoints_are_kept_and_found_by_version(frame, tmp_path, scheme):
    where = f"{scheme}{tmp_path}"
    if scheme:  # a store of this process alone: what a fit in workers leaves is copied into it
        import fsspec

        local = estimator(model_dir=str(tmp_path), num_to_keep=3)
        local.fit(frame, epochs=4, batch_size=10, **COLUMNS)
        fsspec.filesystem("memory").put(f"{tmp_path}/", f"{tmp_path}/", recursive=True)
        est = local
    else:
        est = estimator(model_dir=where, num_to_keep=3)
        est.fit(frame, epochs=4, batch_size=10, **COLUMNS)
    latest = Estimator.latest_checkpoint(where)
    assert latest.endswith("checkpoint-000004-00000000")
    other, older = estimator(), estimator()
    other.load_orca_checkpoint(where)
    older.load_orca_checkpoint(latest.rpartition("/")[0], version=4, prefix="sgd")
    assert largest_difference(weights(other), weights(est)) == 0
    assert older.get_state_dict()["epoch"] == 2
    with refused("checkpoint-missing", "2", "4", "6"):
        older.load_orca_checkpoint(where, 2)


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_every_form_of_the_state_goes_round(tmp_path, scheme):
    path = f"{scheme}{tmp_path}/state"
    est = estimator()
    with torch.no_grad():
        state = {k: v + 1 for k, v in net({}).state_dict().items()}
    est.load_state_dict({"epoch": 3, "models": [state]}, blocking=False)
    assert est.get_state_dict()["epoch"] == 3
    est.save_checkpoint(path)
    full, plain, module = estimator(), estimator(), estimator(model=None)
    full.load_checkpoint(path)
    est.save(path)
    plain.load(path)
    est.save(path, entire=True)
    module.load(path, trust=True)
    for other in (full, plain, module):
        assert largest_difference(weights(other), state) == 0
    plain.load_state_dict(net({}).state_dict())
    assert largest_difference(weights(plain), net({}).state_dict()) == 0
