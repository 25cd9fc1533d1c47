"""Clipping, accumulation, weights, schedules and steps of the user's own: N workers equal one."""

import functools
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_workers import CrewJob, shared_crew
from reference_training import largest_difference, rows_of, union_batches
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.orca.learn import optimizers as orca
from bigdl.orca.learn.optimizers import schedule
from bigdl.orca.learn.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    MainCallback,
    MaxstepsCallback,
    ModelCheckpoint,
    TensorBoardCallback,
)
from bigdl.orca.learn.pytorch.evaluation import TorchEvaluateProgram, TorchEvaluationSettings
from bigdl.orca.learn.pytorch.loop import Clipping, FitProgram, FitSettings
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.shards.batches import BatchPlan, permutation
from bigdl.training.fit import TrainingSession
from bigdl.training.position import StoppingCriterion
from bigdl.training.state import dumps, loads

SIZES = [7, 0, 4]
SEED = 5


@pytest.fixture(scope="module")
def crew():
    return shared_crew(3)


def shards_of(sizes=SIZES):
    """As :func:`rows_of`, with a weight `w` of every row, some of them 0."""
    shards = rows_of(sizes)
    for seed, shard in enumerate(shards):
        shard["w"] = np.random.default_rng(seed).integers(0, 4, len(shard["x"])).astype("float64")
    return shards


def net(config=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def classifier(config=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def squared(model, batch):
    return nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])


class Run:
    """The driver's side of fits on a crew."""

    def __init__(
        self, crew, model_dir=None, sizes=SIZES, model=net, optimizer=sgd, loss=None, **parts
    ):
        self.training = TrainingSession(model_dir and str(model_dir), TorchDistributedSync)
        self.parts = ModelParts(model, optimizer, loss or nn.MSELoss(), **parts)
        self._crew, self.shards = crew, shards_of(sizes)

    def fit(
        self,
        epochs=None,
        *,
        steps=None,
        resume=None,
        labels=("y",),
        validate=False,
        batch_size=4,
        **settings,
    ):
        feeds = [{"data": s, **({"validation": s} if validate else {})} for s in self.shards]
        stop_at = StoppingCriterion(steps=steps) if steps else StoppingCriterion(epochs=epochs or 2)
        return self.training.fit(
            SimpleNamespace(
                open=lambda program, feed: CrewJob(self._crew, feeds, program),
                num_workers=len(feeds),
            ),
            None,
            lambda settings: FitProgram(self.parts, settings, TorchDistributedSync),
            FitSettings(
                stop_at, batch_size, SEED, feature_cols=["x"], label_cols=list(labels), **settings
            ),
            seed=SEED,
            resume=resume,
            policy=FailurePolicy(0),
            progress="none",
        )

    @property
    def weights(self):
        return loads(self.training.snapshot.files["model.pt"])


def alone(
    sizes=SIZES,
    make_model=net,
    make_optimizer=sgd,
    step_loss=squared,
    *,
    batch_size=4,
    epochs=2,
    clip=lambda parameters: None,
    accumulate=1,
    rate=None,
):
    """The weights after a plain loop over the same batches; `rate(n)` is the rate of update n."""
    model = make_model()
    optimizer = make_optimizer(model)
    updates = 0
    for epoch in range(epochs):
        batches = list(union_batches(shards_of(sizes), batch_size, SEED, epoch))
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            if rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = rate(updates)
            optimizer.zero_grad()
            rows = sum(len(b["x"]) for b in window)
            sum(step_loss(model, b) * len(b["x"]) / rows for b in window).backward()
            clip(list(model.parameters()))
            optimizer.step()
            updates += 1
    return model.state_dict()


def near(a, b, tolerance=1e-12):
    assert largest_difference(a, b) <= tolerance


# -- gradients ----------------------------------------------------------------------------------

CLIPS = {
    "constant": (
        Clipping(-0.01, 0.02),
        lambda ps: [p.grad.clamp_(-0.01, 0.02) for p in ps],
    ),
    "norm": (Clipping(norm=0.05), lambda ps: nn.utils.clip_grad_norm_(ps, 0.05)),
    "a norm that is never reached": (Clipping(norm=1e9), lambda ps: None),
}


@pytest.mark.slow_cases("[11]-a norm that is never reached", "[11]-norm", "[7, 0, 4]-constant")
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("sizes", [[11], SIZES], ids=str)
def test_the_gradient_of_the_whole_batch_is_clipped(crew, sizes, clip):
    clipping, same = CLIPS[clip]
    run = Run(crew, sizes=sizes)
    run.fit(clipping=clipping)
    near(run.weights, alone(sizes, clip=same))


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("sizes", [[11], SIZES], ids=str)
def test_batches_that_are_accumulated_make_one_update(crew, sizes, accumulate):
    run = Run(crew, sizes=sizes)
    figures = run.fit(accumulate=accumulate, clipping=Clipping(norm=0.2))
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.2)
    near(run.weights, alone(sizes, accumulate=accumulate, clip=clip))
    assert [f["global_step"] for f in figures] == [-(-3 // accumulate), 2 * -(-3 // accumulate)]
    assert [f["num_samples"] for f in figures] == [11, 11]


def test_accumulation_minds_class_weights(crew):
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double())
    run = Run(crew, model=classifier, loss=loss)
    run.fit(labels=["c"], accumulate=3)

    whole = alone(
        make_model=classifier,
        step_loss=lambda model, b: loss(model(b["x"]), b["c"].long()),
        batch_size=12,
    )
    one = Run(crew, model=classifier, loss=loss)
    one.fit(labels=["c"], batch_size=12)
    near(one.weights, whole)
    near(run.weights, whole)  # one update per epoch, of all rows in another order


def test_a_run_that_accumulates_can_be_resumed(crew, tmp_path):
    whole = Run(crew)
    whole.fit(4, accumulate=2)
    Run(crew, tmp_path).fit(4, steps=3, accumulate=2, checkpoint_trigger=SeveralIteration(1))
    again = Run(crew, tmp_path)
    again.fit(4, resume="auto", accumulate=2, checkpoint_trigger=SeveralIteration(1))
    assert largest_difference(again.weights, whole.weights) == 0


def test_steps_are_updates_when_batches_are_accumulated(crew):
    class Looks(Callback):
        def after_train_epoch(self, runner):
            runner.epoch_stats["num_epochs"] = runner.num_epochs

    run = Run(crew)  # three batches, so two updates per epoch
    figures = run.fit(steps=5, accumulate=2, callbacks=[Looks()])
    assert [f["global_step"] for f in figures] == [2, 4, 5]
    assert [f["num_epochs"] for f in figures] == [3, 3, 3]


# -- steps of workers by themselves --------------------------------------------------------------


def apart(sizes, local_steps, *, batch_size=4, epochs=2, make_optimizer=sgd):
    """The weights of local SGD, by a model for each worker."""
    shards = shards_of(sizes)
    plan = BatchPlan(sizes, batch_size, False)
    models = [net() for _ in sizes]
    optimizers = [make_optimizer(model) for model in models]
    seen = np.zeros(len(sizes))

    def mean_of(tensors):
        return sum(share * tensor for share, tensor in zip(seen / seen.sum(), tensors, strict=True))

    def take_mean():
        for replicas in zip(*(model.parameters() for model in models), strict=True):
            mean = mean_of([replica.detach() for replica in replicas])
            states = [o.state[r] for o, r in zip(optimizers, replicas, strict=True)]
            momenta = [s.get("momentum_buffer", torch.zeros_like(mean)) for s in states]
            momentum = mean_of(momenta)
            for replica, state in zip(replicas, states, strict=True):
                replica.data.copy_(mean)
                state["momentum_buffer"] = momentum.clone()
        seen[:] = 0

    for epoch in range(epochs):
        orders = [permutation(n, SEED, epoch, rank) for rank, n in enumerate(sizes)]
        for step in range(plan.steps):
            for rank, shard in enumerate(shards):
                start, stop, _ = plan.batch(step, rank)
                rows = orders[rank][start:stop]
                if len(rows):
                    batch = {k: torch.from_numpy(v[rows]) for k, v in shard.items()}
                    optimizers[rank].zero_grad()
                    squared(models[rank], batch).backward()
                    optimizers[rank].step()
                seen[rank] += len(rows)
            if (step + 1) % local_steps == 0 or step == plan.steps - 1:
                take_mean()
    return models[0].state_dict()


@pytest.mark.parametrize("local_steps", [2, 3, 5])
@pytest.mark.parametrize("sizes", [[11], [7, 4], SIZES], ids=str)
def test_workers_make_steps_by_themselves_and_take_the_mean(crew, sizes, local_steps):
    run = Run(crew, sizes=sizes)
    figures = run.fit(local_steps=local_steps)
    near(run.weights, apart(sizes, local_steps))
    assert [f["global_step"] for f in figures] == [3, 6]
    assert [f["num_samples"] for f in figures] == [11, 11]


def test_the_mean_after_each_step_of_plain_sgd_is_exact(crew):
    def plain(model, config=None):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    run = Run(crew, optimizer=plain)
    run.fit(local_steps=2, batch_size=12)  # one step in an epoch
    near(run.weights, alone(SIZES, make_optimizer=plain, batch_size=12))


def adam(model, config=None):
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_run_of_local_steps_can_be_resumed(crew, tmp_path, optimizer):
    options = {"local_steps": 2, "checkpoint_trigger": SeveralIteration(1), "batch_size": 2}
    whole = Run(crew, optimizer=optimizer)
    whole.fit(4, **options)
    Run(crew, tmp_path, optimizer=optimizer).fit(4, steps=8, **options)
    again = Run(crew, tmp_path, optimizer=optimizer)
    again.fit(4, resume="auto", **options)
    assert largest_difference(again.weights, whole.weights) == 0


def test_a_fit_of_some_steps_ends_with_one_state(crew):
    class Looks(Callback):
        def after_train_epoch(self, runner):
            sums = [float(tensor.sum()) for tensor in runner.model.parameters()]
            one, *others = runner.sync.all_gather(sums)
            assert all(each == one for each in others)

    figures = Run(crew).fit(steps=2, local_steps=5, callbacks=[Looks()])
    assert figures[-1]["global_step"] == 2


class Gated(nn.Module):
    """A layer that has a gradient only where there are rows of the first class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.base, self.gate = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()

    def forward(self, x):
        out = self.base(x)
        return out + self.gate(x) if len(x) > 1 else out


def test_a_layer_that_only_some_workers_use_is_averaged(crew):
    run = Run(crew, sizes=[6, 3, 0], model=lambda config: Gated(), optimizer=adam)
    run.fit(2, local_steps=2, batch_size=3)
    assert all(torch.isfinite(tensor).all() for tensor in run.weights.values())
    assert not torch.equal(run.weights["gate.weight"], Gated().gate.weight)


def test_what_local_steps_do_not_go_with_is_said(crew):
    with refused("argument-conflict", "local_steps=2"):
        Run(crew, loss=nn.MSELoss(reduction="sum")).fit(local_steps=2)


def test_bf16_computes_in_another_precision(crew):
    def single(config=None):
        return net().float()

    class Looks(Callback):
        def after_train_iter(self, runner):
            assert runner.output is None or runner.output.dtype == torch.bfloat16
            assert all(p.dtype == torch.float32 for p in runner.model.parameters())

    class Casts(nn.Module):
        def forward(self, output, target):
            return nn.functional.mse_loss(output.float(), target.float())

    run = Run(crew, model=lambda config: _Cast(single()), loss=Casts())
    run.fit(precision="bf16", callbacks=[Looks()], validate=True)
    assert run.weights["inner.0.weight"].dtype == torch.float32
    near(run.weights, alone(make_model=lambda: _Cast(single())), 0.05)


class _Cast(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.float())


# -- weights of rows ----------------------------------------------------------------------------


def weighted_mean(each):
    def loss(model, batch):
        w = batch["w"]
        return (w * each(model, batch)).sum() / w.sum() if w.sum() else w.sum()

    return loss


def weighted_alone(each, **options):
    """Each batch counts once, whatever its weights are."""
    return alone(step_loss=weighted_mean(each), **options)


@pytest.mark.parametrize("sizes", [[11], SIZES], ids=str)
def test_rows_count_by_their_weight(crew, sizes):
    def each(model, batch):
        return (model(batch["x"])[:, 0] - batch["y"]) ** 2

    run = Run(crew, sizes=sizes)
    figures = run.fit(labels=["y", "w"], weighted=True, validate=True)
    near(run.weights, weighted_alone(each, sizes=sizes))

    (rows,) = union_batches(shards_of(sizes), 11, SEED, 0, shuffle=False)
    model = net()
    model.load_state_dict(run.weights)
    with torch.no_grad():
        losses = each(model, rows)
    expected = float((rows["w"] * losses).sum() / rows["w"].sum())
    assert figures[-1]["val_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ignored", [2, 255, -100])
def test_weights_of_rows_and_classes_multiply(crew, ignored):
    loss = nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 2.0, 5.0]).double(), ignore_index=ignored, label_smoothing=0.0
    )

    def step(model, b):
        labels = b["c"].long()
        each = nn.functional.cross_entropy(
            model(b["x"]), labels, loss.weight, ignore_index=2, reduction="none"
        )
        counted = (b["w"] * torch.where(labels == 2, 0.0, loss.weight[labels])).sum()
        return (b["w"] * each).sum() / counted if counted else (each * 0).sum()

    run = Run(crew, model=classifier, loss=loss)
    for shard in run.shards:
        shard["c"][shard["c"] == 2] = ignored
    run.fit(labels=["c", "w"], weighted=True)
    near(run.weights, alone(make_model=classifier, step_loss=step))


LOSSES = {
    "mean": nn.MSELoss(),
    "sum": nn.MSELoss(reduction="sum"),
    "smooth": nn.SmoothL1Loss(),
    "function": nn.functional.l1_loss,
    "batchmean": nn.KLDivLoss(reduction="batchmean", log_target=True),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_equal_weights_change_nothing(crew, loss):
    plain = Run(crew, loss=LOSSES[loss])
    even = Run(crew, loss=LOSSES[loss])
    for shard in even.shards:
        shard["w"][:] = 2.0 if loss != "sum" else 1.0
    expected = plain.fit(validate=True)
    found = even.fit(labels=["y", "w"], weighted=True, validate=True)
    near(even.weights, plain.weights)
    for key in ("train_loss", "val_loss"):
        assert [f[key] for f in found] == pytest.approx([f[key] for f in expected], rel=1e-9)


def test_an_evaluation_is_weighted(crew):
    shards = shards_of()
    parts = ModelParts(net, None, nn.MSELoss())
    settings = TorchEvaluationSettings(4, ["x"], ["y", "w"], weighted=True)
    program = TorchEvaluateProgram(parts, settings, [], TorchDistributedSync)
    outcomes, _ = crew.run(program, [{"data": s} for s in shards], state=dumps(net().state_dict()))
    (rows,) = union_batches(shards, 11, SEED, 0, shuffle=False)
    with torch.no_grad():
        each = (net()(rows["x"])[:, 0] - rows["y"]) ** 2
    expected = float((rows["w"] * each).sum() / rows["w"].sum())
    assert outcomes[0]["metrics"]["val_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_a_weight_must_be_a_number_of_at_least_0(crew, bad):
    run = Run(crew)
    for shard in run.shards:
        shard["w"][:] = bad
    with refused("data-value", "weight_col"):
        run.fit(labels=["y", "w"], weighted=True)


# -- schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        (schedule.Poly(0.5, 5), lambda n: 0.1 * max(0, 1 - n / 5) ** 0.5),
        (schedule.Exponential(2, 0.5), lambda n: 0.1 * 0.5 ** (n / 2)),
        (schedule.MultiStep([1, 4], 0.1), lambda n: 0.1 * 0.1 ** ((n >= 1) + (n >= 4))),
    ],
    ids=["poly", "exponential", "multistep"],
)
def test_schedules_of_orca_count_updates(crew, make, rate):
    run = Run(crew, scheduler_creator=make)
    run.fit()
    near(run.weights, alone(rate=rate))


def test_a_torch_scheduler_can_be_stepped_after_every_update(crew):
    step = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)
    run = Run(crew, scheduler_creator=lambda optimizer, config: step(optimizer), interval="step")
    run.fit()
    near(run.weights, alone(rate=lambda n: 0.1 * 0.7**n))


def test_an_optimizer_of_orca_brings_its_schedule(crew):
    run = Run(crew, optimizer=orca.SGD(0.1, learningrate_decay=0.5, momentum=0.9, dampening=0.0))
    run.fit()
    near(run.weights, alone(rate=lambda n: 0.1 / (1 + 0.5 * n)))


def test_a_schedule_goes_on_after_an_interruption(crew, tmp_path):
    parts = {"scheduler_creator": schedule.SequentialSchedule(3).add(schedule.Warmup(0.01), 4)}
    parts["scheduler_creator"].add(schedule.Poly(1.0, 20), 20)
    whole = Run(crew, **parts)
    whole.fit(4)
    Run(crew, tmp_path, **parts).fit(steps=5, checkpoint_trigger=SeveralIteration(1))
    again = Run(crew, tmp_path, **parts)
    again.fit(4, resume="auto")
    assert largest_difference(again.weights, whole.weights) == 0


def test_a_plateau_of_orca_looks_at_the_training_loss(crew):
    class Rates(Callback):
        def after_train_epoch(self, runner):
            runner.epoch_stats["rate"] = runner.optimizer.param_groups[0]["lr"]

    plateau = schedule.Plateau("Loss", factor=0.5, patience=0, epsilon=1e9)
    figures = Run(crew, scheduler_creator=plateau).fit(4, callbacks=[Rates()])
    assert [f["rate"] for f in figures] == pytest.approx([0.1, 0.1, 0.05, 0.025])


def test_a_schedule_by_hand_is_left_alone(crew):
    step = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)
    run = Run(crew, scheduler_creator=lambda optimizer, config: step(optimizer), interval="manual")
    run.fit()
    near(run.weights, alone())


def test_a_plateau_of_torch_needs_epochs():
    parts = ModelParts(
        net,
        sgd,
        nn.MSELoss(),
        lambda optimizer, config: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        interval="step",
    )
    with refused("argument-conflict", "scheduler_step_freq"):
        parts.build(training=True)


# -- a step of the user's own -------------------------------------------------------------------


class Default(MainCallback):
    """Changes nothing."""


class ByHand(MainCallback):
    """A forward and a backward pass with clipping in between."""

    def on_iter_forward(self, runner):
        *features, target = runner.batch
        runner.output = runner.model(*features)[:, 0]
        runner.target = target
        runner.loss = runner.criterion(runner.output, target)

    def on_iter_backward(self, runner):
        runner.optimizer.zero_grad()
        runner.loss.backward()
        nn.utils.clip_grad_norm_(runner.model.parameters(), 0.05)
        runner.optimizer.step()


class Twice(ByHand):
    """Two backward passes that add up to one loss."""

    def on_iter_backward(self, runner):
        runner.optimizer.zero_grad()
        (runner.loss * 0.25).backward(retain_graph=True)
        (runner.loss * 0.75).backward()
        runner.optimizer.step()


@pytest.mark.parametrize("sizes", [[11], SIZES], ids=str)
@pytest.mark.parametrize("main", [Default, ByHand, Twice], ids=lambda c: c.__name__)
def test_a_step_of_ones_own_is_exact(crew, sizes, main):
    run = Run(crew, sizes=sizes)
    run.fit(callbacks=[main()], validate=True)
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05)
    near(run.weights, alone(sizes, clip=clip if main is ByHand else lambda ps: None))


def test_clipping_also_reaches_a_step_of_ones_own(crew):
    run = Run(crew)
    run.fit(callbacks=[Twice()], clipping=Clipping(norm=0.05))
    near(run.weights, alone(clip=functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05)))


def test_hooks_of_validation_and_rate_are_called(crew):
    class Main(MainCallback):
        def on_val_forward(self, runner):
            super().on_val_forward(runner)
            runner.loss = runner.loss * 0 + 7

        def on_lr_adjust(self, runner):
            for group in runner.optimizer.param_groups:
                group["lr"] *= 0.5

    run = Run(crew)
    figures = run.fit(callbacks=[Main()], validate=True)
    assert [f["val_loss"] for f in figures] == [7, 7]
    near(run.weights, alone(rate=lambda n: 0.1 if n < 3 else 0.05))


def test_a_forward_that_sets_no_loss_is_refused(crew):
    class Main(MainCallback):
        def on_iter_forward(self, runner):
            runner.output = runner.model(runner.batch[0])

    with refused("function-result", "runner.loss", "NoneType"):
        Run(crew).fit(callbacks=[Main()])


# -- other callbacks ----------------------------------------------------------------------------


def test_early_stopping_ends_where_an_uninterrupted_run_does(crew, tmp_path):
    stop = EarlyStopping("train_loss", patience=2, min_delta=1e9)
    whole = Run(crew)
    assert [f["epoch"] for f in whole.fit(9, callbacks=[stop])] == [1, 2, 3]
    first = Run(crew, tmp_path / "a")
    first.fit(9, callbacks=[MaxstepsCallback(7), stop])
    assert first.training.position.global_step == 7
    (run,) = (tmp_path / "a").iterdir()
    again = Run(crew, tmp_path / "b")
    figures = again.fit(8, resume=str(max(run.glob("checkpoint-*"))), callbacks=[stop])
    assert [f["epoch"] for f in figures] == [1, 2, 3]
    assert largest_difference(again.weights, whole.weights) == 0


def test_files_of_epochs_have_names_by_template(crew, tmp_path):
    keep = ModelCheckpoint(f"{tmp_path}/net-{{epoch:02d}}")
    run = Run(crew)
    run.fit(3, callbacks=[keep])
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["last.ckpt", "net-epoch=01.ckpt", "net-epoch=02.ckpt", "net-epoch=03.ckpt"]
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert set(last) == {"epoch", "models", "optimizers"}
    assert last["epoch"] == 3
    near(last["models"][0], run.weights, 0)
    assert ModelCheckpoint.get_latest_checkpoint(str(tmp_path)) == f"{tmp_path}/last.ckpt"


def test_files_of_steps_are_those_after_the_step(crew, tmp_path):
    keep = ModelCheckpoint(f"{tmp_path}/net-{{iter}}", True, False, 2, num_to_keep=2)
    Run(crew).fit(3, callbacks=[keep])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "last.ckpt",
        "net-iter=6.ckpt",
        "net-iter=8.ckpt",
    ]
    six = Run(crew)
    six.fit(2)  # of three steps each
    near(torch.load(tmp_path / "net-iter=6.ckpt", weights_only=True), six.weights, 0)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_files_stay(crew, tmp_path, mode):
    keep = ModelCheckpoint(f"{tmp_path}/{{epoch}}", num_to_keep=2, monitor="train_loss", mode=mode)
    figures = Run(crew).fit(5, callbacks=[keep])
    order = sorted(figures, key=lambda f: f["train_loss"], reverse=mode == "max")
    best = {f"epoch={f['epoch']}.ckpt" for f in order[:2]}
    assert {p.name for p in tmp_path.iterdir()} == {"last.ckpt", *best}


def test_callbacks_of_2_0_are_called(crew):
    class Old(Callback):
        def __init__(self):
            self.calls = []

        def on_train_begin(self):
            self.calls.append(f"begin {type(self.model).__name__} {self.trainer.size}")

        def on_epoch_begin(self, epoch):
            self.calls.append(f"epoch {epoch}")

        def on_batch_end(self, batch):
            self.calls.append("batch")

        def on_epoch_end(self, epoch):
            self.calls.append(f"end {epoch}")
            self.trainer.epoch_stats["calls"] = list(self.calls)

    figures = Run(crew).fit(callbacks=[Old()])
    epochs = [["epoch 0", *["batch"] * 3, "end 1"], ["epoch 1", *["batch"] * 3, "end 2"]]
    assert figures[-1]["calls"] == ["begin Sequential 3", *epochs[0], *epochs[1]]


def test_hooks_of_2_0_may_take_the_figures(crew):
    class Old(Callback):
        def on_epoch_end(self, epoch, logs):
            self.seen = [*getattr(self, "seen", ()), logs["train_loss"]]

        def on_train_end(self, logs=None):
            logs["seen"] = [*self.seen, logs["train_loss"]]

        def after_train_epoch(self, runner):
            runner.epoch_stats["losses"] = list(self.seen)

    figures = Run(crew).fit(callbacks=[Old()])
    losses = [each["train_loss"] for each in figures]
    assert figures[-1]["losses"] == losses
    assert figures[-1]["seen"] == [*losses, losses[-1]]


def test_what_callbacks_time_is_in_the_profile_of_all_workers(crew):
    class Timed(MainCallback):
        def on_iter_forward(self, runner):
            with runner.timers.record("network"):
                super().on_iter_forward(runner)
            assert runner.timers.stats()["last_network_s"] > 0

        def on_lr_adjust(self, runner):
            with runner.timers.record("schedule"):
                super().on_lr_adjust(runner)

    figures = Run(crew).fit(callbacks=[Timed()], validate=True)
    for each in figures:
        assert 0 < each["profile"]["mean_network_s"] < each["profile"]["mean_train_epoch_s"]
    assert figures[1]["profile"]["mean_schedule_s"] > 0  # by the step of the epoch before


def test_the_runner_keeps_values_and_has_the_names_of_2_x(crew):
    class Looks(Callback):
        def before_run(self, runner):
            runner.put("seen", 0)
            for wrong in (lambda: runner.put("seen", 1), lambda: runner.get("other")):
                with pytest.raises(UsageError, match=r"The runner (already has|has no)"):
                    wrong()
            assert runner.models == [runner.model]
            assert runner.optimizers == [runner.optimizer]
            assert sum(len(b[0]) for b in runner.train_loader) == [7, 0, 4][runner.rank]
            assert len(runner.val_loader) == [7, 0, 4][runner.rank]

        def after_train_iter(self, runner):
            runner.update("seen", runner.get("seen") + 1)

        def after_train_epoch(self, runner):
            runner.epoch_stats["seen"] = runner.get("seen")
            assert set(runner.metrics_stats) >= {"val_loss", "val_num_samples"}

        def after_run(self, runner):
            runner.remove("seen")

    figures = Run(crew).fit(callbacks=[Looks()], validate=True)
    assert [f["seen"] for f in figures] == [3, 6]


@pytest.mark.slow
def test_event_files_are_written_by_a_callback(crew, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    where = [str(tmp_path / "a"), f"file://{tmp_path}/b"]
    callbacks = [TensorBoardCallback(where[0], freq=2), TensorBoardCallback(where[1])]
    figures = Run(crew).fit(callbacks=callbacks, validate=True)
    for folder, steps in (("a", [2, 4, 6]), ("b", [])):
        files = EventAccumulator(str(tmp_path / folder)).Reload()
        losses = [event.value for event in files.Scalars("val_loss")]
        assert losses == pytest.approx([f["val_loss"] for f in figures], rel=1e-6)
        tags = files.Tags()["scalars"]
        assert ([e.step for e in files.Scalars("learning_rate")] if steps else []) == steps
        assert ("train_loss_step" in tags) == bool(steps)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_the_fit(crew, tmp_path):
    class Spoils(Callback):
        def after_train_epoch(self, runner):
            if runner.rank == 0 and runner.epochs == 1:
                (run,) = tmp_path.iterdir()
                shutil.rmtree(run)
                run.write_text("in the way")

    with pytest.raises(UsageError, match="run-"):
        Run(crew, tmp_path).fit(4, callbacks=[Spoils()])


# -- summaries ----------------------------------------------------------------------------------


def test_every_update_is_recorded_once(crew, tmp_path):
    def losses(run):
        table = loads(run.training.snapshot.files["summary.pt"])
        return table[:, [0, 2, 3]].tolist()  # without the time

    whole = Run(crew, scheduler_creator=schedule.Step(2, 0.5))
    whole.fit(summary=True)
    rows = losses(whole)
    assert [r[0] for r in rows] == [1, 2, 3, 4, 5, 6]
    Run(crew, tmp_path, scheduler_creator=schedule.Step(2, 0.5)).fit(
        steps=4, summary=True, checkpoint_trigger=SeveralIteration(1)
    )
    again = Run(crew, tmp_path, scheduler_creator=schedule.Step(2, 0.5))
    again.fit(resume="auto", summary=True)
    assert losses(again) == rows

    model, expected = net(), []
    for batch in union_batches(shards_of(), 4, SEED, 0):
        expected.append(float(squared(model, batch).detach()))
        break
    assert rows[0][1] == pytest.approx(expected[0], rel=1e-12)
