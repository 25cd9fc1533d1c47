import os
import time

import numpy as np
import pytest
import torch
from refusals import refused

from bigdl.common.cpu import topology, usable_cores
from bigdl.common.errors import WorkerLost
from bigdl.nano.pytorch.inference.pipeline import Pipeline, StageError


def functions():
    """Local ones travel whole; for others a worker would import this module, and torch with it."""

    def double(item):
        if item == "raise":
            raise KeyError("nothing to double")
        if item == "exit":
            os._exit(7)
        return item * 2

    return double, lambda item: item + 1


@pytest.fixture(scope="module")
def pipeline():
    double, plus_one = functions()
    stages = [("double", double, {"worker_num": 2}), ("plus one", plus_one, {})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # few cores
        made = Pipeline(stages)
    with made:
        yield made


@pytest.mark.filterwarnings("ignore:The stages need")
def test_a_function_and_a_model_work_one_after_the_other():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))

    def to_tensor(image):
        return torch.from_numpy(image).float()

    images = [np.full((2, 3), i) for i in range(5)]
    with Pipeline([("preprocess", to_tensor, {}), ("inference", model, {})]) as pipeline:
        outputs = pipeline.run(images)
    assert model.training
    model.eval()
    with torch.no_grad():
        expected = [model(to_tensor(image)) for image in images]
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted)
        assert not output.requires_grad


def test_results_keep_the_order_of_the_inputs(pipeline):
    assert pipeline.run(list(range(20))) == [2 * i + 1 for i in range(20)]
    assert pipeline.run([]) == []


def test_a_tuple_is_one_argument():
    with Pipeline([("length", len, {"cores_per_worker": 1})]) as pipeline:
        assert pipeline.run([(1, 2), [], "abc"]) == [2, 0, 3]


def test_an_exception_names_its_stage_and_the_pipeline_goes_on(pipeline):
    with refused("worker-error", "'double'", "1", "KeyError") as caught:
        pipeline.run([1, "raise", 3, 4, 5])
    assert isinstance(caught.value, StageError)
    assert isinstance(caught.value.__cause__, KeyError)
    with refused("worker-error", "'plus one'", "0", "TypeError"):
        pipeline.run(["text"])
    assert pipeline.run([1]) == [3]


@pytest.mark.fault
def test_a_lost_worker_is_told_and_replaced(pipeline):
    with pytest.raises(WorkerLost, match="of double ended with exit code 7"):
        pipeline.run([1, "exit", 2])
    assert pipeline.run([1]) == [3]


@pytest.mark.filterwarnings("ignore:The stages need")
def test_stages_work_at_the_same_time_on_cores_of_their_own():
    def worked():
        begin = time.monotonic()
        time.sleep(0.2)
        return begin, time.monotonic()

    def start(item):
        return worked(), sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]

    def end(earlier):
        return earlier, sorted(os.sched_getaffinity(0)), worked()

    stages = [("start", start, {"cores_per_worker": 1}), ("end", end, {"cores_per_worker": 1})]
    with Pipeline(stages) as pipeline:
        results = pipeline.run(range(6))
    (_, first, threads), second, _ = results[0]
    assert set(first) <= set(topology().cores[0])
    assert threads == "1"
    if len(topology().cores) > 1:
        assert not set(first) & set(second)
    starts, ends = [each[0][0] for each in results], [each[2] for each in results]
    pairs = zip(starts[1:], ends, strict=False)  # of an input, and of the one before
    assert any(a_begin < b_end and b_begin < a_end for (a_begin, a_end), (b_begin, b_end) in pairs)


def test_too_few_cores_are_a_warning():
    expected = "physical cores, but .* workers share cores"
    with (
        pytest.warns(UserWarning, match=expected) as warned,
        Pipeline([("a", abs, {"cores_per_worker": len(usable_cores()) + 1})]) as pipeline,
    ):
        assert pipeline.run([-1]) == [1]
    assert warned[0].filename == __file__


def test_a_closed_pipeline_says_so():
    pipeline = Pipeline([("a", abs, {})])
    pipeline.close()
    pipeline.close()
    with refused("state"):
        pipeline.run([1])


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([], "at least one stage"),
        ([("a", abs)], "A stage is .name, function or Module, options."),
        ([abs], "A stage is .name, function or Module, options."),
        ([("a", 3, {})], "Stage 'a' must be callable, but it is 3"),
        ([("a", abs, None)], "The options of stage 'a' are a dict"),
        ([("a", abs, {"workers": 2})], "The options of stage 'a' are a dict"),
        ([("a", abs, {"worker_num": "2"})], "worker_num of stage 'a' should be a positive integer"),
        ([("a", abs, {"worker_num": 1.5})], "worker_num of stage 'a' should be a positive integer"),
        ([("a", abs, {"worker_num": 0})], "worker_num of stage 'a' should be a positive integer"),
        ([("a", abs, {"cores_per_worker": 0})], "cores_per_worker of stage 'a' should be"),
    ],
)
def test_wrong_stages_are_said(stages, said):
    with pytest.raises(RuntimeError, match=said):
        Pipeline(stages)
