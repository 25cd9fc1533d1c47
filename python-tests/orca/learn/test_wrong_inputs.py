"""What a user can get wrong is answered by one sentence: what was wrong, what was given, a cure."""

import os

import case_names as naming
import numpy as np
import pytest
import torch
from torch import nn

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.metrics import MSE
from bigdl.orca.learn.pytorch import Estimator, TrainingOperator
from bigdl.orca.learn.pytorch.callbacks import (
    EarlyStopping,
    MainCallback,
    MaxstepsCallback,
    ModelCheckpoint,
    TensorBoardCallback,
)


def net(config=None):
    return nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))


def sgd(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def estimator(**options):
    given = {"model": net, "optimizer": sgd, "loss": nn.MSELoss(), "metrics": [MSE()]}
    return Estimator.from_torch(**{**given, **options})


@pytest.fixture(scope="module")
def frame(orca_spark):
    """Features `a`, `b`, a target `y`, a text `s`, arrays `v` of two lengths, a null in `n`."""
    rows = [(1.0, 2.0, 3.0, "p", [1.0], 1.0), (4.0, 5.0, 6.0, "q", [1.0, 2.0], None)]
    schema = "a double, b double, y double, s string, v array<double>, n double"
    return orca_spark.createDataFrame(rows, schema).cache()


COLUMNS = {"feature_cols": ["a", "b"], "label_cols": ["y"]}
OPERATOR = type("Mine", (TrainingOperator,), {})


def says(call, message, kinds=UsageError):
    """One sentence with this text, without the noise of other systems."""
    with pytest.raises(kinds) as refused:
        call()
    text = str(refused.value)
    assert message in text
    if isinstance(refused.value, UsageError):
        assert "\n" not in text
        assert len(text) < 600
        assert isinstance(refused.value, RuntimeError)
        assert isinstance(refused.value, ValueError)


# -- from_torch ---------------------------------------------------------------------------------

FROM_TORCH = [
    ({"modle": net}, "from_torch has no argument 'modle'; did you mean model=?"),
    ({"backend": "dask"}, "The backends are "),
    ({"scheduler_step_freq": "step"}, 'should be "batch", "epoch" or "manual", got \'step\''),
    ({"precision": "fp16"}, 'precision should be "fp32" or "bf16", got \'fp16\''),
    ({"precision": ["bf16"]}, 'precision should be "fp32" or "bf16", got [\'bf16\']'),
    ({"num_to_keep": 0}, "num_to_keep should be a positive integer, got 0"),
    ({"workers_per_node": 1.5}, "workers_per_node should be a positive integer, got 1.5"),
    ({"model_dir": 3}, "model_dir should be a path or URL, got int"),
    ({"initialization_hook": "seed"}, "initialization_hook must be a function without arguments"),
    ({"training_operator_cls": OPERATOR}, "training_operator_cls=Mine is not supported; move its"),
    ({"model": "resnet"}, "model must be an nn.Module or a function"),
    ({"loss": 1}, "loss must be a torch.nn loss"),
    ({"optimizer": 0.1}, "optimizer must be a torch optimizer or a function"),
    ({"config": "lr=1"}, "config must be a dict, got str"),
    ({"config": {"batch_size": 1}}, "config must not contain batch_size; pass batch_size to fit"),
    ({"metrics": [3]}, "3"),
]


@pytest.mark.parametrize(("options", "message"), FROM_TORCH, ids=lambda v: naming.case(v)[:40])
def test_from_torch(options, message):
    says(lambda: estimator(**options), message)


# -- fit ----------------------------------------------------------------------------------------


class Backward(MainCallback):
    def on_iter_backward(self, runner):
        pass


FIT = [
    ({"data": None}, "NoneType"),
    ({"feature_cols": ["a", "bb"]}, "no column 'bb'"),
    ({"feature_cols": []}, "feature_cols is required"),
    ({"feature_cols": ["s"]}, "Column 's' has type string, which cannot become a tensor"),
    ({"feature_cols": [3]}, "Column names must be strings, got 3"),
    ({"label_cols": []}, "label_cols is required"),
    ({"label_cols": "z"}, "no column 'z'"),
    ({"weight_col": "z"}, "no column 'z'"),
    ({"weight_col": "y"}, "weight_col 'y' is one of label_cols; name another column"),
    ({"weight_col": ["a"]}, "weight_col should be the name of one column, got ['a']"),
    ({"weight_col": "a", "label_cols": None}, "weight_col needs label_cols"),
    ({"epochs": 1.5}, "epochs should be a positive integer, got 1.5"),
    ({"epochs": True}, "epochs should be a positive integer, got True"),
    ({"max_steps": 0}, "max_steps should be a positive integer, got 0"),
    ({"batch_size": 0}, "batch_size should be a positive integer, got 0"),
    ({"batch_size": "32"}, "batch_size should be a positive integer, got '32'"),
    ({"accumulate_grad_batches": 0}, "accumulate_grad_batches should be a positive integer"),
    (
        {"accumulate_grad_batches": 2, "callbacks": [Backward()]},
        "accumulate_grad_batches=2 is not supported with a custom on_iter_backward",
    ),
    ({"local_steps": 0}, "local_steps should be a positive integer"),
    (
        {"local_steps": 2, "accumulate_grad_batches": 3},
        "accumulate_grad_batches=3 is not supported with local_steps=2; pass a batch_size",
    ),
    (
        {"local_steps": 2, "callbacks": [Backward()]},
        "local_steps=2 is not supported with a custom on_iter_backward",
    ),
    ({"seed": "x"}, "seed should be an integer of at least 0, got 'x'"),
    ({"resume": 3}, 'resume should be "auto" or the path of a checkpoint, got 3'),
    ({"resume": "auto"}, 'resume="auto" needs model_dir= in Estimator.from_torch'),
    ({"checkpoint_trigger": 5}, "a trigger is expected to be a Trigger such as EveryEpoch()"),
    ({"callbacks": [print]}, "callbacks must be instances of"),
    ({"callbacks": MainCallback}, "got the class MainCallback"),
    ({"callbacks": [MainCallback(), Backward()]}, "can contain at most one MainCallback, got 2"),
    ({"max_failures": "no"}, "max_failures should be an integer of at least 0, got 'no'"),
    ({"validation_data": np.zeros(3)}, "validation_data"),
    ({"feature_col": ["a"]}, "fit has no argument 'feature_col'; did you mean feature_cols=?"),
]


@pytest.mark.parametrize(("options", "message"), FIT, ids=lambda v: naming.case(v)[:40])
def test_fit(frame, options, message):
    says(lambda: estimator().fit(**{"data": frame, **COLUMNS, **options}), message)


def test_a_loss_that_cannot_be_weighted(frame):
    with_weight = {**COLUMNS, "weight_col": "a"}
    says(
        lambda: estimator(loss=nn.CTCLoss()).fit(frame, **with_weight),
        "weight_col needs a loss that can be computed per row, i.e. with a reduction argument",
    )


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_a_metric_that_cannot_be_weighted(frame, verb):
    est = estimator(metrics=[nn.functional.l1_loss])
    says(
        lambda: getattr(est, verb)(frame, **COLUMNS, weight_col="a"),
        "weight_col cannot weight the metric l1_loss, which does not support row weights",
    )


class Columns(nn.Module):
    """A layer over the feature columns side by side."""

    def __init__(self, width=2):
        super().__init__()
        self.inner = nn.Linear(width, 1)

    def forward(self, *columns):
        return self.inner(torch.stack(columns, 1))[:, 0]


class Fails(Columns):
    def forward(self, *columns):
        raise ArithmeticError("no forward today")


WORKER = [
    ({}, {"feature_cols": ["v"]}, "Column 'v' holds arrays of different lengths", UsageError),
    ({}, {"feature_cols": ["n", "a"]}, "'n'", UsageError),
    ({"model": lambda c: Fails()}, {}, "no forward today", WorkerError),
    (
        {"model": net},
        {},
        "The model gets 2 inputs, one per feature column or array, but its forward takes (input)",
        UsageError,
    ),
    ({"model": lambda c: Columns(7)}, {}, "mat1 and mat2 shapes cannot be", WorkerError),
    ({"scheduler_creator": lambda o, c: 3}, {}, "must return a torch scheduler", UsageError),
    ({"loss": lambda output, target: 3}, {}, "int", WorkerError),
    (
        {"config": {"drop_last": True}},
        {"batch_size": 9},
        "drop_last leaves no batch: the data has 2 rows and batch_size is 9",
        UsageError,
    ),
    (
        {},
        {"callbacks": [EarlyStopping("f1")]},
        "The callback EarlyStopping monitors 'f1', which is no metric of the epoch; its metrics",
        UsageError,
    ),
]


@pytest.mark.slow_cases(
    "{'model': <function <lambda>>}-{}-no forward today-<class 'bigdl.common.errors.Wo"
)
@pytest.mark.parametrize(
    ("parts", "options", "message", "kind"), WORKER, ids=lambda v: naming.case(v)[:30]
)
def test_what_only_a_worker_can_find(frame, parts, options, message, kind):
    parts = {"model": lambda config: Columns(), **parts}
    call = {**COLUMNS, "max_failures": 0, **options}
    says(lambda: estimator(**parts).fit(frame, **call), message, kind)


def test_a_table_without_rows(frame):
    says(lambda: estimator().fit(frame.limit(0), **COLUMNS), "The training data has no rows")


def test_a_model_dir_that_cannot_be_written(frame, tmp_path):
    (tmp_path / "file").write_text("")
    est = estimator(model_dir=f"{tmp_path}/file/below")
    says(lambda: est.fit(frame, **COLUMNS), "cannot be written")


# -- evaluate and predict -----------------------------------------------------------------------

EVALUATE = [
    ({"data": 3}, "int"),
    ({"num_steps": 0}, "num_steps should be a positive integer, got 0"),
    ({"batch_size": -1}, "batch_size should be a positive integer, got -1"),
    ({"label_cols": ["q"]}, "no column 'q'"),
    ({"callbacks": [3]}, "callbacks must be instances of"),
    ({"validation_metrics": ["nonsense"]}, "there is no metric named 'nonsense'"),
    ({"batchsize": 3}, "evaluate has no argument 'batchsize'; did you mean batch_size=?"),
]


@pytest.mark.parametrize(("options", "message"), EVALUATE, ids=lambda v: naming.case(v)[:40])
def test_evaluate(frame, options, message):
    says(lambda: estimator().evaluate(**{"data": frame, **COLUMNS, **options}), message)


PREDICT = [
    ({"data": 3}, "got int"),
    ({"feature_cols": ["q"]}, "no column 'q'"),
    ({"batch_size": 0}, "batch_size should be a positive integer, got 0"),
    ({"callbacks": [EarlyStopping()]}, "predict only calls on_pred_forward of a MainCallback"),
]


@pytest.mark.parametrize(("options", "message"), PREDICT, ids=lambda v: naming.case(v)[:40])
def test_predict(frame, options, message):
    call = {"data": frame, "feature_cols": ["a", "b"], **options}
    says(lambda: estimator().predict(**call), message)


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict", "get_model"])
def test_there_is_no_model_yet(frame, verb):
    est = estimator(model=None)
    arguments = [] if verb == "get_model" else [frame]
    says(lambda: getattr(est, verb)(*arguments), "Must provide callable function for model_creator")


# -- files --------------------------------------------------------------------------------------


def damaged(folder):
    path = folder / "cut"
    torch.save(net().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-100])
    return str(path)


def another(folder):
    torch.save(nn.Linear(5, 5).state_dict(), folder / "other")
    return str(folder / "other")


FILES = [
    (lambda e, d: e.load(str(d / "none")), "none' cannot be read"),
    (lambda e, d: e.load(damaged(d)), "is not a file that torch can load"),
    (lambda e, d: e.load(another(d)), "do not fit the model: Error(s) in loading state_dict"),
    (lambda e, d: e.load(None), "load needs a file path, got None"),
    (lambda e, d: e.load(str(d), truste=True), "load has no argument 'truste'; did you mean trust"),
    (lambda e, d: e.load("nowhere://a/b"), "The path 'nowhere://a/b' cannot be opened"),
    (lambda e, d: e.load_checkpoint(damaged(d)), "is not a file that torch can load"),
    (lambda e, d: e.load_state_dict([1]), "state_dict should be a dict as get_state_dict"),
    (lambda e, d: e.load_state_dict({"w": 1}), "do not fit the model"),
    (lambda e, d: e.load_orca_checkpoint(str(d)), "There is no checkpoint below"),
    (lambda e, d: e.load_orca_checkpoint(str(d), 3), "There is no checkpoint of version 3"),
    (lambda e, d: e.save(f"{damaged(d)}/x"), "cannot be written"),
    (lambda e, d: e.save(""), "save needs a file path, got ''"),
    (lambda e, d: e.save_checkpoint(3), "save_checkpoint needs a file path, got 3"),
    (lambda e, d: Estimator.latest_checkpoint(str(d)), "not found."),
    (lambda e, d: ModelCheckpoint.get_latest_checkpoint(str(d)), "Latest checkpoint at"),
    (
        lambda e, d: estimator(model=lambda c: type("Here", (nn.Module,), {})()).save(
            str(d / "m"), entire=True
        ),
        "The module cannot be pickled",
    ),
]


@pytest.mark.parametrize("case", range(len(FILES)))
def test_files(tmp_path, case):
    call, message = FILES[case]
    says(lambda: call(estimator(), tmp_path), message)
    assert {p for p in os.listdir(tmp_path) if "." in p} == set()  # nothing half-written


# -- options and callbacks ----------------------------------------------------------------------

OPTIONS = [
    (lambda e: e.set_constant_gradient_clipping(1, -1), "min should be at most max, got min=1"),
    (lambda e: e.set_constant_gradient_clipping("a", 1), "min should be a number, got 'a'"),
    (lambda e: e.set_l2_norm_gradient_clipping(0), "clip_norm should be a positive number, got 0"),
    (
        lambda e: e.set_l2_norm_gradient_clipping(float("nan")),
        "clip_norm should be a positive number",
    ),
    (lambda e: e.set_tensorboard(None, "a"), "log_dir should be a non-empty str, got None"),
    (lambda e: e.get_train_summary("Loss"), "call set_tensorboard before fit"),
    (lambda e: e.get_validation_summary("Loss"), "No validation has the metric 'Loss'"),
    (lambda e: EarlyStopping(mode="up"), "mode should be one of 'min', 'max', got 'up'"),
    (lambda e: EarlyStopping(patience=0), "patience should be a positive integer, got 0"),
    (lambda e: EarlyStopping(min_delta=-1), "min_delta should be a number of at least 0, got -1"),
    (lambda e: MaxstepsCallback("3"), "max_step should be a positive integer, got '3'"),
    (lambda e: ModelCheckpoint(interval=0), "interval should be a positive integer, got 0"),
    (lambda e: ModelCheckpoint(num_to_keep=0), "num_to_keep should be a positive integer, got 0"),
    (
        lambda e: ModelCheckpoint(by_epoch=False, monitor="val_loss"),
        "monitor needs the metrics of an epoch; use by_epoch=True",
    ),
    (lambda e: TensorBoardCallback(freq="day"), 'freq should be "epoch", "batch" or a positive'),
]


@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_options(case):
    call, message = OPTIONS[case]
    says(lambda: call(estimator()), message)
