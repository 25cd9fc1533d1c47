import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import pytorch_lightning as pl
import torch
from refusals import refused
from search_models import Line, line, points
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_models import QUIET

import bigdl.nano.automl.hpo as hpo
from bigdl.common.errors import UsageError
from bigdl.nano.automl.hpo import space
from bigdl.nano.automl.hpo.backend import PrunerType, SamplerType
from bigdl.nano.automl.pytorch import HPOSearcher
from bigdl.nano.pytorch import Trainer
from bigdl.tuning import trial_table

FAR = 250.0  # seconds that anything here may take on a machine that is busy


@pytest.fixture(autouse=True)
def _quiet():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others use the machine's cores, too
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)
    torch.set_num_threads(threads)


def searching(**arguments):
    return Trainer(
        **({"use_hpo": True, "max_epochs": 1, "tune_process": False} | QUIET | arguments)
    )


def test_a_search_finds_good_parameters_and_returns_an_untrained_model(capsys):
    trainer = searching()
    lazy = line(batch_size=space.Categorical(4, 16))
    model = trainer.search(
        lazy,
        target_metric="val_loss",
        direction="minimize",
        n_trials=12,
        sampler_kwargs={"seed": 0},
    )
    study = trainer.search_summary()

    assert type(model) is Line
    assert model.net[0].weight.item() == 0
    assert model.hparams.rate == study.best_params["rate"]
    assert model.batch_size == study.best_params["batch_size"]
    assert study.best_value == min(trial_table(study)["val_loss"]) < 0.5
    assert "Number of finished trials: 12" in capsys.readouterr().out
    other = trainer.end_search(use_trial_id=3)
    assert other.rate == study.trials[3].params["rate"]

    trainer.fit(model)
    loss = trainer.validate(model, verbose=False)[0]["val_loss"]
    assert loss == pytest.approx(study.best_value, rel=1e-5)


def test_a_search_with_a_seed_is_repeatable():
    def search():
        pl.seed_everything(5)
        trainer = searching()
        settings = {"sampler": SamplerType.TPE, "sampler_kwargs": {"seed": 7}}
        trainer.search(
            line(depth=space.Int(1, 2)), target_metric="val_loss", n_trials=4, **settings
        )
        return trial_table(trainer.search_summary()).drop(columns="seconds")

    assert search().equals(search())


def test_max_epochs_and_callbacks_hold_for_every_trial():
    fits = []

    class Counter(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            fits.append(trainer.current_epoch)

    trainer = searching(max_epochs=1, callbacks=[Counter()])
    trainer.search(line(), target_metric="val_loss", n_trials=2, max_epochs=3)

    assert fits == [3, 3]
    assert trainer.max_epochs == 1


@pytest.mark.parametrize(
    ("mode", "direction", "expected"),
    [("best", "minimize", 0.0), ("best", "maximize", 2.0), ("last", "minimize", 2.0)],
)
def test_the_metric_is_that_of_the_best_or_the_last_epoch(mode, direction, expected):
    trainer = searching(max_epochs=3)
    trainer.search(line(), target_metric="steps", mode=mode, direction=direction, n_trials=1)

    trial = trainer.search_summary().trials[0]
    assert trial.value == expected
    assert trial.intermediate_values == {0: 0.0, 1: 1.0, 2: 2.0}


def test_unpromising_trials_end_between_epochs():
    def visited(trial):
        return len(trial.intermediate_values)

    trainer = searching(max_epochs=4)
    trainer.search(
        line(),
        target_metric="val_loss",
        n_trials=12,
        sampler="Random",
        sampler_kwargs={"seed": 0},
        pruner=PrunerType.Median,
        pruner_kwargs={"n_startup_trials": 2},
    )
    trials = trainer.search_summary().trials
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]

    assert pruned
    assert all(visited(trial) < 4 for trial in pruned)
    assert all(visited(trial) == 4 for trial in trials if trial.state.name == "COMPLETE")


def test_a_grid_visits_all_categories_and_refuses_ranges():
    trainer = searching()
    lazy = line(rate=space.Categorical(0.1, 0.5), depth=space.Categorical(1, 2))
    trainer.search(lazy, target_metric="val_loss", sampler=SamplerType.Grid)

    seen = {tuple(trial.params.values()) for trial in trainer.search_summary().trials}
    assert seen == {(0.1, 1), (0.1, 2), (0.5, 1), (0.5, 2)}
    with pytest.raises(UsageError, match=r"Only `space\.Categorical` is supported"):
        trainer.search(line(), target_metric="val_loss", sampler=SamplerType.Grid)


def test_a_grid_of_the_user_s_values_takes_ranges():
    trainer = searching()
    lazy, grid = line(depth=space.Int(1, 9)), {"depth": [2, 5], "rate": [0.1]}
    options = {"target_metric": "val_loss", "sampler": "Grid"}
    trainer.search(lazy, sampler_kwargs={"search_space": grid}, **options)
    assert {trial.params["depth"] for trial in trainer.search_summary().trials} == {2, 5}
    with refused("search-space", "'depth'", "'rate'"):
        trainer.search(lazy, sampler_kwargs={"search_space": {"deep": [1]}}, **options)


@pytest.mark.slow
def test_several_metrics_and_latency_in_other_runtimes():
    trainer = searching()
    best = trainer.search(
        line(depth=space.Categorical(1, 3)),
        target_metric=["val_loss", "latency"],
        directions=["minimize", "minimize"],
        n_trials=1,
        acceleration=True,
        input_sample=torch.zeros(4, 1),
    )
    study = trainer.search_summary()

    assert best == study.best_trials
    runtimes = {"original", "openvino_fp32", "onnxruntime_fp32", "jit_fp32"}
    for trial in study.trials:
        assert trial.values[1] > 0
        assert trial.user_attrs["optimization"] in runtimes
    assert list(trial_table(study).columns[1:3]) == ["val_loss", "latency"]
    assert type(trainer.end_search(use_trial_id=best[0].number)) is Line
    with refused("argument-missing"):
        trainer.end_search()


def test_latency_alone_is_measured_on_the_data_of_validation():
    trainer = searching()
    trainer.search(line(), target_metric="latency", n_trials=1)

    trial = trainer.search_summary().trials[0]
    assert trial.value > 0
    assert trial.user_attrs["optimization"] == "original"


@pytest.mark.slow
def test_latency_is_measured_after_a_training_by_two_processes():
    trainer = searching(num_processes=2)
    trainer.search(line(), target_metric="latency", n_trials=1)
    assert trainer.search_summary().trials[0].value > 0


def test_an_ordinary_module_its_optimizer_and_its_loader_are_searched():
    @hpo.func()
    def loader(batch_size):
        return DataLoader(points(), batch_size=batch_size)

    optimizer = space.AutoObject(torch.optim.SGD, lr=space.Categorical(0.1, 0.4))
    module = nn.Linear(1, 1)
    before = module.weight.item()
    lazy = Trainer.compile(module, nn.MSELoss(), optimizer)
    data = {
        "train_dataloaders": loader(batch_size=space.Categorical(4, 8)),
        "val_dataloaders": DataLoader(points(), batch_size=32),
    }
    trainer = searching()
    model = trainer.search(lazy, target_metric="val/loss", n_trials=4, sampler="Grid", **data)
    study = trainer.search_summary()

    assert set(study.best_params) == {"lr", "batch_size"}
    assert model.optimizer.defaults["lr"] == study.best_params["lr"]
    assert model.model.weight.item() == module.weight.item() == before
    assert study.best_value < study.trials[0].intermediate_values[0] + 1e-6


def test_resuming_goes_on_with_the_last_search_or_the_storage(tmp_path):
    trainer = searching()
    settings = {"target_metric": "val_loss", "n_trials": 2}
    with pytest.warns(UserWarning, match="no search to resume"):
        trainer.search(line(), resume=True, **settings)
    trainer.search(line(), resume=True, **settings)
    assert len(trainer.search_summary().trials) == 4
    trainer.search(line(), **settings)
    assert len(trainer.search_summary().trials) == 2

    stored = settings | {"storage": f"sqlite:///{tmp_path}/hpo.db", "study_name": "line"}
    trainer.search(line(), **stored)
    again = searching()
    again.search(line(), resume=True, **stored)
    assert len(again.search_summary().trials) == 4
    with refused("path-exists", "resume=True"):
        again.search(line(), **stored)


@pytest.mark.slow
def test_trials_trained_by_two_processes_report_their_epochs():
    trainer = searching(num_processes=2, max_epochs=2)
    trainer.search(line(rate=space.Categorical(0.1)), target_metric="val_loss", n_trials=1)

    [trial] = trainer.search_summary().trials
    assert list(trial.intermediate_values) == [0, 1]
    assert trial.value == min(trial.intermediate_values.values())


def test_an_interrupt_ends_the_search_and_its_trial():
    class Interrupt(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    trainer = searching(callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        trainer.search(line(), target_metric="val_loss", n_trials=3)

    assert [trial.state.name for trial in trainer.hposearcher.study.trials] == ["FAIL"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_searcher_stands_alone():
    searcher = HPOSearcher(searching())
    model = searcher.search(line(), target_metric="val_loss", n_trials=1, max_epochs=2)

    assert type(model) is Line
    assert len(searcher.search_summary().trials[0].intermediate_values) == 2


# --- wrong arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"target_metric": None}, "target_metric must be the name"),
        ({"target_metric": ["a", "a"]}, "names a metric twice"),
        ({"target_metric": "accuracy"}, "does not log 'accuracy', which target_metric names"),
        ({"n_trial": 3}, "Invalid Arguments found for 'search': n_trial"),
        ({"n_parallels": 2}, "parallel search is not supported when in-mem storage is used"),
        ({"target_metric": ["val_loss", "steps"]}, "In multi-objective optimization, you must"),
        (
            {"target_metric": ["val_loss", "steps"], "directions": ["minimize"]},
            "explicitly specify the direction",
        ),
        (
            {
                "target_metric": ["val_loss", "steps"],
                "directions": ["minimize", "maximize"],
                "pruner": "Median",
            },
            "cannot be pruned",
        ),
        ({"direction": "up"}, "'minimize' or 'maximize'"),
        ({"mode": "first"}, "mode should be one of 'best', 'last'"),
        ({"n_trials": 0}, "n_trials should be"),
        ({"n_trials": None}, "A search needs an end"),
        ({"sampler": "magic"}, "sampler must be one of"),
        ({"model": Line(0.1)}, "no search space"),
    ],
)
def test_wrong_arguments_of_a_search_are_errors(arguments, said):
    wanted = {"model": line(), "target_metric": "val_loss", "n_trials": 1} | arguments
    with pytest.raises(UsageError) as error:
        searching().search(**wanted)
    assert said in str(error.value)


def test_models_with_spaces_are_not_trained():
    trainer = searching()

    with refused("state"):
        trainer.fit(line())
    with refused("not-fitted"):
        trainer.search_summary()
    with refused("argument-type"):
        Trainer.compile(line(), None, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def test_a_trainer_without_hpo_does_not_search():
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False)

    with pytest.warns(UserWarning, match="use_hpo=True"):
        assert trainer.search(line(), target_metric="val_loss", n_trials=1) is None
    searched = HPOSearcher(trainer).search(line(), target_metric="val_loss", n_trials=1)
    assert isinstance(searched, pl.LightningModule)
    with refused("argument-type", "bigdl.nano"):
        HPOSearcher(pl.Trainer(logger=False))


# --- searches by processes


@pytest.fixture(scope="module")
def killed_search(tmp_path_factory):
    """Run a search in two processes, kill one of them, and run the search again."""
    directory = tmp_path_factory.mktemp("killed")
    storage, reached = f"sqlite:///{directory}/hpo.db", directory / "reached"
    program = Path(__file__).parents[1] / "helpers" / "search_program.py"
    search = subprocess.Popen([sys.executable, program, storage, reached])
    try:
        give_up = time.monotonic() + FAR
        while not reached.exists():
            assert search.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
    finally:
        search.kill()
        search.wait(FAR)
    return storage


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_lose_no_trial_and_a_killed_search_no_finished_one(killed_search):
    def numbers(*states):
        return [trial.number for trial in before if trial.state.name in states]

    before = optuna.load_study(study_name="line", storage=killed_search).trials
    [lost] = numbers("FAIL")
    assert [trial.user_attrs.get("retry_of") for trial in before].count(lost) == 1
    running, waiting = numbers("RUNNING"), numbers("WAITING")
    assert running
    once = [number for number in running if "retry_of" not in before[number].user_attrs]

    trainer = searching()
    trainer.search(
        line(),
        target_metric="val_loss",
        n_trials=len(once) + len(waiting) + 1,
        storage=killed_search,
        study_name="line",
        resume=True,
    )
    after = trainer.search_summary().trials

    for number in numbers("COMPLETE"):
        assert after[number].value == before[number].value
    assert {after[number].state.name for number in running} == {"FAIL"}
    assert [trial.state.name for trial in after].count("COMPLETE") == (
        len(numbers("COMPLETE")) + len(once) + len(waiting) + 1
    )
    again = {trial.user_attrs.get("retry_of") for trial in after[len(before) :]}
    assert again == {*once, None}


# --- digits


@hpo.plmodel()
class Digits(pl.LightningModule):
    def __init__(self, width, rate):
        super().__init__()
        self.rate = rate
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        right = self.net(batch[0]).argmax(1) == batch[1]
        self.log("val_acc", right.float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.rate)


@pytest.mark.slow
def test_twenty_trials_on_digits_beat_a_bad_guess():
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    loaders = {
        "train_dataloaders": DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=100),
        "val_dataloaders": DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=600),
    }
    pl.seed_everything(0)
    trainer = searching(max_epochs=2)
    trainer.search(
        Digits(width=space.Categorical(16, 64, 128), rate=space.Real(1e-4, 1e-1, log=True)),
        target_metric="val_acc",
        direction="maximize",
        n_trials=20,
        sampler_kwargs={"seed": 0},
        pruner=PrunerType.Median,
        **loaders,
    )
    study = trainer.search_summary()

    assert len(study.trials) == 20
    assert study.best_value > 0.85
    assert study.best_value > trial_table(study)["val_acc"].median()
