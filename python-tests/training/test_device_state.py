"""Where tasks compute and what is put back there, as far as a machine without a GPU can tell."""

import sys

import pytest
import torch
from torch import nn

from bigdl.nano.pytorch.training.steps import ModuleState
from bigdl.runtime.serialization import pickled_by_value
from bigdl.training.state import device_of_task


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_a_task_without_spark_has_a_device(monkeypatch, gpus):
    monkeypatch.setitem(sys.modules, "pyspark", None)  # an import of it fails
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    device = device_of_task()
    assert device.type == ("cuda" if gpus else "cpu")
    assert gpus == 0 or 0 <= device.index < gpus


def test_statistics_come_back_into_the_tensors_that_a_module_has_by_then():
    norm = nn.BatchNorm1d(3)
    state = ModuleState(norm)
    norm._buffers = {name: value.clone() for name, value in norm.named_buffers()}  # as .to() does
    norm(torch.randn(4, 3))
    assert norm.num_batches_tracked == 1
    state.restore()
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_mean, torch.zeros(3))


def test_code_that_is_shipped_names_its_file():
    import cloudpickle

    def outer():
        return lambda: None

    for function in (outer, outer()):
        found = cloudpickle.loads(pickled_by_value(function, "", ""))
        assert found.__code__.co_filename == __file__
    assert cloudpickle.loads(pickled_by_value(outer, "", ""))().__code__.co_filename == __file__
