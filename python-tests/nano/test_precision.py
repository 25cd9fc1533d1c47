"""Precisions as values: equal to their names, and known in one table."""

import copy
import pickle

import pytest
from refusals import refused

from bigdl.nano.acceleration import PRECISIONS, Precision, find_method, methods
from bigdl.nano.acceleration.search.trial import SearchOptions
from bigdl.nano.openvino import CompiledNetwork
from bigdl.nano.pytorch import InferenceOptimizer


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_is_its_name_also_in_another_process(name):
    precision = PRECISIONS[name]
    for each in (precision, copy.deepcopy(precision), pickle.loads(pickle.dumps(precision))):
        assert (each, each.name, f"{each}", repr(each)) == (name, name, name, repr(name))
        assert {name: 1}[each] == 1
        assert each.bits == precision.bits


def test_fewer_bits_may_differ_more_from_the_original_where_only_they_are_rounded():
    in_order = ["fp32", "fp16", "bf16", "int4"]
    bounds = [PRECISIONS[name].error_bound for name in in_order]
    assert bounds == sorted(bounds)
    assert [each for each in PRECISIONS if PRECISIONS[each].quantized] == ["int8", "int4"]
    assert [each for each in PRECISIONS if PRECISIONS[each].needs_calibration] == ["int8"]


def test_methods_have_a_precision_of_the_table():
    assert find_method("openvino_int4_weight_only").get_precision().bits == 4
    assert all(isinstance(each.precision, Precision) for each in methods("torch").values())
    assert SearchOptions(precision=(PRECISIONS["bf16"], "int8")).precision == ("bf16", "int8")


def test_an_unknown_precision_is_refused_by_its_name():
    import torch

    with refused("argument-value", "int2"):
        InferenceOptimizer.quantize(torch.nn.Linear(2, 2), precision="int2")
    with refused("argument-value", "int2"):
        CompiledNetwork("missing.xml", precision="int2")
