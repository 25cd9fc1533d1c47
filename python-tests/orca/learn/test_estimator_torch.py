"""The PyTorch Estimator on a local Spark: what it takes, what it returns, what it refuses."""

import functools
import json
import logging
import pickle
import subprocess
import sys
import warnings

import case_names as naming
import numpy as np
import pytest
import torch
from reference_training import largest_difference, rows_of
from refusals import refused
from sklearn import metrics as sk
from torch import nn

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.metrics import AUC, MAE, MSE, ROC, Accuracy, Precision, Recall
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.pytorch.lightning import configure_optimizer
from bigdl.orca.learn.trigger import SeveralIteration


def net(config=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())


def sgd(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def estimator(model=net, optimizer=sgd, loss=nn.MSELoss(), workers=2, **options):  # noqa: B008
    return Estimator.from_torch(
        model=model, optimizer=optimizer, loss=loss, workers_per_node=workers, **options
    )


COLUMNS = {"feature_cols": ["x"], "label_cols": ["c"]}


@pytest.fixture(scope="module")
def frame(orca_spark):
    """100 rows of an array `x` and a label `c`, 0 or 1, an int; `y` is a number."""
    return frame_of(orca_spark, 100)


def frame_of(spark, rows):
    (shard,) = rows_of([rows], classes=2)
    columns = zip(range(rows), shard["x"].tolist(), shard["c"].tolist(), shard["y"], strict=True)
    data = [(i, x, c, float(y)) for i, x, c, y in columns]
    return spark.createDataFrame(data, "id long, x array<double>, c int, y double").cache()


def weights(est):
    return est.get_model().state_dict()


# -- fit: what it returns -----------------------------------------------------------------------

KEYS = {"epoch", "batch_count", "num_samples", "train_loss", "last_train_loss"}
VALIDATION = {"val_loss", "val_num_samples", "val_accuracy"}


def test_fit_returns_a_dict_per_epoch(frame):
    stats = estimator(metrics=[Accuracy()]).fit(frame, epochs=2, batch_size=10, **COLUMNS)
    assert [set(s) for s in stats] == [KEYS] * 2
    assert [(s["epoch"], s["num_samples"], s["batch_count"]) for s in stats] == [
        (1, 100, 10.0),
        (2, 100, 10.0),
    ]
    assert stats[1]["train_loss"] < stats[0]["train_loss"]
    assert isinstance(stats[0]["train_loss"], float)


def test_validation_adds_figures_of_all_workers(frame):
    est = estimator(metrics=[Accuracy()])
    stats = est.fit(frame, batch_size=10, validation_data=frame, profile=True, **COLUMNS)
    assert set(stats[0]) == KEYS | VALIDATION | {"profile"}
    assert set(stats[0]["profile"]) == {
        "mean_train_epoch_s",
        "mean_fetch_s",
        "mean_fwd_s",
        "mean_bwd_s",
        "mean_exchange_s",
        "mean_validation_s",
        "mean_eval_fwd_s",
    }
    assert all(seconds > 0 for seconds in stats[0]["profile"].values())
    assert stats[0]["val_num_samples"] == 100
    assert json.loads(json.dumps(stats))[0]["val_accuracy"] == stats[0]["val_accuracy"].item()
    after = est.evaluate(frame, batch_size=50, **COLUMNS)
    assert stats[0]["val_loss"] == pytest.approx(after["val_loss"], rel=1e-6)
    assert stats[0]["val_accuracy"] == after["Accuracy"]


def test_the_workers_own_figures(frame):
    (workers,) = estimator(metrics=[Accuracy()]).fit(
        frame, batch_size=8, validation_data=frame, reduce_results=False, **COLUMNS
    )
    assert [set(w) for w in workers] == [KEYS | VALIDATION] * 2
    assert sum(w["num_samples"] for w in workers) == 100
    assert sum(w["val_num_samples"] for w in workers) == 100


def test_max_steps_ends_inside_an_epoch(frame):
    est = estimator()
    stats = est.fit(frame, batch_size=4, max_steps=40, **COLUMNS)
    assert [(s["epoch"], s["num_samples"]) for s in stats] == [(1, 100), (2, 60)]
    (following,) = est.fit(frame, batch_size=50, **COLUMNS)
    assert (following["epoch"], following["num_samples"]) == (3, 100)


def test_drop_last_and_shuffle_come_from_config(frame):
    est = estimator(config={"drop_last": True, "shuffle": False})
    first = est.fit(frame, batch_size=30, seed=1, **COLUMNS)
    assert first[0]["num_samples"] == 90
    again = estimator(config={"drop_last": True, "shuffle": False})
    again.fit(frame, batch_size=30, seed=2, **COLUMNS)
    assert largest_difference(weights(est), weights(again)) == 0
    with refused("data-empty", "drop_last", "100"):
        est.fit(frame, batch_size=101, **COLUMNS)


@pytest.mark.slow
def test_a_seed_makes_runs_equal(frame):
    def no_seed_of_its_own(config):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    runs = []
    for seeds in ([3, None], [3, None], [4, None]):
        est = estimator(no_seed_of_its_own)
        stats = [est.fit(frame, seed=seed, **COLUMNS) for seed in seeds]
        runs.append((stats, weights(est)))
    (first, w1), (again, w2), (_, w3) = runs
    assert first == again
    assert largest_difference(w1, w2) == 0
    assert largest_difference(w1, w3) > 0


def test_a_progress_bar_shows_the_steps(frame, capfd):
    estimator(use_tqdm=True).fit(frame, epochs=2, batch_size=10, **COLUMNS)
    shown = capfd.readouterr().err
    assert "epoch 2/2" in shown
    assert "20/20" in shown
    assert "loss=" in shown


def test_without_a_terminal_a_line_shows_an_epoch(frame, capfd):
    est = estimator(metrics=[MAE()])
    stats = est.fit(frame, epochs=2, batch_size=50, validation_data=frame, **COLUMNS)
    last = capfd.readouterr().err.splitlines()[-1]
    loss, mae = stats[-1]["train_loss"], float(stats[-1]["val_mae"])
    assert last.startswith(f"epoch 2/2: train_loss {loss:.4g}, ")
    assert f", val_mae {mae:.4g}" in last
    est.fit(frame, batch_size=50, **COLUMNS)
    starting, *_, epoch = capfd.readouterr().err.splitlines()
    assert starting.startswith("starting ")
    assert epoch.startswith("epoch 1/1: train_loss ")
    quiet = estimator(log_level=logging.WARNING)
    try:
        quiet.fit(frame, batch_size=50, **COLUMNS)
    finally:
        logging.getLogger("bigdl.orca").setLevel(logging.NOTSET)
    assert "epoch" not in capfd.readouterr().err


# -- fit: rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_workers_is_enough(orca_spark, rows):
    frame = frame_of(orca_spark, rows)
    est = estimator(metrics=["mae"])
    (stats,) = est.fit(frame, batch_size=2, validation_data=frame, **COLUMNS)
    assert stats["num_samples"] == stats["val_num_samples"] == rows
    assert est.evaluate(frame, **COLUMNS)["num_samples"] == rows


@pytest.mark.slow
def test_a_table_without_rows(frame):
    est = estimator(metrics=[Accuracy(), MSE()])
    for nothing in (frame.limit(0), frame.filter("id < 0")):
        with pytest.raises(UsageError, match=r"^The training data has no rows$"):
            est.fit(nothing, **COLUMNS)
        found = est.evaluate(nothing, **COLUMNS)
        assert found["num_samples"] == 0
        assert all(np.isnan(float(found[k])) for k in ("val_loss", "Accuracy", "MSE"))
    with pytest.raises(UsageError, match=r"^The validation data has no rows$"):
        est.fit(frame, validation_data=frame.limit(0), **COLUMNS)


def test_several_inputs_and_targets(frame):
    class Two(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x, y):
            return self.a(x)[:, 0] * y, torch.sigmoid(self.b(x))[:, 0]

    def loss(a, b, y, c):
        return nn.functional.mse_loss(a, y) + nn.functional.binary_cross_entropy(b, c.float())

    columns = {"feature_cols": ["x", "y"], "label_cols": ["y", "c"]}
    est = estimator(Two, loss=lambda config: loss)
    stats = est.fit(frame, epochs=3, **columns)
    assert stats[2]["train_loss"] < stats[0]["train_loss"]
    assert est.evaluate(frame, **columns)["val_loss"] < stats[0]["train_loss"]


# -- evaluate -----------------------------------------------------------------------------------

METRICS = [Accuracy(), Precision(), Recall(), AUC(), MSE(), MAE()]


@pytest.fixture(scope="module")
def scored(orca_spark, frame):
    """What scikit-learn says of the collected predictions of an untrained model."""
    rows = estimator().predict(frame, feature_cols=["x"]).select("c", "prediction").collect()
    truth, score = np.array([r.c for r in rows]), np.array([r.prediction for r in rows])
    guess = (score >= 0.5).astype(int)
    return {
        "Accuracy": sk.accuracy_score(truth, guess),
        "Precision": sk.precision_score(truth, guess),
        "Recall": sk.recall_score(truth, guess),
        "AUC": sk.roc_auc_score(truth, score),
        "MSE": sk.mean_squared_error(truth, score),
        "MAE": sk.mean_absolute_error(truth, score),
        "val_loss": sk.mean_squared_error(truth, score),
        "num_samples": 100,
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_evaluate_does_not_depend_on_the_workers(frame, scored, workers):
    est = estimator(workers=workers, metrics=METRICS)
    found = est.evaluate(frame, batch_size=7, **COLUMNS)
    assert {k: float(v) for k, v in found.items()} == pytest.approx(scored, rel=1e-6)
    assert isinstance(found["val_loss"], float)
    assert isinstance(found["AUC"], float)


def test_evaluate_gives_the_workers_own_figures_and_times(frame):
    est = estimator(metrics=["mae", ROC()])
    found = est.evaluate(frame, profile=True, **COLUMNS)
    assert set(found["profile"]) == {"mean_validation_s", "mean_eval_fwd_s"}
    assert [len(curve) for curve in found["ROC"]] == [101, 101, 101]
    workers = est.evaluate(frame, reduce_results=False, profile=True, **COLUMNS)
    assert all(w["profile"]["mean_validation_s"] > 0 for w in workers)
    assert sum(w["num_samples"] for w in workers) == 100
    mean = sum(w["MAE"] * w["num_samples"] for w in workers) / 100
    assert float(mean) == pytest.approx(float(found["MAE"]), rel=1e-6)


def test_num_steps_limits_the_batches_of_each_worker(frame):
    found = estimator().evaluate(frame, batch_size=10, num_steps=3, **COLUMNS)
    assert found["num_samples"] == 30


def test_an_estimator_that_was_never_fitted_has_one_model(frame):
    def random(config):
        return nn.Linear(4, 1)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    est = estimator(random)
    model = est.get_model()
    assert torch.equal(torch.get_rng_state(), before)
    assert largest_difference(model.state_dict(), weights(est)) == 0
    found = est.evaluate(frame, **COLUMNS)
    rows = frame.select("x", "c").collect()
    x = torch.tensor([r.x for r in rows])
    truth = torch.tensor([[float(r.c)] for r in rows])
    assert found["val_loss"] == pytest.approx(nn.MSELoss()(model(x), truth).item(), rel=1e-5)
    predicted = est.predict(frame, feature_cols=["x"]).select("prediction").toPandas()
    assert np.allclose(predicted["prediction"], model(x)[:, 0].detach(), atol=1e-6)
    est.fit(frame, max_steps=1, batch_size=100, **COLUMNS)
    assert largest_difference(model.state_dict(), weights(est)) < 1  # one small step from there


# -- callbacks ----------------------------------------------------------------------------------


class Notes(Callback):
    """Writes down which hook is called when, in a file per worker."""

    def __init__(self, folder):
        self.folder = folder

    def note(self, runner, text):
        with open(self.folder / f"{runner.rank}", "a") as file:
            file.write(f"{text}\n")

    def read(self, rank):
        return (self.folder / f"{rank}").read_text().split("\n")[:-1]


for _hook in [
    f"{when}_{what}"
    for what in ("run", "train_epoch", "train_iter", "val_epoch", "val_iter")
    for when in ("before", "after")
]:
    setattr(
        Notes, _hook, lambda self, runner, hook=_hook: self.note(runner, f"{hook} {runner.epochs}")
    )


def test_hooks_are_called_in_order_on_every_worker(frame, tmp_path):
    notes = Notes(tmp_path)
    callbacks = [notes]
    est = estimator()
    est.fit(frame, epochs=2, batch_size=50, validation_data=frame, callbacks=callbacks, **COLUMNS)
    expected = ["before_run 0"]
    for epoch in (0, 1):
        hooks = ["before_train_epoch", *["before_train_iter", "after_train_iter"] * 2]
        hooks += ["before_val_epoch", *["before_val_iter", "after_val_iter"] * 2]
        hooks += ["after_val_epoch", "after_train_epoch"]
        expected += [f"{hook} {epoch}" for hook in hooks]
    expected += ["after_run 2"]
    assert notes.read(0) == notes.read(1) == expected
    assert callbacks == [notes]
    (tmp_path / "0").unlink()
    est.evaluate(frame, batch_size=100, callbacks=notes, **COLUMNS)
    hooks = ["before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch"]
    assert notes.read(0) == [f"{hook} 0" for hook in hooks]


class Looks(Notes):
    def before_run(self, runner):
        assert (runner.size, runner.num_epochs, runner.global_step) == (2, 1, 0)
        assert runner.config == {"key": "value"}
        assert runner.optimizer.param_groups[0]["params"][0] is runner.model[0].weight
        self.seen = 0

    def before_train_iter(self, runner):
        assert runner.output is runner.loss is None
        assert runner.batch_idx == runner.global_step

    def after_train_iter(self, runner):
        x, c = runner.batch
        self.seen += len(x)
        assert runner.output.shape == (len(x), 1)
        assert runner.target is c
        assert runner.loss.item() > 0
        self.note(runner, f"{runner.global_step} {self.every_n_iter(runner, 2)}")

    def after_train_epoch(self, runner):
        assert self.every_n_epoch(runner, 1)
        assert not self.every_n_epoch(runner, 2)
        self.note(runner, f"{self.seen} of {runner.epoch_stats['num_samples']}")


# the hooks of Notes that this one does not have
for _hook in ("before_train_epoch", "after_run"):
    setattr(Looks, _hook, lambda self, runner: None)


def test_the_runner_shows_the_training(frame, tmp_path):
    looks = Looks(tmp_path)
    estimator(config={"key": "value"}).fit(frame, batch_size=40, callbacks=[looks], **COLUMNS)
    assert looks.read(0) == looks.read(1) == ["1 False", "2 True", "3 False", "50 of 100"]
    assert not hasattr(looks, "seen")  # it is the workers' own copies that change


class StopsAt(Callback):
    def __init__(self, hook, rank):
        self.rank = rank
        setattr(self, hook, self.stop)

    def stop(self, runner):
        runner.stop = runner.rank == self.rank


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("hook", "samples"),
    [("before_run", []), ("before_train_epoch", []), ("after_train_iter", [10]),
     ("after_train_epoch", [100])],
)  # fmt: skip
def test_any_worker_can_stop(frame, hook, samples, rank):
    stats = estimator().fit(
        frame, epochs=3, batch_size=10, callbacks=[StopsAt(hook, rank)], **COLUMNS
    )
    assert [s["num_samples"] for s in stats] == samples


@pytest.mark.parametrize("wrong", [Callback, [print], "callback"])
def test_what_is_no_callback_is_refused(frame, wrong):
    with refused("argument-type"):
        estimator().fit(frame, callbacks=wrong, **COLUMNS)


def test_an_error_in_a_callback_is_the_workers(frame):
    class Fails(Callback):
        def after_epoch(self, runner):
            raise LookupError("nothing here")

    with pytest.raises(WorkerError, match=r"LookupError in worker \d:\n(.|\n)*nothing here"):
        estimator().fit(frame, callbacks=[Fails()], **COLUMNS)


# -- what a model can be ------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, config["width"]), nn.Linear(config["width"], 1))

    def forward(self, x):
        return self.layers(x)


class Makes:
    def __call__(self, *args):
        return sgd(args[0]) if isinstance(args[0], nn.Module) else Net(args[0])


def net_of(width, config):
    return Net({"width": width})


def sgd_of(rate, model, config):
    return torch.optim.SGD(model.parameters(), lr=rate)


def creators():
    class Local(Net):
        pass

    yield "function", lambda: (lambda config: Net(config), sgd, nn.MSELoss())
    yield "partial", lambda: (functools.partial(net_of, 3), functools.partial(sgd_of, 0.1), mse)
    yield "callable", lambda: (Makes(), Makes(), lambda config: nn.MSELoss())
    yield "class", lambda: (Net, sgd, nn.functional.mse_loss)
    yield "local class", lambda: (Local, sgd, lambda config: nn.functional.mse_loss)
    yield "instance", lambda: (Local({"width": 3}), sgd, nn.MSELoss())
    yield "two instances", lambda: (m := Local({"width": 3}), sgd(m), nn.MSELoss())


def mse(output, target):
    return ((output - target) ** 2).mean()


@pytest.fixture(scope="module")
def expected(orca_spark, frame):
    est = estimator(Net, config={"width": 3})
    est.fit(frame, epochs=2, seed=0, feature_cols="x", label_cols="y")
    return weights(est)


@pytest.mark.parametrize("make", [m for _, m in creators()], ids=[n for n, _ in creators()])
def test_models_optimizers_and_losses_come_in_many_forms(frame, expected, make):
    model, optimizer, loss = make()
    is_instance = isinstance(model, nn.Module)
    before = pickle.dumps(model.state_dict()) if is_instance else None
    est = estimator(model, optimizer, loss, config={"width": 3})
    est.fit(frame, epochs=2, seed=0, feature_cols="x", label_cols="y")
    assert largest_difference(weights(est), expected) < 1e-6
    if is_instance:
        assert pickle.dumps(model.state_dict()) == before
        assert model.training
        assert est.get_model() is not model


def test_an_optimizer_instance_keeps_its_state_from_fit_to_fit(frame):
    model = Net({"width": 3})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    once, twice = (estimator(model, optimizer) for _ in range(2))
    once.fit(frame, epochs=2, seed=0, **COLUMNS)
    for _ in range(2):
        twice.fit(frame, seed=0, **COLUMNS)
    assert largest_difference(weights(once), weights(twice)) == 0
    assert not optimizer.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "spork"}, ("name-unknown", "backend='spork'")),
        ({"config": {"batch_size": 3}}, ("argument-conflict", "batch_size")),
        ({"config": ["lr"]}, ("argument-type",)),
        ({"model": 3}, ("model-type",)),
        ({"loss": nn.MSELoss}, ("argument-type", "loss=MSELoss")),
        ({"loss": "mse"}, ("argument-type",)),
        ({"optimizer": torch.optim.SGD}, ("argument-type", "optimizer=lambda")),
        ({"optimizer": "sgd"}, ("argument-type",)),
        ({"optimizer": sgd(nn.Linear(1, 1))}, ("argument-conflict",)),
        (
            {"model": nn.Linear(4, 1), "optimizer": sgd(nn.Linear(4, 1))},
            ("argument-conflict",),
        ),
        ({"scheduler_creator": 0.1}, ("argument-type", "scheduler_creator")),
        ({"metrics": ["acuracy"]}, ("name-unknown", "'acuracy'")),
        ({"metrics": Accuracy}, ("argument-type",)),
        ({"workers": 0}, ("argument-value", "workers_per_node", "0")),
    ],
    ids=naming.case,
)
def test_what_cannot_work_is_refused_at_once(options, message):
    with refused(*message) as caught:
        estimator(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": lambda config: "a model"}, "model creator must return an nn.Module.* str"),
        ({"optimizer": lambda model, config: 0.1}, "must return a torch optimizer.* float"),
        ({"optimizer": None}, "fit needs an optimizer"),
        (
            {"optimizer": lambda model, config: torch.optim.LBFGS(model.parameters())},
            "LBFGS calls the model several times",
        ),
        ({"loss": None}, "fit needs a loss"),
        ({"loss": lambda config: None}, "loss creator must return .* got None"),
        ({"loss": nn.MSELoss(reduction="none")}, "reduction='none'"),
    ],
    ids=naming.case,
)
def test_what_a_worker_finds_wrong_is_refused_in_a_sentence(frame, parts, message):
    with pytest.raises(UsageError, match=message) as caught:
        estimator(**parts).fit(frame, **COLUMNS)
    assert "\n" not in str(caught.value)


def test_a_module_with_an_optimizer_and_no_loss_is_refused_at_once():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused("argument-missing", "from_torch"):
        Estimator.from_torch(model=model, optimizer=optimizer, loss=None)


@pytest.mark.parametrize("loss", [None, nn.MSELoss()])
def test_a_module_without_an_optimizer_is_refused_before_a_worker_starts(loss):
    only_predicts = Estimator.from_torch(model=nn.Linear(4, 1), loss=loss)
    with refused("argument-missing"):
        only_predicts.fit("/no/such/folder", **COLUMNS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs should be a positive integer, got 0"),
        ({"max_steps": -1}, "max_steps should be a positive integer, got -1"),
        ({"batch_size": 2.5}, "batch_size should be a positive integer, got 2.5"),
        ({"seed": -1}, "seed should be an integer of at least 0, got -1"),
        ({"label_cols": None}, "label_cols is required"),
        ({"feature_cols": None}, "feature_cols is required"),
        ({"feature_cols": ["z"]}, "no column 'z'"),
        ({"checkpoint_trigger": "sometimes"}, "a trigger is expected"),
        ({"validation_data": [1, 2]}, "validation_data should have the same type"),
        ({"max_failures": -1}, "max_failures should be"),
        ({"data": 3}, "data must be a Spark DataFrame, .*; got builtins.int"),
    ],
    ids=naming.case,
)
def test_fit_refuses_wrong_arguments(frame, options, message):
    with pytest.raises(UsageError, match=message):
        estimator().fit(**{"data": frame, **COLUMNS, **options})


def test_a_creator_that_cannot_be_shipped_is_refused(frame):
    lock = __import__("threading").Lock()
    with refused("model-copy"):
        estimator(lambda config: (lock, net())[1]).fit(frame, **COLUMNS)


def test_an_error_of_the_model_comes_with_its_traceback(frame):
    with pytest.raises(WorkerError, match=r"mat1 and mat2 shapes cannot be multiplied") as caught:
        estimator(lambda config: nn.Linear(7, 1)).fit(frame, **COLUMNS)
    assert caught.value.kind == "RuntimeError"


# -- LightningModules ---------------------------------------------------------------------------


def lightning_module():
    import pytorch_lightning as pl

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.mse_loss(self(x)[:, 0], y)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self.log("train_thing", loss, prog_bar=True)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            error = (self(x)[:, 0] - y).abs().mean()
            self.log("val_error", error)
            self.log_dict({"double": 2 * error})
            return {"loss": nn.functional.mse_loss(self(x)[:, 0], y)}

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    return Lit


LIT = {"feature_cols": ["x"], "label_cols": ["y"]}


@pytest.mark.slow
def test_a_lightning_module_brings_its_own_loss_and_optimizer(frame):
    pytest.importorskip("pytorch_lightning")
    lit = lightning_module()
    plain = estimator(
        lambda config: (torch.manual_seed(1), nn.Linear(4, 1))[1],
        scheduler_creator=lambda o, config: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        metrics=["mae"],
    )
    expected = plain.fit(frame, epochs=2, seed=0, validation_data=frame, **LIT)
    module = lit()
    for model in (module, lambda config: lit()):
        est = estimator(model, None, None, metrics=["mae"])
        stats = est.fit(frame, epochs=2, seed=0, validation_data=frame, **LIT)
        assert [s["train_loss"] for s in stats] == pytest.approx(
            [s["train_loss"] for s in expected]
        )
        assert stats[1]["val_loss"] == pytest.approx(expected[1]["val_loss"])
        assert stats[1]["val_mae"] == pytest.approx(expected[1]["val_mae"])
        assert stats[1]["val_error"] == pytest.approx(expected[1]["val_mae"])
        assert stats[1]["val_double"] == pytest.approx(2 * stats[1]["val_error"])
        assert "val_train_thing" not in list(stats[1])
        found = list(weights(est).values()), list(weights(plain).values())
        assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))
    found = est.evaluate(frame, **LIT)
    assert set(found) == {"num_samples", "val_loss", "val_error", "double", "MAE"}
    predicted = est.predict(frame, feature_cols=["x"]).select("prediction").toPandas()
    rows = torch.tensor([r.x for r in frame.select("x").collect()])
    with torch.no_grad():
        assert np.allclose(predicted["prediction"], est.get_model()(rows)[:, 0], atol=1e-6)
    assert not hasattr(module, "_values")
    assert "log" not in vars(module)


def returns(make):
    class Module:
        def configure_optimizers(self):
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
            return make(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))

    return configure_optimizer(Module())


@pytest.mark.parametrize(
    ("make", "scheduler", "monitor", "frequency"),
    [
        (lambda o, s: o, False, None, 1),
        (lambda o, s: [o], False, None, 1),
        (lambda o, s: (o,), False, None, 1),
        (lambda o, s: ([o], []), False, None, 1),
        (lambda o, s: ([o], [s]), True, None, 1),
        (lambda o, s: [[o], [{"scheduler": s, "frequency": 2}]], True, None, 2),
        (lambda o, s: {"optimizer": o}, False, None, 1),
        (lambda o, s: {"optimizer": o, "lr_scheduler": s}, True, None, 1),
        (lambda o, s: {"optimizer": o, "lr_scheduler": s, "monitor": "a"}, True, "a", 1),
        (
            lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "monitor": "b"}},
            True,
            "b",
            1,
        ),
        (lambda o, s: [{"optimizer": o, "lr_scheduler": s}], True, None, 1),
    ],
)
def test_every_form_of_configure_optimizers(make, scheduler, monitor, frequency):
    found = returns(make)
    assert isinstance(found[0], torch.optim.SGD)
    assert (found[1] is not None, *found[2:4]) == (scheduler, monitor, frequency)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o, s: [o, o], ("optimizer-unsupported",)),
        (lambda o, s: ([o], [s, s]), ("optimizer-unsupported",)),
        (lambda o, s: None, ("optimizer-unsupported",)),
        (
            lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "day"}},
            ("argument-value", "'epoch'", "'step'", "'day'"),
        ),
    ],
)
def test_what_configure_optimizers_must_not_return(make, message):
    with refused(*message):
        returns(make)


@pytest.mark.slow
def test_neither_lightning_nor_the_parameter_layer_is_imported():
    program = (
        "import sys, torch\n"
        "from bigdl.orca.learn.pytorch import Estimator\n"
        "est = Estimator.from_torch(model=torch.nn.Linear(1, 1), loss=torch.nn.MSELoss())\n"
        "from bigdl.orca.learn.prediction import predictor\n"
        "from bigdl.orca.learn.pytorch import loop, prediction\n"
        "names = [m for m in sys.modules if 'lightning' in m and not m.startswith('bigdl.')]\n"
        "own = 'bigdl.orca.parameter_layer'\n"
        "light = own, own + '.fit', own + '.fit.metrics'\n"
        "print(names, [m for m in sys.modules if 'parameter_layer' in m and m not in light])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[] []\n", done.stderr


# -- model I/O ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(orca_spark, frame):
    est = estimator(Net, adam, config={"width": 3}, scheduler_creator=step_lr)
    est.fit(frame, epochs=2, seed=0, **COLUMNS)
    return est


def adam(model, config=None):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def step_lr(optimizer, config=None):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def fresh(**options):
    return estimator(Net, adam, config={"width": 3}, scheduler_creator=step_lr, **options)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_saved_weights_are_loaded(fitted, tmp_path, scheme):
    path = f"{scheme}{tmp_path}/a/net.pt"
    assert fitted.save(path) == path
    other = fresh()
    other.load(path)
    assert largest_difference(weights(other), weights(fitted)) == 0
    if scheme != "memory://":
        state = torch.load(tmp_path / "a/net.pt", weights_only=True)
        assert largest_difference(state, weights(fitted)) == 0


def test_an_entire_module_needs_trust(fitted, frame, tmp_path):
    path = fitted.save(str(tmp_path / "net.pt"), entire=True)
    empty = Estimator.from_torch(optimizer=adam, loss=nn.MSELoss())
    with refused("not-fitted", "model_creator"):
        empty.fit(frame, **COLUMNS)
    with refused("file-untrusted", "trust=True"):
        empty.load(path)
    empty.load(path, trust=True)
    assert largest_difference(weights(empty), weights(fitted)) == 0
    (stats,) = empty.fit(frame, **COLUMNS)
    assert stats["epoch"] == 1
    empty.load(empty.save(path, entire=True))  # its own


def test_an_entire_module_has_no_use_for_the_optimizer_of_another(fitted, frame, tmp_path):
    path = fitted.save(str(tmp_path / "net.pt"), entire=True)
    model = nn.Linear(4, 1)
    est = estimator(model, sgd(model))
    est.load(path, trust=True)
    with refused("argument-conflict"):
        est.fit(frame, **COLUMNS)


def test_a_full_state_goes_on_where_it_was(fitted, frame, tmp_path):
    state = fitted.get_state_dict()
    assert set(state) == {"epoch", "models", "optimizers", "schedulers"}
    assert state["epoch"] == 2
    path = str(tmp_path / "checkpoint-2.pt")  # a file, whatever its name
    fitted.save_checkpoint(path)
    other, whole = fresh(), fresh()
    other.load_checkpoint(path)
    (stats,) = other.fit(frame, seed=0, **COLUMNS)
    assert stats["epoch"] == 3
    whole.fit(frame, epochs=3, seed=0, **COLUMNS)
    assert largest_difference(weights(other), weights(whole)) == 0


def test_get_model_gives_a_copy(fitted):
    model = fitted.get_model()
    with torch.no_grad():
        model.layers[0].weight.zero_()
    assert weights(fitted)["layers.0.weight"].abs().max() > 0


def test_files_that_cannot_be_loaded(fitted, tmp_path):
    garbage, cut, number, foreign = (tmp_path / name for name in "abcd")
    garbage.write_text("no weights")
    fitted.save(str(cut))
    cut.write_bytes(cut.read_bytes()[:-200])
    torch.save(3, number)
    torch.save(nn.Linear(2, 2).state_dict(), foreign)
    for path, message in [
        (tmp_path / "missing", "cannot be read"),
        (garbage, "is not a file that torch can load"),
        (cut, "is not a file that torch can load"),
        (number, "holds a int; expected a state dict"),
        (foreign, "The weights in .* do not fit the model: .*Missing key"),
        (tmp_path, "cannot be read"),
    ]:
        with pytest.raises(UsageError, match=message) as caught:
            fresh().load(str(path))
        assert "\n" not in str(caught.value)
    with refused("path-unusable"):
        fitted.save(str(garbage / "below.pt"))


def test_a_file_that_cannot_be_loaded_changes_nothing(fitted, tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "foreign")
    before = weights(fitted)
    with pytest.raises(UsageError):
        fitted.load(str(tmp_path / "foreign"))
    assert largest_difference(weights(fitted), before) == 0


def test_latest_checkpoint_says_where_there_is_none(tmp_path):
    with pytest.raises(UsageError, match=rf"Latest checkpoint at {tmp_path} not found\."):
        Estimator.latest_checkpoint(str(tmp_path))


def test_model_dir_holds_the_newest_two(frame, tmp_path):
    est = fresh(model_dir=str(tmp_path))
    est.fit(frame, epochs=2, batch_size=50, checkpoint_trigger=SeveralIteration(1), **COLUMNS)
    (run,) = tmp_path.iterdir()
    names = sorted(p.name for p in run.glob("checkpoint-*"))
    assert names == ["checkpoint-000001-00000001", "checkpoint-000002-00000000"]
    assert Estimator.latest_checkpoint(str(tmp_path)) == str(run / names[1])


def test_an_estimator_works_on_after_shutdown(fitted, frame):
    before = weights(fitted)
    fitted.shutdown()
    assert largest_difference(weights(fitted), before) == 0
    fitted.fit(frame, **COLUMNS)
