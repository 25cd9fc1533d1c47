"""The parts of a search that need no process: choice, timing, comparison, fingerprints."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.median_interval import MedianInterval
from bigdl.nano.acceleration.method import methods
from bigdl.nano.acceleration.search.results import Results, choose, fingerprint, render
from bigdl.nano.acceleration.search.trial import (
    LatencyMeasurement,
    SearchOptions,
    Trial,
    time_against,
    time_alone,
)
from bigdl.nano.pytorch import InferenceOptimizer


def chosen(**keywords):
    everything = InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD
    return choose(methods("torch"), everything, SearchOptions(**keywords))


@pytest.mark.parametrize(
    ("keywords", "count"),
    [
        ({}, 11),
        ({"search_mode": "all"}, 27),
        ({"search_mode": "grid"}, 27),
        ({"accelerator": ("openvino",)}, 5),
        ({"precision": ("bf16", "int8")}, 17),
        ({"accelerator": ("openvino", "onnxruntime"), "precision": ("int8",)}, 4),
        ({"includes": ["openvino_int8"]}, 2),
        ({"includes": ["original", "bf16"]}, 2),
        ({"includes": []}, 1),
        ({"excludes": ["openvino_int8", "original"]}, 10),
    ],
    ids=[
        "default", "all", "grid", "openvino", "precisions", "both", "one", "original", "none",
        "excludes",
    ],
)  # fmt: skip
def test_as_many_methods_are_tried_as_in_bigdl_2(keywords, count):
    names = chosen(**keywords)
    assert len(names) == count
    assert names[0] == "original"


def test_extended_tries_all_that_there_is():
    assert chosen(search_mode="extended") == list(methods("torch"))


def test_a_search_does_not_change_the_next():
    chosen(includes=["fp32_channels_last"])
    assert "fp32_channels_last" not in chosen()


def test_ipex_can_be_left_out():
    assert not any("ipex" in name for name in chosen(use_ipex=False))
    assert all("ipex" in name for name in chosen(use_ipex=True)[1:])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"search_mode": "best"}, "search_mode should be one of"),
        ({"accelerator": "openvino"}, "accelerator must be a tuple."),
        ({"precision": "int8"}, "precison must be a tuple."),
        (
            {"accelerator": ("tpu",)},
            "Only support accelerator None, 'onnxruntime', 'openvino' and 'jit'.",
        ),
        ({"precision": ("int2",)}, "Only support precision 'int8', 'bf16'"),
        ({"includes": ["nonsense"]}, "There is no method 'nonsense' to include"),
        ({"includes": "bf16"}, "includes must be a list"),
    ],
    ids=["mode", "accelerator", "precision", "tpu", "int2", "includes", "string"],
)
def test_wrong_choices_are_refused(keywords, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        chosen(**keywords)


def test_a_precision_of_new_methods_alone_is_searched_where_it_is_named():
    assert chosen(precision=("int4",)) == ["original", "openvino_int4_weight_only"]
    assert "openvino_int4_weight_only" not in chosen(search_mode="all")


def test_an_unknown_method_to_exclude_is_a_warning():
    with pytest.warns(UserWarning, match="no method 'nonsense' to exclude"):
        chosen(excludes=["nonsense"])


def results_of(directory, accuracies, direction="max", **attributes):
    trials = [
        Trial(name, accuracy=accuracy, latency=2.0 - i, speedup=1.0 + i, **attributes)
        for i, (name, accuracy) in enumerate(accuracies.items())
    ]
    directory.mkdir(exist_ok=True)
    return Results(trials, directory, direction, "latency")


@pytest.mark.parametrize(
    ("direction", "original", "accuracy", "criterion", "kept"),
    [
        ("max", 0.9, 0.86, 0.05, True),
        ("max", 0.9, 0.85, 0.05, False),
        ("max", 0.9, 0.99, 0.0, True),
        ("min", 0.2, 0.21, 0.06, True),
        ("min", 0.2, 0.22, 0.06, False),
        ("max", 0.0, 0.0, 0.05, True),
        ("max", 0.0, -0.1, 0.05, False),
        ("min", 0.0, 0.0, 0.05, True),
        ("max", -2.0, -2.05, 0.05, True),
        ("max", -2.0, -2.2, 0.05, False),
        ("max", 0.9, float("nan"), 0.5, False),
        ("max", 0.9, 0.1, None, True),
    ],
)
def test_accuracy_is_compared_with_the_original_s(
    tmp_path, direction, original, accuracy, criterion, kept
):
    results = results_of(tmp_path, {"original": original, "bf16": accuracy}, direction)
    assert results.keeps_accuracy("bf16", criterion) is kept


def test_results_can_be_written_and_read(tmp_path):
    results = results_of(tmp_path / "new", {"original": 0.5, "bf16": None}, reason="é", threads=2)
    spreads = MedianInterval.of([2.4, 2.5, 2.7]), MedianInterval.of([1.5])
    results["bf16"].points.append(LatencyMeasurement(1, 8, *spreads))
    results.keep(tmp_path / "kept")
    again = Results.read(tmp_path / "kept")
    assert dict(again) == dict(results)
    assert render(again) == render(results)


def test_results_that_cannot_be_read_are_none(tmp_path):
    assert Results.read(tmp_path) is None
    (tmp_path / "results.json").write_text('{"format": 1}')
    assert Results.read(tmp_path) is None


def test_directories_go_with_their_results(tmp_path):
    directory = tmp_path / "models"
    directory.mkdir()
    results = Results([Trial("original")], directory, "max", "latency")
    assert directory.exists()
    del results
    assert not directory.exists()


class Clock:
    """Blocks of calls that take as long as one says, on a machine that gets slower."""

    def __init__(self, drift: float):
        self.slow, self.drift, self.counts = 1.0, drift, []

    def block(self, seconds):
        def run(count, limit):
            self.counts.append(count)
            self.slow *= self.drift
            return [seconds * self.slow] * count

        return run


def test_a_drift_of_the_machine_does_not_change_the_speedup():
    clock = Clock(1.05)
    timing = time_against(clock.block(0.010), clock.block(0.004), runs=100)
    assert timing.speedup.middle == pytest.approx(2.5, rel=0.06)
    assert not timing.stopped


def test_a_hopeless_model_is_not_timed_further():
    clock = Clock(1.0)
    timing = time_against(clock.block(0.001), clock.block(0.1), runs=100)
    assert timing.stopped
    assert timing.latency.middle == pytest.approx(100)
    assert sum(clock.counts) < 20


def test_slow_models_are_called_less_often():
    clock = Clock(1.0)
    timing = time_alone(clock.block(2.0), runs=100)
    assert timing.latency.middle == 2000
    assert sum(clock.counts) < 30


def test_a_latency_is_what_was_measured():
    """Not what a ratio makes of the original's: that was 0.0019 ms for a call of 0.2 ms."""
    busy = iter([1.0, 1.0, 1.0, 450.0, 470.0, 430.0, 440.0, 450.0, 460.0, 450.0, 440.0, 450.0])

    def original(count, limit):
        return [0.0002 * next(busy, 450.0)] * count

    clock = Clock(1.0)
    timing = time_against(original, clock.block(0.0002), runs=20)
    trial = Trial("bf16", points=[LatencyMeasurement(None, 1, *timing)])
    trial.summarize()
    assert trial.latency == pytest.approx(0.2)
    assert trial.throughput == pytest.approx(5000)


def ranked(tmp_path, figures):
    """Results of methods with these speed-ups, lows and highs."""
    trials = [
        Trial(name, latency=1.0, speedup=middle, speedup_low=low, speedup_high=high)
        for name, (middle, low, high) in figures.items()
    ]
    tmp_path.mkdir(exist_ok=True)
    return Results(trials, tmp_path / "models", "max", "latency")


def test_methods_that_noise_does_not_separate_are_not_ranked(tmp_path):
    results = ranked(
        tmp_path,
        {
            "original": (1.0, 1.0, 1.0),
            "bf16": (1.1, 0.8, 1.4),
            "openvino_fp32": (2.0, 1.8, 2.2),
            "onnxruntime_fp32": (1.9, 1.7, 2.1),
        },
    )
    assert results.ranking(list(results)) == ("openvino_fp32", ["onnxruntime_fp32"])
    assert results.best(list(results)) == "openvino_fp32"
    assert "Not significantly slower than openvino_fp32: onnxruntime_fp32" in render(results)
    assert "2.00x (1.80-2.20)" in render(results)


def test_the_original_stays_where_noise_does_not_separate_it_from_the_fastest(tmp_path):
    results = ranked(tmp_path, {"original": (1.0, 1.0, 1.0), "bf16": (1.1, 0.8, 1.4)})
    assert results.best(list(results)) == "original"
    assert results.best(["bf16"]) == "bf16"


class Scale(torch.nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3) * factor)

    def forward(self, x):
        return x * self.weight


def other_scale():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3) * 2.0)

        def forward(self, x):
            return x + self.weight

    return Scale()


def test_equal_models_have_equal_fingerprints():
    assert fingerprint(Scale()) == fingerprint(Scale())
    assert fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 1)


@pytest.mark.parametrize(
    "other",
    [Scale(3.0), other_scale(), torch.nn.Sequential(Scale())],
    ids=["weights", "code", "structure"],
)
def test_other_models_have_other_fingerprints(other):
    assert fingerprint(Scale()) != fingerprint(other)


def test_a_fingerprint_sees_what_a_function_uses():
    def metric(factor):
        return lambda model: factor

    assert fingerprint(metric(1)) == fingerprint(metric(1))
    assert fingerprint(metric(1)) != fingerprint(metric(2))


def program(tmp_path, monkeypatch, value, name):
    """Return an object of a user's module, which imports another one."""
    (tmp_path / "limits.py").write_text(
        f"LIMIT = [{value}]\n\ndef limited(x):\n    return x[{value}]\n"
    )
    (tmp_path / "models.py").write_text(
        "import functools\n"
        "import types\n"
        "import limits\n"
        "from limits import limited\n"
        f"TABLE = {{'limit': [{value}]}}\n"
        "class Attribute:\n"
        f"    limit = [{value}]\n"
        "class Property:\n"
        "    @functools.cached_property\n"
        "    def limit(self):\n"
        f"        return {value}\n"
        "class Patched:\n"
        "    def __init__(self):\n"
        f"        self.forward = types.MethodType(lambda self, x: x * {value}, self)\n"
        "def table(x):\n"
        "    return TABLE['limit'] + x\n"
        "def helper(x):\n"
        "    return limited(x)\n"
        "def module(x):\n"
        "    return limits.limited(x)\n"
        "def local(x):\n"
        "    from limits import LIMIT\n"
        "    return LIMIT + x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for each in ("models", "limits"):
        sys.modules.pop(each, None)
    importlib.invalidate_caches()
    importlib.import_module("limits")
    made = getattr(importlib.import_module("models"), name)
    return made() if isinstance(made, type) else made


@pytest.mark.parametrize(
    "name", ["Attribute", "Property", "Patched", "table", "helper", "module", "local"]
)
def test_a_fingerprint_sees_values_and_other_modules(tmp_path, monkeypatch, name):
    prints = [fingerprint(program(tmp_path, monkeypatch, value, name)) for value in (6, 6, 3)]
    assert None not in prints
    assert prints[0] == prints[1] != prints[2]


def test_what_cannot_be_pickled_has_no_fingerprint():
    assert fingerprint(i for i in range(3)) is None
