import copy
import os
import signal
import warnings

import numpy as np
import psutil
import pytest
import torch
from refusals import refused
from torch.utils.data import DataLoader, TensorDataset

from bigdl.common.cpu import topology, usable_cores
from bigdl.common.errors import UsageError, WorkerLost
from bigdl.nano.pytorch.inference.pipeline import ForwardError, to_multi_instance

CORES = [[usable_cores()[0]], [usable_cores()[-1]]]


class Net(torch.nn.Module):
    """Scales and adds, and fails on demand."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x, y=None, *, scale=1.0):
        if x.dim() == 1 and x[0] < 0:
            raise ValueError("negative input")
        if x.dim() == 1 and x[0] > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        out = self.drop(self.linear(x)) * scale
        return out if y is None else {"sum": out + y, "pid": os.getpid()}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def two(net):
    with to_multi_instance(net, 2, cpu_for_each_process=CORES) as model:
        yield model


def direct(net, *args, **kwargs):
    with torch.inference_mode():
        return copy.deepcopy(net).eval()(*args, **kwargs)


def test_outputs_are_those_of_the_model_in_the_order_of_the_inputs(net, two):
    inputs = [torch.randn(size, 4) for size in (1, 5, 2, 7, 3)]
    outputs = two(inputs)
    assert isinstance(outputs, list)
    for output, given in zip(outputs, inputs, strict=True):
        torch.testing.assert_close(output, direct(net, given))
        assert not output.requires_grad


def test_a_tuple_holds_arguments_and_a_dict_keyword_arguments(net, two):
    x, y = torch.randn(2, 4), torch.ones(3)
    both, named, single = two([(x, y), {"x": x, "scale": 2.0}, x])
    torch.testing.assert_close(both["sum"], direct(net, x) + 1)
    torch.testing.assert_close(named, 2 * direct(net, x))
    torch.testing.assert_close(single, direct(net, x))
    assert both["pid"] != os.getpid()


def test_a_dataloader_is_followed_with_its_order_and_last_batch(net, two):
    data = torch.randn(10, 4)
    loader = DataLoader(TensorDataset(data), batch_size=4, sampler=list(range(9, -1, -1)))
    outputs = two(loader)
    assert [len(each) for each in outputs] == [4, 4, 2]
    torch.testing.assert_close(torch.cat(outputs), direct(net, data.flip(0)))


def test_a_dataloader_with_workers_and_a_generator_are_inputs_too(net, two):
    data = torch.randn(6, 4)
    loader = DataLoader(TensorDataset(data), batch_size=3, num_workers=1)
    torch.testing.assert_close(torch.cat(two(loader)), direct(net, data))
    torch.testing.assert_close(torch.cat(two(row[None] for row in data)), direct(net, data))


@pytest.mark.slow
def test_large_and_odd_tensors_arrive_as_they_were():
    given = [
        torch.randn(2, 3, 128, 128).to(memory_format=torch.channels_last),
        torch.randn(600, 500).bfloat16(),
        torch.randn(500, 600).t(),
        torch.randn(300, 400)[::2, ::3],
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
    ]
    with to_multi_instance(torch.nn.Identity(), 2, cpu_for_each_process=CORES) as model:
        outputs = model(given)
    for output, tensor in zip(outputs, given, strict=True):
        assert output.dtype == tensor.dtype
        assert torch.equal(output, tensor)
    assert outputs[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_each_process_has_its_cores_and_threads():
    class Probe(torch.nn.Module):
        def forward(self, x):
            import time

            time.sleep(0.2)  # so that the other process gets the other input
            return sorted(os.sched_getaffinity(0)), torch.get_num_threads()

    with to_multi_instance(Probe(), 2, cpu_for_each_process=CORES) as model:
        found = model([torch.zeros(1)] * 2)
    assert sorted(found) == sorted((cores, 1) for cores in CORES)


def test_one_process_means_this_process(net):
    with pytest.warns(UserWarning, match="num_processes is 1"):
        model = to_multi_instance(net, num_processes=1)
    x = torch.randn(2, 4)
    (output,) = model([x])
    torch.testing.assert_close(output, direct(net, x))
    assert net.training  # the user's model stays as it is
    model.close()


def test_a_scripted_model_runs_in_workers(net):
    scripted = torch.jit.trace(copy.deepcopy(net).eval(), torch.randn(2, 4))
    x = torch.randn(2, 4)
    with to_multi_instance(scripted, 2, cpu_for_each_process=CORES) as model:
        torch.testing.assert_close(model([x]), [direct(net, x)])


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime"])
def test_an_accelerated_model_runs_in_workers(accelerator):
    pytest.importorskip(accelerator)
    from bigdl.nano.pytorch import InferenceOptimizer

    x = torch.randn(2, 4)
    linear = torch.nn.Linear(4, 3).eval()
    fast = InferenceOptimizer.trace(linear, accelerator=accelerator, input_sample=x)
    with to_multi_instance(fast, 2, cpu_for_each_process=CORES) as model:
        outputs = model([x, x + 1])
    for output, given in zip(outputs, [x, x + 1], strict=True):
        torch.testing.assert_close(output, direct(linear, given), atol=1e-4, rtol=1e-4)


def test_a_model_that_can_neither_be_pickled_nor_saved_is_refused(monkeypatch, net):
    from bigdl.nano.pytorch.inference import pipeline

    def refuse(value):
        raise TypeError("cannot pickle a session")

    monkeypatch.setattr(pipeline, "encode", refuse)
    with refused("model-copy", "TypeError"):
        to_multi_instance(net, 2, cpu_for_each_process=CORES)


def test_an_exception_of_the_model_is_raised_and_the_processes_go_on(net, two):
    with refused("worker-error", "ValueError") as caught:
        two([torch.zeros(4), torch.full((4,), -1.0), torch.zeros(4)])
    assert isinstance(caught.value, ForwardError)
    assert caught.value.item == 1
    assert isinstance(caught.value.__cause__, ValueError)
    torch.testing.assert_close(two([torch.ones(4)])[0], direct(net, torch.ones(4)))


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_process_is_told_and_replaced(net, two):
    with pytest.raises(WorkerLost, match="SIGKILL"):
        two([torch.full((4,), 200.0)])
    torch.testing.assert_close(two([torch.ones(4)])[0], direct(net, torch.ones(4)))


@pytest.mark.slow
def test_nothing_warns_and_processes_end_when_the_model_is_closed(net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = to_multi_instance(net, 2, cpu_for_each_process=CORES)
        model([torch.zeros(4)])
    children = psutil.Process().children()
    model.close()
    _, alive = psutil.wait_procs(children, timeout=0.1)
    assert len(children) - len(alive) >= 2
    with pytest.raises(UsageError, match="closed"):
        model([torch.zeros(4)])


@pytest.mark.parametrize("wrong", [torch.zeros(2, 4), np.zeros(4), "text", {"x": 1}, 3, None])
def test_what_is_not_a_list_of_inputs_is_refused(two, wrong):
    with pytest.raises(RuntimeError, match="The input should be a DataLoader or a list of input"):
        two(wrong)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_processes": 0}, "num_processes should be a positive integer"),
        ({"num_processes": -1}, "num_processes should be a positive integer"),
        ({"num_processes": 2.0}, "num_processes should be a positive integer"),
        ({"num_processes": 10_000}, "The number of processes must be less or equal to the number"),
        (
            {"num_processes": 2, "cpu_for_each_process": [[0]]},
            "cpu_for_each_process must list the cores of each of 2 processes",
        ),
        (
            {"num_processes": 2, "cpu_for_each_process": [[0], [100_000]]},
            "cannot run on cores .100000.",
        ),
    ],
)
def test_wrong_arguments_are_said(net, arguments, said):
    with pytest.raises(RuntimeError, match=said):
        to_multi_instance(net, **arguments)


@pytest.mark.skipif(len(topology().cores) < 2, reason="needs two physical cores")
@pytest.mark.parametrize(
    ("cores", "said"),
    [(0, "must be greater than 0"), (10_000, "(?i)total number of cores requested")],
)
def test_wrong_numbers_of_cores_are_said(net, cores, said):
    with pytest.raises(RuntimeError, match=said):
        to_multi_instance(net, 2, cores_per_process=cores)


def test_what_is_no_module_is_refused():
    with refused("model-type", "torch.nn"):
        to_multi_instance(lambda x: x)
