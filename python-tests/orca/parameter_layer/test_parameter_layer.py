"""The parts of the parameter layer, without a cluster."""

import numpy as np
import pytest
import torch
from layer_reference import SHAPES, SIZES, Given, grouped, hyper_of, parameters, whole
from refusals import refused

from bigdl.orca.learn.optimizers.ftrl import TorchFtrl
from bigdl.orca.parameter_layer.lars import LARS
from bigdl.orca.parameter_layer.messages import (
    CODECS,
    FrameReader,
    codec_for,
    frames_of,
    pack,
    unpack,
)
from bigdl.orca.parameter_layer.optimizers import check_optimizer, cut_state, joined_state
from bigdl.orca.parameter_layer.plan import FlatLayout, LayerPlan, LayerStep, slice_bounds
from bigdl.orca.parameter_layer.rank import Contribution, Rank, RankState, changed, merge, merged

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
    "ftrl": (TorchFtrl, {"lr": 0.1, "l1": 0.01}),
}


class Sliced:
    """All ranks of a layer in this process, and the gradients of a rank given by a function."""

    def __init__(self, make, ranks, gradient=None, **plan):
        self.parameters = parameters()
        self.optimizer = make(self.parameters)
        groups = tuple(i for i, g in enumerate(self.optimizer.param_groups) for _ in g["params"])
        plan["needs_norms"] = isinstance(self.optimizer, LARS)
        self.plan = LayerPlan(SIZES, groups, type(self.optimizer), ranks, **plan)
        self.geometry = self.plan.geometry
        self.ranks = [Rank(self.plan, n) for n in range(ranks)]
        vector = self.geometry.flatten([p.detach().numpy() for p in self.parameters])
        state = self.optimizer.state_dict()["state"]
        self.states = [
            RankState(vector[low:high].copy(), cut_state(state, self.geometry, n))
            for n, (low, high) in enumerate(self.geometry.bounds)
        ]
        self.gradient = gradient

    def step(self, number):
        step = LayerStep(0, number, hyper_of(self.optimizer))
        weights = [r.weights(s) for r, s in zip(self.ranks, self.states, strict=True)]
        pieces = []
        for rank, state in zip(self.ranks, self.states, strict=True):
            own, state.residual = rank.gradients(
                self.gradient(rank.rank), step, weights, state.residual
            )
            pieces.append(own)
        sums = [r.reduce([p[r.rank] for p in pieces]) for r in self.ranks]
        sums = [Contribution.unpack(s.pack()) for s in sums]
        for summed in sums:
            summed.gradient = summed.gradient.copy()
        statistics = None
        if self.plan.needs_statistics:
            statistics = [
                r.statistics(s, t) for r, s, t in zip(self.ranks, sums, self.states, strict=True)
            ]
        for n, (rank, found) in enumerate(zip(self.ranks, sums, strict=True)):
            self.states[n] = RankState.unpack(self.states[n].pack())
            rank.update(step, found, self.states[n], statistics)

    @property
    def weights(self):
        return np.concatenate([s.weights for s in self.states])


@pytest.mark.slow_cases("momentum-7")
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_make_the_updates_of_the_whole_to_the_last_bit(name, ranks):
    kind, options = OPTIMIZERS[name]

    def make(values):
        if kind is TorchFtrl:
            return kind(values, **options)
        return kind(grouped(values), **options)

    layer = Sliced(make, ranks, Given)
    check_optimizer(layer.optimizer)
    for number in range(12):
        layer.step(number)
    expected, optimizer = whole(make, ranks, 12)
    assert np.array_equal(layer.weights, expected)
    state = joined_state([s.optimizer for s in layer.states], layer.geometry, SHAPES)
    known = optimizer.state_dict()["state"]
    assert state.keys() == known.keys()
    for number, values in known.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(state[number][key]), torch.as_tensor(value)), key
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


@pytest.mark.parametrize("name", CODECS)
def test_a_rank_sends_no_more_than_an_all_reduce_by_slices(name):
    """At most P (N - 1) / N numbers of gradients to others, and as many of weights."""
    ranks, size = 4, 100_000
    rank = Rank(LayerPlan((size,), (0,), torch.optim.SGD, ranks, name), 1)
    state = RankState(vector(size // ranks), [{}])
    weights = rank.weights(state)
    pieces, _ = rank.gradients(Given(1), LayerStep(0, 0, ()), [weights] * ranks)
    headers = 2000 + size // 1024 * 4
    to_others = sum(len(piece) for owner, piece in enumerate(pieces) if owner != 1)
    assert to_others <= BYTES[name] * size * (ranks - 1) / ranks + headers
    of_weights = BYTES[codec_for(name).weights]
    assert len(weights) * (ranks - 1) <= of_weights * size * (ranks - 1) / ranks + headers


def sgd(values):
    return torch.optim.SGD(grouped(values), lr=0.1, momentum=0.9)


def trained(make=sgd, ranks=3, steps=8, gradient=Given, **plan):
    layer = Sliced(make, ranks, gradient, **plan)
    for number in range(steps):
        layer.step(number)
    return layer


@pytest.mark.parametrize("rows", [[3, 1, 2], [4, 0, 1]], ids=["uneven", "one without rows"])
def test_gradients_count_as_much_as_their_rows(rows):
    layer = trained(gradient=lambda rank: Given(rank, rows[rank]))
    expected, _ = whole(sgd, 3, 8, rows)
    assert np.array_equal(layer.weights, expected)


def test_a_step_without_any_row_changes_nothing():
    layer = trained(steps=1)
    before = [state.pack() for state in layer.states]
    layer.gradient = lambda rank: Given(rank, 0)
    layer.step(1)
    for state in layer.states:
        state.records.pop()
    assert [state.pack() for state in layer.states] == before


def test_a_gradient_is_clipped_as_a_whole():
    def clip(values):
        for parameter in values:
            parameter.grad.clamp_(-0.5, 0.5)
        torch.nn.utils.clip_grad_norm_(values, 2.0)

    layer = trained(clamp=(-0.5, 0.5), norm=2.0)
    expected, _ = whole(sgd, 3, 8, clip=clip)
    assert np.allclose(layer.weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 4])
def test_lars_looks_at_whole_parameters(ranks):
    def make(values):
        return LARS(grouped(values), lr=0.5, weight_decay=0.01)

    layer = trained(make, ranks, norm=5.0)
    check_optimizer(layer.optimizer)
    expected, _ = whole(make, ranks, 8, clip=lambda v: torch.nn.utils.clip_grad_norm_(v, 5.0))
    assert np.allclose(layer.weights, expected, rtol=0, atol=1e-6)


def test_a_parameter_without_gradient_is_left_alone():
    """Not even its decay: None is not 0."""

    class Without(Given):
        def compute(self, step, weights, buffers):
            found = super().compute(step, weights, buffers)
            found.absent = [3] if self.rank else [3, 4]
            return found

    layer = trained(lambda v: torch.optim.SGD(v, lr=0.1, weight_decay=0.5), 2, gradient=Without)
    parts = layer.geometry.parts(layer.weights)
    expected = [p.detach().numpy().reshape(-1) for p in parameters()]
    assert [np.array_equal(a, b) for a, b in zip(parts, expected, strict=True)] == [
        number == 3 for number in range(len(SHAPES))
    ]


def test_a_state_is_cut_anew_for_another_number_of_ranks():
    def make(values):
        return torch.optim.Adam(grouped(values), lr=0.01)

    one = trained(make, 3, steps=5, gradient=lambda rank: Given(0))
    state = joined_state([s.optimizer for s in one.states], one.geometry, SHAPES)
    other = Sliced(make, 4, lambda rank: Given(0))
    for rank, (low, high) in enumerate(other.geometry.bounds):
        cut = cut_state(state, other.geometry, rank)
        other.states[rank] = RankState(one.weights[low:high].copy(), cut)
    for number in range(5, 8):
        one.step(number)
        other.step(number)
    assert np.allclose(one.weights, other.weights, rtol=0, atol=1e-6)


def test_a_class_of_ones_own_can_say_that_it_is_elementwise():
    class Own(torch.optim.SGD):
        elementwise = True

    check_optimizer(Own(parameters(), lr=0.1))
    assert not hasattr(torch.optim.SGD, "elementwise")


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_other_optimizers_are_refused(make):
    with refused("optimizer-unsupported"):
        check_optimizer(make(parameters()))


def test_other_dtypes_are_refused():
    with refused("model-unsupported", "float32", "float64"):
        check_optimizer(torch.optim.SGD([torch.zeros(2, dtype=torch.float64)], lr=0.1))


# -- geometry -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_slices_tile_the_vector(ranks):
    geometry = FlatLayout(SIZES, ranks)
    assert geometry.bounds[0][0] == 0
    assert geometry.bounds[-1][1] == geometry.total == sum(SIZES)
    sizes = [high - low for low, high in geometry.bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    found = [
        (s.parameter, s.stop - s.start) for rank in range(ranks) for s in geometry.segments(rank)
    ]
    for number, size in enumerate(SIZES):
        assert sum(count for parameter, count in found if parameter == number) == size


def test_fewer_numbers_than_ranks_are_refused():
    with refused("argument-value", "4"):
        slice_bounds(3, 4)


# -- codecs ---------------------------------------------------------------------------------------


def vector(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


ERRORS = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5 / 127}
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 5000])
def test_numbers_arrive_nearly_as_they_were_sent(name, count):
    codec, values = codec_for(name), vector(count)
    data = codec.encode(values)
    found = codec.decode(data)
    assert found.dtype == np.float32
    assert found.shape == values.shape
    assert len(data) <= BYTES[name] * count + 4 * -(-count // 1024)
    bound = ERRORS[name] * (np.abs(values).max(initial=0) if name == "int8" else np.abs(values))
    assert (np.abs(found - values) <= bound * (1 + 1e-5)).all()


def test_bf16_rounds_to_the_nearest_as_torch_does():
    special = [0.0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-40]
    values = np.concatenate([vector(10_000), np.array(special, np.float32)])
    codec = codec_for("bf16")
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(codec.decode(codec.encode(values)), expected)
    assert np.isnan(codec.decode(codec.encode(np.array([np.nan], np.float32))))[0]


def test_rounding_does_not_shrink_a_sum_where_cutting_does():
    """BigDL 2.x cut the lower two bytes, always towards zero."""
    values = np.abs(vector(10_000)) + 1
    cut = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    codec = codec_for("bf16")
    rounded = codec.decode(codec.encode(values))
    assert abs(rounded.mean() - values.mean()) < abs(cut.mean() - values.mean()) / 20


def test_fp16_has_no_infinity_of_its_own_making():
    codec = codec_for("fp16")
    values = np.array([1e6, -1e6, np.inf, 1.0], np.float32)
    assert codec.decode(codec.encode(values)).tolist() == [65504.0, -65504.0, np.inf, 1.0]


def test_what_int8_takes_from_a_gradient_comes_back():
    """A constant gradient: the sum of what arrives follows the sum of what was meant."""
    geometry = FlatLayout((2000,), 1)
    rank = Rank(LayerPlan((2000,), (0,), torch.optim.SGD, 1, "int8"), 0)
    gradient, residual, arrived = vector(2000), None, np.zeros(2000, np.float64)
    for _ in range(50):
        (piece,), residual = rank.encoded_parts(gradient, geometry.cut({}), residual)
        arrived += codec_for("int8").decode(piece)
    step = np.abs(gradient).max() / 127
    assert np.abs(arrived - 50.0 * gradient).max() < 2 * step
    assert geometry.total == 2000


def test_unknown_compression_is_refused():
    with refused("argument-value", "'fp32'", "'fp16'", "'bf16'"):
        codec_for("fp8")


# -- messages and buffers -------------------------------------------------------------------------


def test_messages_keep_documents_and_arrays():
    arrays = [
        np.arange(5, dtype=np.int8),
        np.zeros((0, 3)),
        np.array(2.5),
        b"raw",
        b"",
    ]
    doc, *found = unpack(pack([{"a": [1, None, 0.1]}, *arrays]))
    assert doc == {"a": [1, None, 0.1]}
    assert [f.tolist() for f in found] == [[0, 1, 2, 3, 4], [], 2.5, list(b"raw"), []]
    assert found[0].dtype == np.int8


def test_frames_arrive_in_any_order(monkeypatch):
    from bigdl.orca.parameter_layer import messages

    monkeypatch.setattr(messages, "PAYLOAD_BYTES", 3)
    sent = [
        *frames_of(b"G", 1, b"of rank one"),
        *frames_of(b"G", 0, b""),
        *frames_of(b"S", 2, b"x"),
    ]
    inbox = FrameReader(reversed(sent))
    assert [bytes(m) for m in inbox.messages(b"G")] == [b"", b"of rank one"]
    assert bytes(inbox.message(b"S")) == b"x"
    assert inbox.message(b"R") is None


def test_frames_on_lines_that_nobody_asked_for_are_passed_over():
    sent = [frame for line in range(4) for frame in frames_of(b"G", line, b"on it", line)]
    assert len(FrameReader(sent).messages(b"G")) == 4
    assert len(FrameReader(sent, (0, 2)).messages(b"G")) == 2


def test_buffers_are_merged_by_rows():
    mean = merge([np.float32([1, 2]), np.float32([3, 6])], [1, 3])
    assert mean.tolist() == [2.5, 5.0]
    assert mean.dtype == np.float32
    assert merge([np.array(3), np.array(7)], [5, 5]) == 7
    third = np.float32([0.1])
    assert merge([third, third, third], [1, 1, 1]).tobytes() == third.tobytes()


def test_only_changed_buffers_travel():
    before = [np.zeros(2), np.ones(2)]
    assert list(changed(before, [np.zeros(2), np.ones(2) * 2])) == [1]
    found = merged([(2, {0: np.float64([1.0])}), (0, {}), (2, {0: np.float64([2.0])})])
    assert found[0].tolist() == [1.5]
