"""Integers in other runtimes are those of the original, or are refused in one sentence."""

import copy
import pickle

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.friesian.models import DeepFM
from bigdl.nano.openvino import CompiledNetwork, SplitNetwork
from bigdl.nano.pytorch import InferenceOptimizer

openvino = pytest.importorskip("openvino")


class Table(nn.Module):
    def __init__(self, rows=10):
        super().__init__()
        self.table = nn.Embedding(rows, 1)
        self.table.weight.data[:] = torch.arange(float(rows))[:, None]

    def forward(self, ids):
        return self.table(ids)


class Hashed(Table):
    def forward(self, ids):
        return self.table((ids * 2654435761) % 10)


class Remainder(Table):
    def forward(self, ids):
        return self.table(ids % 10)


class Shifted(Table):
    def forward(self, ids):
        return self.table(ids + torch.tensor([0, 3, 5]))


class Looked(Table):
    def forward(self, ids):
        return self.table.weight[ids]


class Numbers(nn.Module):
    def forward(self, ids):
        half = (ids - 2**31).abs() // 3
        return ids * 3, ids.float(), ids, ids > 2**33, ids // 7, ids == 16777217, ids.sum(-1), half


sample = torch.tensor([[1, 2, 3], [2, 0, 4]])


def openvino_of(model, ids=sample):
    return InferenceOptimizer.trace(model, ids, accelerator="openvino")


def same(model, fast, ids):
    expected, actual = model(ids), fast(ids)
    pairs = (
        zip(expected, actual, strict=True) if isinstance(expected, tuple) else [(expected, actual)]
    )
    return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)


@pytest.mark.parametrize("cls", [Remainder, Hashed])
def test_ids_of_64_bits_are_hashed_as_by_the_original(cls):
    model = cls()
    fast = openvino_of(model)
    for ids in (sample, sample + 2**40, sample * 16777213, 2**60 - sample, -sample - 2**31):
        assert same(model, fast, ids)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_whole_numbers_keep_their_values_and_types(dtype):
    model = Numbers()
    fast = openvino_of(model, sample.to(dtype))
    for low, high in ((-100, 100), (-(2**24) - 9, 2**24 + 9), (-(2**28), 2**28)):
        ids = torch.randint(low, high, (40, 3), dtype=dtype)
        ids[0, 0] = min(high - 1, 16777217)
        assert same(model, fast, ids)
    if dtype is torch.int64:
        assert same(model, fast, torch.randint(-(2**60), 2**60, (40, 3)))


@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime", "jit"])
@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_ids_outside_of_a_table_are_refused(accelerator, wrong):
    fast = InferenceOptimizer.trace(Table(), sample, accelerator=accelerator)
    ids = sample.clone()
    ids[1, 1] = wrong
    with pytest.raises(UsageError) as caught:
        fast(ids)
    assert "\n" not in str(caught.value)
    if accelerator == "openvino":
        assert "'ids'" in str(caught.value)
        assert str(wrong) in str(caught.value)


@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime"])
def test_negative_ids_are_refused_after_saving_and_pickling(tmp_path, accelerator):
    fast = InferenceOptimizer.trace(Table(), sample, accelerator=accelerator)
    InferenceOptimizer.save(fast, tmp_path / "model")
    loaded = InferenceOptimizer.load(tmp_path / "model")
    for model in (fast, loaded, pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        with refused("data-value", "'ids'", "-2"):
            model(-sample[:1] + 1)


@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime"])
def test_negative_indices_stay_where_the_original_takes_them(accelerator):
    model = Looked()
    fast = InferenceOptimizer.trace(model, sample, accelerator=accelerator)
    assert same(model, fast, sample - 4)
    with pytest.raises(UsageError):
        fast(sample - 11)


def test_computed_ids_are_compared_with_the_table():
    model = Shifted()
    fast = openvino_of(model)
    assert same(model, fast, torch.tensor([[9, 6, 4]]))
    with refused("data-value", "'ids'", "10"):
        fast(torch.tensor([[0, 7, 0]]))


def test_what_cannot_be_computed_in_64_bits_is_refused():
    class Bits(Table):
        def forward(self, ids):
            return self.table((ids ^ (ids >> 1 if False else 5)) & 7)

    model = Bits()
    fast = openvino_of(model)
    assert same(model, fast, sample)
    with refused("data-value", "'ids'", "109951"):
        fast(sample + 2**40)


def test_constants_of_64_bits_are_refused():
    class Catalogue(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ids", torch.tensor([2**40 + 1, 2**40 + 2, 2**40 + 3]))

        def forward(self, scores):
            return self.ids[scores.argmax(-1)]

    scores = torch.rand(4, 3)
    with refused("model-unsupported", "32"):
        openvino_of(Catalogue(), scores)
    network = openvino.convert_model(Catalogue(), example_input=scores)
    with refused("model-unsupported", "32"):
        CompiledNetwork(network)
    fast = InferenceOptimizer.trace(Catalogue(), scores, accelerator="onnxruntime")
    assert same(Catalogue(), fast, scores)


def test_an_id_that_does_not_fit_a_smaller_type_is_refused():
    network = CompiledNetwork(openvino.convert_model(Table(), example_input=sample.int()))
    with refused("data-value", "int32", "1099511627776"):
        network.infer([np.array([[2**40]])])


def test_a_split_network_looks_at_the_integers_of_each_part():
    class Ranking(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = Table(10), Table(20)

        def forward(self, user, item):
            return torch.relu(torch.cat([self.users(user % 10), self.items(item)], 1) @ weights)

    weights = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    user, item = torch.tensor([3]), torch.tensor([4])
    model = Ranking()
    fast = InferenceOptimizer.trace(model, (user, item), accelerator="openvino")
    split = SplitNetwork(fast.nano_network, common=[0])
    big = 2**40 + 7
    rows = split.own([np.array([4, 19])])
    result = split.joint(split.common([np.array([big])]), rows)[0]
    expected = model(torch.tensor([big, big]), torch.tensor([4, 19]))
    np.testing.assert_allclose(result, expected.detach(), rtol=1e-6)
    for wrong in (-1, 20):
        with pytest.raises(UsageError, match=str(wrong)):
            split.own([np.array([4, wrong])])


def test_float64_is_kept_or_its_loss_is_said():
    model = nn.Linear(3, 2).double()
    x = torch.rand(2, 3, dtype=torch.float64)
    for accelerator in ("onnxruntime", "jit"):
        fast = InferenceOptimizer.trace(model, x, accelerator=accelerator)
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-14, atol=1e-15)
    with pytest.warns(UserWarning, match="Linear computes in float64, which OpenVINO computes in"):
        fast = openvino_of(model, x)
    assert fast(x).dtype is torch.float64


class Columns(nn.Module):
    """Tables of different sizes, indexed by the columns of one matrix of ids."""

    def __init__(self):
        super().__init__()
        self.users, self.items, self.ages = Table(1200), Table(6), Table(90)

    def forward(self, ids):
        users, items = self.users(ids[:, 0]), self.items(ids[:, 1:2]).squeeze(1)
        return torch.cat([users, items, self.ages(ids[:, -1])], 1)


def test_each_column_of_a_matrix_of_ids_has_its_own_table():
    model = Columns()
    fast = openvino_of(model, torch.tensor([[5, 1, 3]]))
    ids = torch.tensor([[5, 1, 3], [1199, 5, 0], [7, 0, 89]])
    assert same(model, fast, ids)
    for wrong in ([5, 6, 1], [1200, 1, 1], [5, 1, 90], [2**40, 1, 1], [5, -1, 1]):
        with refused("data-value", "'ids'"):
            fast(torch.tensor([wrong]))


def test_ids_that_share_one_table_by_offsets_are_computed():
    model = DeepFM({"user": 944, "item": 1683, "kind": 5}, ["price"], dim=4, hidden=(8,)).eval()
    one = torch.tensor([1])
    fast = openvino_of(model, (one, one, one, torch.rand(1)))
    for user, item, kind in ((943, 1682, 4), (700, 5, 0), (2**33, 3, 9), (-1, -1, -1)):
        row = (*(torch.tensor([each]) for each in (user, item, kind)), torch.tensor([0.5]))
        torch.testing.assert_close(fast(*row), model(*row))


def test_positions_that_are_counted_index_their_table():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = Table(100), Table(20)

        def forward(self, ids, mask):  # as RoBERTa counts them
            return self.words(ids) + self.places(torch.cumsum(mask, 1) * mask + 1)

    model = Positions()
    ids, mask = torch.randint(0, 100, (2, 18)), torch.ones(2, 18, dtype=torch.int64)
    fast = openvino_of(model, (ids, mask))
    assert torch.equal(fast(ids, mask), model(ids, mask))
    with refused("data-value", "row 73"):
        fast(ids, mask + 1)
