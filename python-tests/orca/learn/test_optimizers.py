"""Optimizers and schedules of BigDL 2.x over those of torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_training import largest_difference
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.orca.learn import optimizers as orca
from bigdl.orca.learn.optimizers import schedule
from bigdl.orca.torch import RowwiseAdagrad


def net():
    torch.manual_seed(3)
    return nn.Linear(3, 2).double()


def trained(make, steps=5, scheduler=None):
    """The weights after a few steps, and the learning rate of each."""
    model = net()
    optimizer = make(model)
    scheduler = scheduler(optimizer) if scheduler else None
    rates = []
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model.state_dict(), rates


SAME = {
    "sgd": (
        orca.SGD(1e-4, momentum=0.9, weightdecay=0.1),
        lambda ps: torch.optim.SGD(ps, 1e-4, momentum=0.9, dampening=0.9, weight_decay=0.1),
    ),
    "nesterov": (
        orca.SGD(1e-4, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.SGD(ps, 1e-4, momentum=0.9, nesterov=True),
    ),
    "adagrad": (
        orca.Adagrad(0.1, 0.2, 0.3),
        lambda ps: torch.optim.Adagrad(ps, 0.1, lr_decay=0.2, weight_decay=0.3),
    ),
    "adadelta": (orca.Adadelta(), lambda ps: torch.optim.Adadelta(ps, 1.0, eps=1e-10)),
    "adam": (
        orca.Adam(0.01, beta1=0.8, beta2=0.99, epsilon=1e-6),
        lambda ps: torch.optim.Adam(ps, 0.01, (0.8, 0.99), 1e-6),
    ),
    "parallel adam": (orca.ParallelAdam(), lambda ps: torch.optim.Adam(ps)),
    "adamax": (orca.Adamax(), lambda ps: torch.optim.Adamax(ps, eps=1e-38)),
    "rmsprop": (orca.RMSprop(0.01), lambda ps: torch.optim.RMSprop(ps, 0.01, 0.99)),
}


@pytest.mark.parametrize("name", SAME)
def test_an_optimizer_is_that_of_torch(name):
    creator, plain = SAME[name]
    found, rates = trained(lambda model: creator(model, {}))
    expected, _ = trained(lambda model: plain(model.parameters()))
    assert largest_difference(found, expected) == 0
    assert len(set(rates)) == 1
    assert creator.get_optimizer() is creator


def test_ftrl_follows_its_formula():
    lr, power, start, l1, l2, shrinkage = 0.1, -0.5, 0.1, 0.05, 0.01, 0.02
    w = np.array([0.5, -0.3])
    parameter = nn.Parameter(torch.tensor(w))
    optimizer = orca.Ftrl(lr, power, start, l1, l2, shrinkage)(nn.ParameterList([parameter]))
    n, z = np.full(2, start), np.zeros(2)
    for gradient in ([1.0, -2.0], [0.01, 0.0], [-0.3, 0.7]):
        g = np.array(gradient)
        new = n + g * g
        z += g + 2 * shrinkage * w - (new**-power - n**-power) / lr * w
        n = new
        w = np.where(np.abs(z) > l1, (np.sign(z) * l1 - z) / (n**-power / lr + 2 * l2), 0.0)
        parameter.grad = torch.tensor(g)
        optimizer.step()
        assert np.allclose(parameter.detach().numpy(), w, atol=1e-12)


RATES = {
    "default": (schedule.Default(0.5), lambda n: 1 / (1 + 0.5 * n)),
    "poly": (schedule.Poly(2, 4), lambda n: max(0, 1 - n / 4) ** 2),
    "exponential": (schedule.Exponential(2, 0.25), lambda n: 0.25 ** (n / 2)),
    "stairs": (schedule.Exponential(2, 0.25, True), lambda n: 0.25 ** (n // 2)),
    "step": (schedule.Step(2, 0.1), lambda n: 0.1 ** (n // 2)),
    "multistep": (schedule.MultiStep([1, 3], 0.1), lambda n: 0.1 ** ((n >= 1) + (n >= 3))),
    "warmup": (schedule.Warmup(0.5), lambda n: 1 + 0.5 * n),
    "sequence": (
        schedule.SequentialSchedule(9).add(schedule.Warmup(0.5), 2).add(schedule.Step(2, 0.1), 9),
        lambda n: [1, 1.5, 2, 2, 0.2, 0.2][n],
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_a_schedule_follows_its_formula(name):
    creator, formula = RATES[name]
    make = lambda model: torch.optim.SGD(model.parameters(), 1.0)  # noqa: E731
    _, rates = trained(make, 6, scheduler=creator)
    assert rates == pytest.approx([formula(n) for n in range(6)])
    assert creator.get_scheduler() is creator


def test_a_schedule_goes_on_from_its_state():
    creator = schedule.Poly(2, 9)
    rates = []
    state = None
    for _ in range(6):
        optimizer = torch.optim.SGD(net().parameters(), 1.0)
        scheduler = creator(optimizer)
        if state:
            optimizer.load_state_dict(state[0])
            scheduler.load_state_dict(state[1])
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        state = optimizer.state_dict(), scheduler.state_dict()
    assert rates == pytest.approx([(1 - n / 9) ** 2 for n in range(6)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: orca.Adam(0), "Adam: learningrate should be a positive number, got 0"),
        (lambda: orca.SGD(learningrates=[1]), "pass a torch.optim.SGD with parameter groups"),
        (lambda: orca.SGD(learningrate_schedule=3), "learningrate_schedule should be a schedule"),
        (lambda: schedule.Poly("a", 3), "Poly: power should be a number, got 'a'"),
        (lambda: schedule.Step(0, 0.1), "Step: step_size should be a positive integer, got 0"),
        (lambda: schedule.MultiStep(3, 0.1), "step_sizes should be a list of ints, got 3"),
        (lambda: schedule.Plateau("a", mode="up"), "mode should be one of 'min', 'max', got 'up'"),
        (
            lambda: schedule.SequentialSchedule(1).add(schedule.Plateau("a"), 3),
            "expected a per-update schedule, got Plateau",
        ),
    ],
)
def test_what_a_schedule_cannot_be(make, message):
    with pytest.raises(UsageError) as refused:
        make()
    assert message in str(refused.value)


# -- row-wise Adagrad ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    batches=st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4),
    start=st.sampled_from([0.0, 0.5]),
)
def test_rowwise_adagrad_divides_a_rows_rate_by_the_root_of_its_mean_squares(batches, start):
    torch.manual_seed(0)
    table = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1, initial_accumulator_value=start)
    weight, sums = table.weight.detach().numpy().copy(), np.full(6, start)
    for ids in batches:
        factors = torch.randn(len(ids), 3, dtype=torch.float64)
        gradient = np.zeros((6, 3))
        np.add.at(gradient, ids, factors.numpy())
        sums += (gradient**2).mean(1)
        weight -= 0.1 * gradient / (np.sqrt(sums) + 1e-10)[:, None]
        optimizer.zero_grad()
        (table(torch.tensor(ids, dtype=torch.int64)) * factors).sum().backward()
        optimizer.step()
    assert np.allclose(table.weight.detach(), weight, rtol=0, atol=1e-12)
    assert np.allclose(optimizer.state[table.weight]["sum"], sums, rtol=1e-12)


def test_rowwise_adagrad_is_adagrad_where_gradients_are_dense():
    found, _ = trained(lambda model: RowwiseAdagrad(model.parameters(), lr=0.1))
    expected, _ = trained(lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1))
    assert largest_difference(found, expected) <= 1e-12


def test_rowwise_adagrad_goes_on_by_row_when_a_gradient_is_dense():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
    for dense in (False, True):
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        if dense:
            table.weight.grad = table.weight.grad.to_dense()
        optimizer.step()
    assert optimizer.state[table.weight]["sum"].tolist() == [0, 2, 0, 0]
