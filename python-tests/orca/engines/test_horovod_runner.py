"""Functions of Horovod's on processes of Ray."""

import importlib.util

import pytest
import ray_models as rays
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.horovod import HorovodRayRunner

HAS_HOROVOD = importlib.util.find_spec("horovod") is not None


@pytest.fixture(autouse=True)
def _ray():
    rays.active_ray()


@pytest.mark.slow_cases("arguments0-worker_cls should be a class or None, got 3")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"worker_cls": 3}, "worker_cls should be a class or None, got 3"),
        ({"worker_param": {"a": 1}}, "worker_param holds arguments of worker_cls"),
        ({"workers_per_node": 0}, "workers_per_node"),
    ],
)
def test_arguments_that_cannot_work_are_errors(arguments, said):
    with pytest.raises(UsageError, match=said):
        HorovodRayRunner(**arguments)


@pytest.mark.skipif(HAS_HOROVOD, reason="Horovod is installed")
def test_without_horovod_the_error_says_how_to_get_it():
    with refused("package-missing"):
        HorovodRayRunner().run(lambda: 1)


@pytest.mark.horovod
@pytest.mark.skipif(not HAS_HOROVOD, reason="Horovod is not installed")
class TestWithHorovod:
    def test_every_process_has_its_rank_and_sums_with_the_others(self):
        def summed():
            import horovod.torch as hvd
            import torch

            return hvd.rank(), hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)

        found = HorovodRayRunner(workers_per_node=2).run(summed)
        assert [(rank, value.tolist()) for rank, value in found] == [(0, [3.0]), (1, [3.0])]

    def test_one_process_alone_works_as_well(self):
        def size():
            import horovod.torch as hvd

            return hvd.size()

        assert HorovodRayRunner().run(size) == [1]

    @pytest.mark.parametrize("processes", [1, 2])
    def test_a_program_of_horovod_begins_and_ends_it_by_itself(self, processes):
        def program():
            import horovod.torch as hvd
            import torch

            hvd.init()
            torch.manual_seed(hvd.rank())
            model = torch.nn.Linear(2, 1)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters()
            )
            model(torch.randn(4, 2)).pow(2).mean().backward()
            optimizer.step()
            hvd.shutdown()
            return model.weight.tolist()

        found = HorovodRayRunner(workers_per_node=processes).run(program)
        assert found == [found[0]] * processes

    def test_objects_are_made_once_in_each_process(self):
        class Greeter:
            def __init__(self, word):
                self.word = word

        runner = HorovodRayRunner(None, Greeter, {"word": "hello"}, 2)
        assert runner.run(lambda greeter: greeter.word) == ["hello", "hello"]

    def test_an_error_of_the_function_is_the_error_of_the_run(self):
        def wrong():
            raise ValueError("this one")

        with pytest.raises(WorkerError, match="this one"):
            HorovodRayRunner(workers_per_node=2).run(wrong)
