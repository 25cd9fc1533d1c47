import numpy as np
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.learn.trigger import (
    EveryEpoch,
    MaxEpoch,
    MaxIteration,
    MaxScore,
    MinLoss,
    SeveralIteration,
    Trigger,
    TriggerAnd,
    TriggerOr,
    TriggerState,
)


def steps_that_fire(trigger, steps_per_epoch=3, epochs=3):
    states = [
        TriggerState(step // steps_per_epoch, step, epoch_finished=step % steps_per_epoch == 0)
        for step in range(1, steps_per_epoch * epochs + 1)
    ]
    return [state.step for state in states if trigger(state)]


def test_every_epoch_fires_after_the_last_step_of_an_epoch():
    assert steps_that_fire(EveryEpoch()) == [3, 6, 9]


def test_several_iteration_fires_after_every_interval_across_epochs():
    assert steps_that_fire(SeveralIteration(2)) == [2, 4, 6, 8]
    assert steps_that_fire(SeveralIteration(np.int64(4))) == [4, 8]


def test_several_iteration_does_not_fire_before_the_first_step():
    assert not SeveralIteration(2)(TriggerState(epoch=0, step=0))


def test_max_epoch_fires_once_that_many_epochs_are_finished():
    assert steps_that_fire(MaxEpoch(2)) == [6, 7, 8, 9]


def test_max_iteration_fires_once_that_many_steps_are_done():
    assert steps_that_fire(MaxIteration(7)) == [7, 8, 9]


def test_max_score_fires_above_the_score_and_not_without_one():
    trigger = MaxScore(0.9)
    fired = [trigger(TriggerState(1, 1, score=s)) for s in (None, 0.9, 0.91, float("nan"))]
    assert fired == [False, False, True, False]


def test_min_loss_fires_below_the_loss_and_not_without_one():
    trigger = MinLoss(0.1)
    fired = [trigger(TriggerState(1, 1, loss=x)) for x in (None, 0.1, 0.09, float("nan"))]
    assert fired == [False, False, True, False]


def test_and_fires_when_all_do():
    assert steps_that_fire(TriggerAnd(EveryEpoch(), SeveralIteration(2))) == [6]


def test_or_fires_when_any_does():
    assert steps_that_fire(TriggerOr("everyepoch", SeveralIteration(4))) == [3, 4, 6, 8, 9]


def test_combinations_nest():
    trigger = TriggerOr(MaxIteration(9), TriggerAnd(EveryEpoch(), MaxEpoch(2)))
    assert steps_that_fire(trigger) == [6, 9]


@pytest.mark.parametrize("name", ["everyepoch", "EveryEpoch", "EVERYEPOCH"])
def test_the_name_every_epoch_converts_in_any_case(name):
    assert isinstance(Trigger.convert_trigger(name), EveryEpoch)


def test_a_trigger_converts_to_itself():
    trigger = SeveralIteration(5)
    assert Trigger.convert_trigger(trigger) is trigger
    assert trigger.get_trigger() is trigger


@pytest.mark.parametrize("wrong", ["everystep", 3, None, EveryEpoch])
def test_what_is_no_trigger_is_refused_with_what_is(wrong):
    with refused("argument-type"):
        Trigger.convert_trigger(wrong)


@pytest.mark.parametrize("cls", [SeveralIteration, MaxEpoch, MaxIteration])
@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", True, None])
def test_counts_must_be_positive_ints(cls, wrong):
    with pytest.raises(UsageError, match=f"{cls.__name__}.*positive int"):
        cls(wrong)


@pytest.mark.parametrize("cls", [MaxScore, MinLoss])
@pytest.mark.parametrize("wrong", ["0.5", None, True])
def test_bounds_must_be_numbers(cls, wrong):
    with refused("argument-type"):
        cls(wrong)


@pytest.mark.parametrize("cls", [TriggerAnd, TriggerOr])
def test_a_combination_needs_triggers(cls):
    with refused("argument-missing"):
        cls()
    with refused("argument-type"):
        cls(EveryEpoch(), 3)


def test_a_state_cannot_be_changed():
    with pytest.raises(AttributeError):
        TriggerState(1, 1).step = 2
