"""What is decided after a worker was lost."""

import pytest
from refusals import refused

from bigdl.common.errors import UsageError, WorkerLost
from bigdl.orca.learn.backends import BACKENDS
from bigdl.runtime.failure import FailurePolicy


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def is_retried(policy):
    try:
        policy.allow_retry(WorkerLost("worker 1 was lost"))
    except WorkerLost:
        return False
    return True


def test_as_many_losses_are_retried_as_were_asked_for():
    policy = FailurePolicy(2)
    assert [is_retried(policy) for _ in range(4)] == [True, True, False, False]


def test_none_is_retried_with_zero():
    with pytest.raises(WorkerLost, match=r"was lost \(1 failure is more than max_failures=0\)"):
        FailurePolicy(0).allow_retry(WorkerLost("worker 1 was lost"))


def test_a_loss_that_was_counted_does_not_count_again():
    policy = FailurePolicy(1)
    lost = WorkerLost("worker 1 was lost")
    policy.allow_retry(lost)
    lost.is_counted = True
    assert policy.allow_retry(lost) == "failure 1 of 1"
    assert not is_retried(policy)
    with pytest.raises(WorkerLost, match=r"\(2 failures are more than max_failures=1\)"):
        policy.allow_retry(lost)


def test_old_losses_do_not_count_within_a_window():
    clock = Clock()
    policy = FailurePolicy(1, window=10.0, clock=clock)
    retries = []
    for clock.now in (0.0, 11.0, 20.0, 40.0):
        retries.append(is_retried(policy))
    assert retries == [True, True, False, True]


def test_the_reason_says_how_many_there_were():
    policy = FailurePolicy(3, window=120)
    assert policy.allow_retry(WorkerLost("lost")) == "failure 1 of 3 within 120 s"


def test_a_policy_counts_anew_in_every_fit():
    mine = FailurePolicy(1)
    assert is_retried(FailurePolicy.of(mine))
    assert is_retried(FailurePolicy.of(mine))
    assert not is_retried(FailurePolicy.of(0))


def test_what_is_forgiven_without_being_told():
    assert FailurePolicy.of(None).max_failures == 3
    layer = BACKENDS["bigdl"].failure_policy(None)
    assert (layer.max_failures, layer.window) == (5, 120.0)


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "3"])
def test_a_wrong_number_is_refused(wrong):
    with pytest.raises(UsageError, match="max_failures should be an integer of at least 0"):
        FailurePolicy.of(wrong)


@pytest.mark.parametrize("wrong", [0, -5.0])
def test_a_window_must_be_positive(wrong):
    with refused("argument-value"):
        FailurePolicy(1, window=wrong)
