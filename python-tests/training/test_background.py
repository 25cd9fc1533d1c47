"""Writing while the training goes on, and bringing values to another device."""

import threading

import pytest
import torch

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.parts import BuiltParts
from bigdl.training.checkpoint import BackgroundWriter
from bigdl.training.state import check_precision, move, precision_of, to_cpu, to_device


def test_the_next_write_waits_for_the_one_before():
    writer, gate, done = BackgroundWriter(), threading.Event(), []
    writer.start(lambda: (gate.wait(10), done.append(1)))
    assert not done  # the caller goes on meanwhile
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    writer.start(lambda: done.append(2))
    writer.wait()
    opener.join()
    assert done == [1, 2]


def test_an_error_of_the_thread_is_raised_once():
    writer = BackgroundWriter()

    def fails():
        raise UsageError("disk full")

    writer.start(fails)
    with pytest.raises(UsageError, match="disk full"):
        writer.start(lambda: None)
    writer.start(lambda: None)
    writer.wait()


def test_tensors_are_moved_wherever_they_are():
    point = torch.zeros(2)
    nested = {"a": [point, (point, "text")], "b": {"c": point}, "d": 3}
    meta = torch.device("meta")  # the only other device that is always there
    found = to_device(nested, meta)
    assert found["a"][0].device == found["a"][1][0].device == found["b"]["c"].device == meta
    assert found["a"][1][1] == "text"
    assert found["d"] == 3
    assert to_device(nested, torch.device("cpu")) is nested
    assert to_cpu(nested)["a"][0] is point


def test_all_parts_of_a_training_are_moved():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adagrad(model.parameters())  # has a state from the start
    built = BuiltParts(model, optimizer, torch.nn.CrossEntropyLoss(torch.ones(2)))
    move(built, torch.device("cpu"))
    assert built.criterion.weight.device.type == "cpu"
    move(built, torch.device("meta"))
    assert built.criterion.weight.is_meta
    assert all(p.is_meta for p in model.parameters())


def test_precisions_have_several_names():
    assert {check_precision(p) for p in (None, "32", 32, "fp32")} == {"fp32"}
    assert {check_precision(p) for p in ("bf16", "bf16-mixed")} == {"bf16"}
    x = torch.ones(2, 2)
    with precision_of("bf16", torch.device("cpu"))():
        assert (x @ x).dtype == torch.bfloat16
    with precision_of("fp32", torch.device("cpu"))():
        assert (x @ x).dtype == torch.float32
