"""LightningModules in Orca: their hooks, logs and ``self.trainer``, beside Lightning's own loop."""

import logging
import warnings

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.lightning import (
    LoggedValues,
    WorkerTrainer,
    dropped_hooks,
    merged_values,
    unused_hooks,
)
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.prediction import TorchSnapshot
from bigdl.training.state import dumps

pl = pytest.importorskip("pytorch_lightning")
torchmetrics = pytest.importorskip("torchmetrics")

ROWS, BATCH = 50, 20
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 6)).astype("float32")
Y = (X.sum(1) > 0.5).astype("int64")


class Logs(pl.LightningModule):
    """Logs in every usual way."""

    def __init__(self, lr=0.0):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.net = nn.Linear(6, 2)
        self.acc = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.train_f1 = torchmetrics.F1Score("multiclass", num_classes=2, average="macro")
        self.auc = torchmetrics.AUROC("binary")
        self.by_hand = torchmetrics.MeanMetric()
        of_classes = {"num_classes": 2, "average": "macro"}
        self.several = torchmetrics.MetricCollection(
            [
                torchmetrics.classification.MulticlassRecall(**of_classes),
                torchmetrics.classification.MulticlassPrecision(**of_classes),
            ],
            prefix="m_",
        )
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = functional.cross_entropy(out, y)
        self.log("last", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("positives", y.sum().float(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", x.max(), on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("weighted", out.mean(), on_step=False, on_epoch=True, batch_size=len(x))
        self.train_f1(out, y)
        self.log("f1", self.train_f1, on_step=False, on_epoch=True)
        self.by_hand.update(out[:, 0])
        return {"loss": loss, "rows": len(x)}

    def on_train_epoch_end(self):
        self.log("mean_output", self.by_hand.compute())
        self.by_hand.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = functional.cross_entropy(out, y)
        self.acc(out, y)
        self.auc.update(out[:, 1], y)
        self.log("val_loss", loss)
        self.log("acc", self.acc)
        self.several.update(out, y)
        self.log_dict(self.several)
        self.losses.append(loss.detach() * len(x))

    def on_validation_epoch_end(self):
        total = torch.stack(self.losses).sum()
        self.losses.clear()
        self.log("sum_of_losses", total, reduce_fx="sum")
        self.log("auc", self.auc.compute())
        self.auc.reset()
        self.log("double_acc", 2 * self.trainer.callback_metrics["acc"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def fit(model, workers=1, epochs=1, x=X, y=Y, **options):
    est = Estimator.from_torch(
        model=model, backend="local", workers_per_node=workers, **options.pop("of", {})
    )
    options = {"validation_data": (x, y), "seed": 0, **options}
    return est, est.fit((x, y), epochs=epochs, batch_size=BATCH, **options)


def by_lightning(model, epochs=1, **options):
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            num_sanity_val_steps=0,
            **options,
        )
        trainer.fit(model, loader, loader)
    return trainer


def test_logs_are_those_of_lightning_for_any_number_of_workers():
    expected = {k: float(v) for k, v in by_lightning(Logs()).callback_metrics.items()}
    del expected["last"], expected["both_step"]  # of the last batch, whose rows are others here
    for workers in (1, 2):
        est, (entry,) = fit(Logs(), workers)
        found = {name: entry.get(name, entry.get(f"val_{name.lower()}")) for name in expected}
        assert {k: float(v) for k, v in found.items()} == pytest.approx(expected, abs=1e-5)
        assert {"last", "both_step"} < set(entry)
        evaluated = est.evaluate((X, Y))
        for name in ("acc", "auc", "sum_of_losses", "m_MulticlassRecall"):
            assert float(evaluated[name]) == pytest.approx(expected[name], abs=1e-5)
    model = est.get_model()
    assert model.hparams.lr == 0.0
    assert "log" not in vars(model)


class Hooks(pl.LightningModule):
    """Notes its hooks."""

    def __init__(self):
        super().__init__()
        self.net = None
        self.seen = []
        self.kept = 0.0

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(1)
            self.net = nn.Linear(6, 2)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        self.steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        self.seen.append("lr_scheduler_step")
        scheduler.step()

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.seen.append("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.seen.append("optimizer_step")

    def backward(self, loss):
        self.seen.append("backward")
        (2 * loss).backward()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return 3 * x, y

    def on_save_checkpoint(self, checkpoint):
        checkpoint["kept"] = self.kept

    def on_load_checkpoint(self, checkpoint):
        self.kept = checkpoint["kept"]

    def on_train_end(self):
        self.kept = float(len(self.seen))


# fmt: off
PLAIN = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end", "on_validation_start", "on_validation_epoch_start",
    "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end", "on_train_epoch_end", "on_fit_end",
)
# fmt: on


def noting(name):
    def hook(self, *arguments):
        self.seen.append(name)

    hook.__name__ = name
    return hook


for _name in PLAIN:
    setattr(Hooks, _name, noting(_name))


class Reports(Hooks):
    def teardown(self, stage):
        print("HOOKS", stage, self.trainer.global_rank, *self.seen, flush=True)


def test_hooks_come_in_lightnings_order_and_weights_are_its_own(capfd):
    reference = Hooks()
    by_lightning(reference, epochs=2)
    assert reference.steps == 6
    capfd.readouterr()
    est, _ = fit(Reports(), epochs=2, of={"config": {"shuffle": False}})
    (line,) = [n for n in capfd.readouterr().out.splitlines() if "HOOKS fit" in n]
    seen = line.split()[-len(reference.seen) :]

    def placed(hooks):  # schedules are stepped after on_train_batch_end, or before it
        return [hook for hook in hooks if hook != "lr_scheduler_step"]

    # Lightning makes the step of the batch within that of the optimizer
    in_closure = {"on_before_zero_grad", "on_before_backward", "backward", "on_after_backward"}
    assert [h for h in placed(seen) if h not in in_closure] == [
        h for h in placed(reference.seen) if h not in in_closure
    ]
    assert sorted(seen) == sorted(reference.seen)
    model = est.get_model()
    assert model.kept == len(seen) - 1  # on_fit_end comes after it
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_two_workers_make_the_update_of_one_with_hooks():
    one, two = (
        fit(Hooks(), workers, x=X[:40], y=Y[:40], epochs=2)[0].get_model() for workers in (1, 2)
    )
    # of one batch an epoch both have the same rows
    assert one.kept == two.kept
    (est, _), (both, _) = (
        fit(Hooks(), workers, x=X[:BATCH], y=Y[:BATCH], epochs=2) for workers in (1, 2)
    )
    pairs = zip(est.get_model().parameters(), both.get_model().parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


class Dropped(Logs):
    def train_dataloader(self):
        return []

    def configure_callbacks(self):
        return []

    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_scalar("a", 1.0)
        if batch_idx:
            self.trainer.should_stop = True
        self.log("train_loss", 7.0, on_epoch=True)
        return functional.cross_entropy(self(batch[0]), batch[1])

    def on_train_epoch_end(self):
        pass


def test_what_is_dropped_is_said_once_by_name(caplog):
    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        _, history = fit(Dropped(), epochs=3)
    assert len(history) == 1  # should_stop
    texts = [record.getMessage() for record in caplog.records]
    (hooks,) = [text for text in texts if "not called" in text]
    assert "Dropped has Lightning hooks" in hooks
    assert "configure_callbacks, train_dataloader" in hooks
    assert sum("self.logger" in text for text in texts) == 1
    assert sum("logs 'train_loss'" in text for text in texts) == 1


def test_a_loss_makes_it_a_plain_module_which_is_said():
    assert dropped_hooks(Logs(), has_loss=False) is None
    text = dropped_hooks(Logs(), has_loss=True)
    assert "because loss= was passed: training_step, validation_step, on_" in text
    assert "values logged" in dropped_hooks(Hooks(), has_loss=False, in_driver=True)


class Predicts(Logs):
    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)

    def on_predict_epoch_end(self):
        pass

    def test_step(self, batch, batch_idx):
        pass


def test_what_predict_and_evaluate_drop_is_said_once_by_name(caplog):
    def said():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [text for text in texts if "not called" in text]

    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        est, _ = fit(Predicts())
        assert said() == []
        for _ in range(2):
            est.evaluate((X, Y))
            assert est.predict(X).shape == (ROWS, 2)  # of forward
        of_test, of_predict = said()
    assert of_test.startswith("Predicts has Lightning hooks that are not called: test_step; ev")
    assert "not called: predict_step, on_predict_epoch_end; predict calls forward;" in of_predict
    assert unused_hooks(Logs(), "predict") is unused_hooks(nn.Linear(1, 1), "evaluate") is None


def test_what_prediction_drops_of_a_creators_module_is_said_by_the_task(caplog):
    model = Predicts()
    parts = ModelParts(lambda config: Predicts())
    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        for _ in range(2):
            TorchSnapshot.of(parts, dumps(model.state_dict())).load_on(torch.device("cpu"))
    (record,) = caplog.records
    assert "predict_step, on_predict_epoch_end; predict calls forward" in record.getMessage()


def test_setup_is_told_its_stage():
    class Staged(Logs):
        stages = ()

        def setup(self, stage):
            self.stages = (*self.stages, stage)

    parts = ModelParts(lambda config: Staged())
    assert parts.build(training=True).model.stages == ("fit",)
    assert parts.build(training=False).model.stages == ("validate",)
    assert parts.build_model().stages == ("predict",)


def test_collectives_of_a_module_are_those_of_one_process():
    model = Logs()
    WorkerTrainer().attach(model)
    assert model.all_gather(torch.ones(2)).tolist() == [1.0, 1.0]
    assert model.trainer.strategy.broadcast(3) == 3
    WorkerTrainer(1, 2).attach(model)
    for call in (model.all_gather, model.trainer.strategy.reduce):
        with refused("unsupported"):
            call(torch.ones(2))


def step_of(step, /, **attributes):
    return type(
        "Lit",
        (Logs,),
        {"training_step": step, "on_train_epoch_end": lambda self: None}
        | {
            "validation_step": lambda self, batch, i: None,
            "on_validation_epoch_end": lambda s: None,
        }
        | attributes,
    )


def returning(call):
    def training_step(self, batch, batch_idx):
        call(self)
        return functional.cross_entropy(self(batch[0]), batch[1])

    return training_step


def other_metric(self):
    self.log("a", torchmetrics.MeanMetric())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda self: self.log("a", torch.ones(3)), r"takes one number .* of shape \(3,\)"),
        (lambda self: self.log("a", "b"), "takes one number .* got str"),
        (lambda self: self.log("a", 1.0, reduce_fx=np.median), "reduce_fx 'mean', 'sum'"),
        (lambda self: self.log("a", 1.0, on_step=False, on_epoch=False), "has no effect"),
        (lambda self: self.log("a", self.several), "use self.log_dict"),
        (other_metric, "not an attribute of the LightningModule"),
        (
            lambda self: self.trainer.save_checkpoint("x"),
            "self.trainer.save_checkpoint is not supported",
        ),
    ],
)
def test_what_cannot_be_logged_is_refused(call, message):
    from bigdl.orca.learn.pytorch.forward import BatchColumns
    from bigdl.orca.learn.pytorch.lightning import LightningForward

    model = step_of(returning(call))()
    WorkerTrainer().attach(model)
    forward = LightningForward(model, BatchColumns())
    forward.begin_training()
    batch = [torch.from_numpy(X[:4]), torch.from_numpy(Y[:4])]
    forward.begin_batch(batch, 0, 4)
    with pytest.raises(UsageError, match=message):
        forward.forward(batch, 0)
    assert not hasattr(model.trainer, "save_checkpoint")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"automatic_optimization": False}, "automatic_optimization=False is not supported"),
        ({"on_train_batch_start": lambda self, *_: -1}, "on_train_batch_start .* returned -1"),
        (
            {"configure_optimizers": lambda self: [torch.optim.SGD(self.parameters(), 0.1)] * 2},
            "several optimizers is not supported",
        ),
        ({"training_step": lambda self, dataloader_iter: None}, "takes dataloader_iter"),
        ({"training_step": lambda self, batch: None}, "returned no loss"),
    ],
)
def test_what_orcas_loop_cannot_do_is_refused(attributes, message):
    with pytest.raises((UsageError, WorkerError), match=message):
        fit(step_of(returning(lambda self: None), **attributes)(), validation_data=None)


def test_a_module_finds_the_facts_of_the_fit_under_its_trainer():
    def facts(self):
        trainer = self.trainer
        assert trainer.max_epochs == 2
        assert trainer.max_steps == -1
        assert trainer.num_training_batches == len(trainer.train_dataloader) == 3
        assert trainer.estimated_stepping_batches == 4  # two batches are a step
        assert trainer.accumulate_grad_batches == 2
        assert trainer.gradient_clip_val == 1.0
        assert trainer.world_size == self.trainer.num_devices == 2
        assert trainer.is_global_zero == (self.global_rank == 0)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def step(self):
        assert self.trainer.training
        assert not self.trainer.validating
        assert self.optimizers().param_groups[0]["lr"] == 0.1
        assert self.lr_schedulers() is None
        assert (self.trainer.current_epoch, self.current_epoch) == (self.trainer.current_epoch,) * 2

    model = step_of(returning(step), configure_optimizers=facts)()
    est = Estimator.from_torch(model=model, backend="local", workers_per_node=2)
    est.set_l2_norm_gradient_clipping(1.0)
    est.fit((X, Y), epochs=2, batch_size=BATCH, accumulate_grad_batches=2)


def test_values_of_workers_merge_to_those_of_one():
    everything, logs = LoggedValues(), [LoggedValues(), LoggedValues(), LoggedValues()]
    for step, (value, weight) in enumerate([(1.0, 4), (5.0, 1), (9.0, 2)]):
        for name, how in (("mean", "mean"), ("sum", "sum"), ("min", "min"), ("max", "max")):
            on = (how == "mean", True)
            everything.add(name, value, weight, step, how, on)
            logs[step % 2].add(name, value, weight, step, how, on)
    logs[2].add("mean", float("nan"), 0.0, 9, "mean", (True, True))  # a worker without rows
    merged = merged_values([log.values for log in logs])
    assert merged == merged_values([everything.values])
    assert merged["mean"] == merged["mean_epoch"] == pytest.approx((4 + 5 + 18) / 7)
    assert merged["mean_step"] == 9.0
    assert (merged["sum"], merged["min"], merged["max"]) == (15.0, 1.0, 9.0)


def test_logs_go_on_in_an_epoch_that_is_resumed(tmp_path):
    from bigdl.orca.learn.trigger import SeveralIteration

    expected = fit(Logs(lr=0.1), 2)[1][0]
    of = {"model_dir": str(tmp_path)}
    options = {"checkpoint_trigger": SeveralIteration(1), "of": of, "validation_data": None}

    class Fails(Logs):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert outputs["rows"] == len(batch[1])
            if batch_idx == 1:
                raise ValueError("here")

    with pytest.raises(WorkerError, match="here"):
        fit(Fails(lr=0.1), 2, **options)
    (found,) = fit(Logs(lr=0.1), 2, resume="auto", **{**options, "of": of})[1]
    for name in ("both", "positives", "largest", "f1", "mean_output", "last"):
        assert float(found[name]) == pytest.approx(float(expected[name]), rel=1e-6), name
