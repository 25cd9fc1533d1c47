"""Error messages for common mistakes."""

import functools
import importlib
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused

from bigdl.common.errors import UsageError, type_name
from bigdl.orca import arguments, init_orca_context
from bigdl.orca.learn.optimizers import SGD
from bigdl.orca.learn.pytorch import Estimator
from bigdl.runtime.serialization import pickled_by_value
from bigdl.training.progress import EpochLines


def _estimator(**options):
    inputs = {"model": torch.nn.Linear(1, 1), "optimizer": SGD(0.1), "loss": torch.nn.MSELoss()}
    return Estimator.from_torch(**{**inputs, "backend": "local", **options})


def test_an_unknown_backend_is_answered_with_all_of_them():
    with refused("name-unknown", "backend='pytorch'") as caught:
        _estimator(backend="pytorch")
    for name in ("spark", "ray", "horovod", "bigdl", "local"):
        assert f"'{name}'" in str(caught.value)
    assert "only" not in str(caught.value).lower()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("model_creator", "model"), ("loss_creator", "loss"), ("optimizer_creator", "optimizer")],
)
def test_a_name_of_another_generation_is_answered_with_the_one_of_today(name, meant):
    with pytest.raises(UsageError, match=f"did you mean {meant}="):
        Estimator.from_torch(**{name: lambda config: None})


def test_validation_data_of_another_kind_are_named_with_their_package():
    pytest.importorskip("pyspark")
    from bigdl.orca.learn.utils import maybe_dataframe_to_xshards

    frame = pd.DataFrame({"x": [1.0], "y": [1.0]})
    with refused("data-type", "numpy.ndarray", "DataFrame"):
        maybe_dataframe_to_xshards(frame, np.zeros(4), ["x"], ["y"])
    assert type_name(torch.zeros(1)) == "torch.Tensor"


def test_without_a_context_the_function_that_makes_one_is_named():
    from bigdl.orca.cluster.spark import NO_CONTEXT

    assert NO_CONTEXT.endswith("call init_orca_context")


def test_a_class_in_place_of_a_model_is_answered_with_what_to_write():
    with refused("argument-type", "model=Linear", "model=lambda"):
        _estimator(model=torch.nn.Linear)


def test_a_creator_without_its_parameters_is_refused_at_once():
    def creator():
        return torch.nn.Linear(1, 1)

    with refused("argument-value", "model"):
        _estimator(model=creator)
    with refused("argument-value", "optimizer"):
        _estimator(model=lambda config: creator(), optimizer=lambda model: None)
    _estimator(model=lambda config, width=3: creator())
    _estimator(model=functools.partial(lambda width, config: creator(), 3))


def test_what_cannot_be_pickled_is_named():
    lock, holder = threading.Lock(), type("Holder", (), {})()
    holder.guard = {"a lock": lock}
    with refused("model-copy", "'lock'"):
        pickled_by_value(lambda: lock, "It cannot be sent", "make it inside")
    with refused("model-copy", "'a lock'", "'guard'", "'holder'"):
        pickled_by_value(lambda: holder, "It cannot be sent", "make it inside")


@pytest.mark.parametrize(
    ("statement", "where"),
    [
        ("from bigdl.orca import Estimator", "bigdl.orca.learn.pytorch"),
        ("import bigdl.orca.learn.tensorflow", "bigdl.orca.learn.tf2"),
        ("from bigdl.nano import Trainer", "bigdl.nano.pytorch"),
        ("from bigdl.friesian import FeatureTable", "bigdl.friesian.feature"),
    ],
)
def test_a_name_that_is_elsewhere_is_answered_with_its_place(statement, where):
    with pytest.raises(ImportError, match=where):
        exec(statement, {})
    import bigdl.orca

    assert not hasattr(bigdl.orca, "Estimator")


def test_every_place_that_is_named_exists():
    import re

    from bigdl.common.dropped import MOVED_NAMES

    for name, text in MOVED_NAMES.items():
        last = name.rpartition(".")[2]
        for module in re.findall(r"bigdl[\w.]+", text):
            actual = importlib.import_module(module)
            assert not last[0].isupper() or hasattr(actual, last)


def test_more_memory_than_the_machine_has_is_warned_of(caplog):
    arguments.warn_of_memory("1g")
    assert not caplog.records
    arguments.warn_of_memory("900t")
    assert "more than the" in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_no_ray_is_ends_in_a_sentence_at_once(address):
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match=f"No Ray answers at {address}"):
        init_orca_context(runtime="ray", address=address)


def test_a_server_that_is_no_ray_is_not_waited_for():
    pytest.importorskip("ray")
    import http.server

    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with refused("cluster-unreachable"):
            init_orca_context(runtime="ray", address=f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_first_epoch_and_the_last_one_are_always_shown(capsys):
    lines = EpochLines()
    lines.start(2)
    at = {"epochs": 9, "first": {"epoch": 1, "train_loss": 0.5}}
    lines.update({**at, "last": {"epoch": 4, "train_loss": 0.2}})
    lines.finish([{"epoch": n + 1, "train_loss": 0.1} for n in range(9)])
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in shown] == [
        "starting 2 workers",
        "epoch 1/9",
        "epoch 4/9",
        "epoch 9/9",
    ]


def test_the_level_of_a_logger_stays_as_the_program_has_set_it(capfd):
    import logging

    logger = logging.getLogger("bigdl.orca")
    before = logger.level
    try:
        logger.setLevel(logging.ERROR)
        estimator = _estimator()
        assert logger.level == logging.ERROR
        x = np.zeros((4, 1), "float32")
        estimator.fit((x, x), epochs=1, batch_size=4)
        assert "epoch" not in capfd.readouterr().err
        _estimator(log_level=logging.WARNING)
        assert logger.level == logging.WARNING
    finally:
        logger.setLevel(before)
