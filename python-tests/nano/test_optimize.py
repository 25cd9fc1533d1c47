"""`InferenceOptimizer.optimize`: what a user sees of a search."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree

import psutil
import pytest
import torch
from refusals import refused
from small_models import Branching, Convolutional, Encoder, Recurrent, Tabular
from torch.utils.data import DataLoader, TensorDataset

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch import InferenceOptimizer

QUICK = ["bf16", "openvino_fp32", "onnxruntime_fp32"]
WORKS = ("successful", "early stopped")


def agreement(pred, target):
    return float((pred.argmax(1) == target).float().mean())


def mean_square(pred, target):
    return float(((pred - target) ** 2).mean())


def search(model, data, **keywords):
    optimizer = InferenceOptimizer()
    optimizer.optimize(model, data, latency_sample_num=10, **keywords)
    return optimizer


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.rand(24, 3, 12, 12), torch.arange(24) % 4), batch_size=8)


class Searched:
    def __init__(self, model, optimizer, before, output, workers):
        self.model, self.optimizer, self.before, self.output = model, optimizer, before, output
        self.workers = workers  # processes that were there before


def workers():
    """Return the numbers of the worker processes of this one."""
    return {
        p.pid
        for p in psutil.Process().children()
        if p.status() != psutil.STATUS_ZOMBIE and "_worker_main" in " ".join(p.cmdline())
    }


@pytest.fixture(scope="module")
def searched(images, tmp_path_factory):
    """One search in three runtimes, with a metric, that most tests look at."""
    torch.manual_seed(1)
    model = Convolutional().train()
    model.classify.eval()
    before, others = copy.deepcopy(model), workers()
    file = tmp_path_factory.mktemp("table") / "table.txt"
    optimizer = search(
        model,
        images,
        validation_data=images,
        metric=agreement,
        includes=QUICK,
        thread_num=1,
        output_filename=str(file),
    )
    return Searched(model, optimizer, before, file.read_text(), others)


@pytest.fixture
def optimizer(searched):
    return searched.optimizer


def test_there_are_27_methods_of_which_11_are_tried_unasked():
    everything = InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD
    default = InferenceOptimizer.DEFAULT_INFERENCE_ACCELERATION_METHOD
    assert len(everything) == 27
    assert len(default) == 11
    assert next(iter(everything)) == "original"
    assert everything["openvino_int8"].get_precision() == "int8"
    assert everything["openvino_int8"].get_accelerator() == "openvino"


@pytest.mark.slow
def test_each_method_is_measured_and_scored(optimizer):
    table = optimizer.results()
    assert list(table.index) == ["original", *sorted(QUICK, key=list(table.index).index)]
    assert table["status"].isin(WORKS).all()
    assert (table["latency"] > 0).all()
    assert (table["speedup"] > 0).all()
    assert table["accuracy"].between(0, 1).all()
    assert (table["threads"] == 1).all()
    assert table.loc["openvino_fp32", "difference"] < 1e-4
    assert table.loc["onnxruntime_fp32", "accuracy"] == table.loc["original", "accuracy"]


def test_the_user_s_model_is_not_changed(searched):
    after, before = searched.model, searched.before
    assert vars(after).keys() == vars(before).keys()
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name])


@pytest.mark.slow
def test_training_flags_of_the_user_s_model_are_kept(images):
    model = Recurrent().train()
    model.head.eval()
    optimizer = search(model, torch.rand(2, 3, 6), includes=[])
    best, _ = optimizer.get_best_model()
    assert model.training
    assert not model.head.training
    assert not best.training
    assert best.head.weight is model.head.weight


def test_no_process_is_left(searched):
    assert workers() <= searched.workers


def test_models_give_the_original_s_results(searched, optimizer, images):
    x = next(iter(images))[0]
    original = copy.deepcopy(searched.model).eval()
    expected = original(x).detach()
    for name in ("openvino_fp32", "onnxruntime_fp32"):
        model = optimizer.get_model(name)
        with InferenceOptimizer.get_context(model):
            assert torch.get_num_threads() == 1
            torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
        assert model.channels == 3
    assert optimizer.get_model("openvino_fp32") is optimizer.get_model("openvino_fp32")


def test_the_table_has_a_line_for_each_method(searched, optimizer, capsys):
    optimizer.summary()
    printed = capsys.readouterr().out
    assert searched.output.strip() == printed.strip()
    for name in ("original", *QUICK):
        assert re.search(rf"\| +{name} +\| +(successful|early stopped) +\|", printed)


def test_the_dict_of_models_is_a_view(optimizer):
    found = optimizer.optimized_model_dict
    assert set(found) == {"original", *QUICK}
    for row in found.values():
        assert {"status", "latency", "accuracy", "model"} <= set(row)
        assert row["latency_low"] <= row["latency"] <= row["latency_high"]
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["status"] in WORKS
    assert found["openvino_fp32"]["model"] is optimizer.get_model("openvino_fp32")


def test_best_model_of_a_runtime_is_of_that_runtime(optimizer):
    for accelerator in ("openvino", "onnxruntime"):
        model, option = optimizer.get_best_model(accelerator=accelerator)
        assert option == accelerator
        assert not model.training
    assert optimizer.get_best_model(precision="bf16")[1] == "bf16"


def test_best_model_keeps_the_accuracy(optimizer):
    _, option = optimizer.get_best_model(accuracy_criterion=0.0)
    accuracy = {row: values["accuracy"] for row, values in optimizer.optimized_model_dict.items()}
    name = {"openvino": "openvino_fp32", "onnxruntime": "onnxruntime_fp32"}.get(option, option)
    assert accuracy[name] >= accuracy["original"]


def test_charts_are_valid(optimizer, tmp_path):
    for name in ("chart.html", "chart.svg", "chart.png"):
        optimizer.plot(tmp_path / name)
    page = (tmp_path / "chart.html").read_text()
    assert all(method in page for method in QUICK)
    assert "http://" not in page.replace("http://www.w3.org", "")  # nothing is loaded
    drawing = ElementTree.parse(tmp_path / "chart.svg").getroot()
    assert len(drawing.findall(".//{*}circle")) == 1 + len(QUICK)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_report_has_all_methods_and_their_durations(optimizer, tmp_path):
    page = optimizer.report(tmp_path / "methods.html")
    text = (tmp_path / "methods.html").read_text()
    assert page._repr_html_() in text
    assert "Best by latency" in text
    assert all(f"<td>{name}</td>" in text for name in optimizer.optimized_model_dict)
    assert not re.search(r"(src|href)=", text)  # no other file


def test_a_chart_in_an_unknown_form_is_refused(optimizer, tmp_path):
    with refused("path-unusable"):
        optimizer.plot(tmp_path / "chart.nonsense")


def test_an_equal_search_is_not_made_again(searched, images, capsys):
    keywords = {"metric": agreement, "includes": QUICK, "thread_num": 1}
    again = search(searched.model, images, validation_data=images, **keywords)
    assert "Results of an equal search were cached" in capsys.readouterr().out
    assert again.results().equals(searched.optimizer.results())


@pytest.mark.slow
def test_results_stay_for_other_processes_where_the_user_wants(tmp_path):
    script = textwrap.dedent(
        """
        import sys, torch
        from bigdl.nano.pytorch import InferenceOptimizer

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(4, 2)

            def forward(self, x):
                return self.linear(x)

        torch.manual_seed(0)
        optimizer = InferenceOptimizer()
        optimizer.optimize(Net(), torch.ones(2, 4), includes=["onnxruntime_fp32"],
                           metric=lambda model: 1.0, cache_dir=sys.argv[1])
        print(optimizer.get_model("onnxruntime_fp32")(torch.ones(2, 4)).shape)
        """
    )
    file = tmp_path / "script.py"
    file.write_text(script)
    cache = tmp_path / "cache"
    outputs = []
    for _ in range(2):
        command = [sys.executable, str(file), str(cache)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
    assert "made before" not in outputs[0]
    assert "made before" in outputs[1]
    assert all("torch.Size([2, 2])" in output for output in outputs)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.slow_cases("tabular")
@pytest.mark.parametrize(
    ("make", "data"),
    [
        pytest.param(
            Recurrent, lambda: torch.rand(4, 5, 6), id="recurrent", marks=pytest.mark.slow
        ),
        pytest.param(
            Encoder,
            lambda: {"input_ids": torch.randint(0, 50, (2, 7)), "labels": torch.zeros(2)},
            id="transformer",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Tabular,
            lambda: (torch.rand(4, 5), torch.randint(0, 10, (4,)), torch.rand(4, 1)),
            id="tabular",
        ),
        pytest.param(Branching, lambda: torch.rand(4, 4), id="branching", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_model_gets_a_table(make, data):
    optimizer = search(make(), data(), includes=["bf16", "onnxruntime_fp32"])
    table = optimizer.results()
    assert len(table) == 3
    assert table.loc["original", "status"] == "successful"
    failed = table[~table["status"].isin(WORKS)]
    assert (failed["reason"] != "").all()
    assert table["accuracy"].isna().all()
    model, option = optimizer.get_best_model()
    assert not model.training
    assert option in ("original", "bf16", "onnxruntime")


@pytest.mark.slow
def test_batch_sizes_and_thread_counts_are_searched():
    data = (torch.rand(4, 5), torch.randint(0, 10, (4,)), torch.rand(4, 1))
    optimizer = search(
        Tabular(),
        DataLoader(TensorDataset(*data), batch_size=2),
        metric=lambda model: 0.0,
        direction="min",
        includes=["onnxruntime_fp32"],
        objective="throughput",
        batch_sizes=[1, 16],
        thread_counts=[1, 2],
        no_cache=True,
    )
    table = optimizer.results()
    assert table["threads"].isin([1, 2]).all()
    # 16 rows in one call are faster than 16 calls
    assert (table["throughput"] > 1.5e3 / table["latency"]).all()
    model, _ = optimizer.get_best_model(accelerator="onnxruntime")
    assert model.thread_num == table.loc["onnxruntime_fp32", "threads"]
    # a score of 0 is no reason to divide by it
    assert optimizer.get_best_model(accuracy_criterion=0.01)[1]


@pytest.mark.slow
def test_memory_of_each_model_is_measured_where_it_is_what_counts():
    model = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.Linear(2000, 10))
    optimizer = search(model, torch.rand(2, 2000), includes=["bf16"], objective="memory")
    memory = optimizer.results()["memory"]
    megabytes = 2000 * 2010 * 4 / 2**20
    assert megabytes < memory["original"] < megabytes + 40
    assert memory["bf16"] > 0
    optimizer.get_best_model()


@pytest.mark.slow
def test_the_default_walk_finishes(images):
    torch.manual_seed(1)
    optimizer = search(Convolutional(), images, validation_data=images, metric=agreement)
    table = optimizer.results()
    assert len(table) == 11
    assert table.loc["openvino_int8", "status"] in WORKS
    assert table.loc["onnxruntime_int8_qlinear", "status"] in WORKS


BEFORE = InferenceOptimizer()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BEFORE.summary(), "no optimization result. You should call .optimize"),
        (lambda: BEFORE.get_model("bf16"), "no optimized model. You should call .optimize"),
        (lambda: BEFORE.get_best_model(), "You should call .optimize() before get_best_model()"),
        (lambda: search(3, torch.rand(1, 2)), "model should be a nn module."),
        (lambda: search(Recurrent(), 3), "training_data must be a DataLoader"),
        (lambda: search(Recurrent(), []), "training_data holds no batch"),
        (
            lambda: search(Recurrent(), torch.rand(2, 3, 6), direction="up"),
            "Only support direction 'min', 'max'.",
        ),
        (
            lambda: search(Recurrent(), torch.rand(2, 3, 6), objective="fun"),
            "objective should be one of",
        ),
        (
            lambda: search(Recurrent(), torch.rand(2, 3, 6), thread_num=0),
            "thread_num should be a positive integer",
        ),
        (
            lambda: search(Recurrent(), torch.rand(2, 3, 6), batch_sizes=[]),
            "batch_sizes should be a list",
        ),
        (
            lambda: search(Recurrent(), torch.rand(2, 3, 6), metric=agreement),
            "needs data that hold targets",
        ),
    ],
    ids=[
        "summary", "get_model", "best", "model", "data", "empty", "direction", "objective",
        "threads", "batches", "metric",
    ],
)  # fmt: skip
def test_wrong_calls_are_refused(call, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: o.get_model("nonsense"), "There is no method 'nonsense'"),
        (lambda o: o.get_model("openvino_int8"), "Unable to get the specified model"),
        (lambda o: o.get_best_model(accelerator="tpu"), "Only support accelerator None"),
        (lambda o: o.get_best_model(precision="int2"), "Only support precision 'int8'"),
        (lambda o: o.get_best_model(precision="int8"), "Don't find related model"),
        (lambda o: o.get_best_model(use_ipex=True), "Don't find related model"),
        (lambda o: o.get_best_model(accuracy_criterion=-1), "accuracy_criterion should be"),
    ],
    ids=["unknown", "untried", "accelerator", "precision", "int8", "ipex", "criterion"],
)
def test_models_that_are_not_there_are_refused(optimizer, call, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        call(optimizer)


@pytest.mark.slow
def test_a_criterion_needs_a_metric():
    optimizer = search(Recurrent(), torch.rand(2, 3, 6), includes=[])
    with refused("argument-missing", "validation_data"):
        optimizer.get_best_model(accuracy_criterion=0.1)


@pytest.mark.slow
def test_data_that_do_not_fit_the_model_are_refused():
    with pytest.raises(UsageError, match="training_data is incompatible with your model input"):
        search(Recurrent(), torch.rand(2, 3, 7), includes=[])


@pytest.mark.slow
def test_a_metric_that_does_not_fit_is_refused(images):
    with pytest.raises(UsageError, match="Your metric is incompatible with validation_data"):
        search(Convolutional(), images, validation_data=images, metric=mean_square, includes=[])
