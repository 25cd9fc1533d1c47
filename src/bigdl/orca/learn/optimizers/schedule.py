"""Learning rate schedules of BigDL 2.x, as factories of torch schedulers.

``n`` is the number of the update, from 0, and ``lr`` is the optimizer's initial rate. Pass a
schedule as ``learningrate_schedule`` of an optimizer or as ``scheduler_creator`` of an Estimator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.errors import UsageError

__all__ = [
    "Default",
    "Exponential",
    "MultiStep",
    "Plateau",
    "Poly",
    "Scheduler",
    "SequentialSchedule",
    "Step",
    "Warmup",
]


class Scheduler(ABC):
    """Base class of scheduler factories, called as ``scheduler(optimizer, config)``.

    Examples
    --------
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.optimizers.schedule import Scheduler
    >>> class Halving(Scheduler):
    ...     def rate(self, lr, n):
    ...         return lr / 2**n
    >>> [Halving().rate(0.8, n) for n in (0, 1, 2)]
    [0.8, 0.4, 0.2]
    >>> optimizer = SGD(learningrate=0.8, learningrate_schedule=Halving())
    """

    def __call__(self, optimizer, config=None):
        from bigdl.orca.learn.optimizers.torch_schedule import ByFormula

        return ByFormula(optimizer, self.rate)

    @abstractmethod
    def rate(self, lr: float, n: int) -> float:
        """Return the learning rate of update `n`."""

    def get_scheduler(self) -> Scheduler:
        """Return this object itself (BigDL 2.x returned a JVM object)."""
        return self


class Default(Scheduler):
    """Inverse-time decay: ``lr / (1 + n * decay)``.

    Examples
    --------
    >>> from bigdl.orca.learn.optimizers.schedule import Default
    >>> [Default(decay=1.0).rate(0.8, n) for n in (0, 1, 3)]
    [0.8, 0.4, 0.2]
    """

    def __init__(self, decay: float = 0.0):
        self.decay = check_number("Default: decay", decay, 0)

    def rate(self, lr, n):
        return lr / (1 + n * self.decay)


class Poly(Scheduler):
    """Polynomial decay: ``lr * (1 - n / max_iteration) ** power``, then 0.

    Examples
    --------
    >>> from bigdl.orca.learn.optimizers.schedule import Poly
    >>> [Poly(power=2, max_iteration=10).rate(1.0, n) for n in (0, 5, 10)]
    [1.0, 0.25, 0.0]
    """

    def __init__(self, power: float, max_iteration: int):
        self.power = check_number("Poly: power", power)
        self.max_iteration = check_positive("Poly: max_iteration", max_iteration)

    def rate(self, lr, n):
        return lr * (1 - n / self.max_iteration) ** self.power if n < self.max_iteration else 0.0


class Exponential(Scheduler):
    """Exponential decay: ``lr * decay_rate ** (n / decay_step)``.

    Examples
    --------
    >>> from bigdl.orca.learn.optimizers.schedule import Exponential
    >>> stairs = Exponential(decay_step=10, decay_rate=0.5, stair_case=True)
    >>> [stairs.rate(1.0, n) for n in (0, 9, 10, 20)]
    [1.0, 1.0, 0.5, 0.25]
    """

    def __init__(self, decay_step: int, decay_rate: float, stair_case: bool = False):
        self.decay_step = check_positive("Exponential: decay_step", decay_step)
        self.decay_rate = check_number("Exponential: decay_rate", decay_rate, 0)
        self.stair_case = bool(stair_case)

    def rate(self, lr, n):
        exponent = n // self.decay_step if self.stair_case else n / self.decay_step
        return lr * self.decay_rate**exponent


class Step(Scheduler):
    """Step decay: ``lr * gamma ** (n // step_size)``.

    Examples
    --------
    >>> from bigdl.orca.learn.optimizers.schedule import Step
    >>> [Step(step_size=100, gamma=0.5).rate(1.0, n) for n in (0, 99, 100, 200)]
    [1.0, 1.0, 0.5, 0.25]
    """

    def __init__(self, step_size: int, gamma: float):
        self.step_size = check_positive("Step: step_size", step_size)
        self.gamma = check_number("Step: gamma", gamma, 0)

    def rate(self, lr, n):
        return lr * self.gamma ** (n // self.step_size)


class MultiStep(Scheduler):
    """Multi-step decay: ``lr * gamma ** k``, where `k` counts the `step_sizes` up to update `n`.

    Examples
    --------
    >>> from bigdl.orca.learn.optimizers.schedule import MultiStep
    >>> [MultiStep([100, 500], gamma=0.5).rate(1.0, n) for n in (99, 100, 499, 500)]
    [1.0, 0.5, 0.5, 0.25]
    """

    def __init__(self, step_sizes, gamma: float):
        if not isinstance(step_sizes, list | tuple) or not step_sizes:
            raise UsageError(
                f"MultiStep: step_sizes should be a list of ints, got {step_sizes!r}",
                code="argument-type",
                argument="step_sizes",
            )
        self.step_sizes = [check_positive("MultiStep: step_sizes", s) for s in step_sizes]
        self.gamma = check_number("MultiStep: gamma", gamma, 0)

    def rate(self, lr, n):
        return lr * self.gamma ** sum(n >= size for size in self.step_sizes)


class Warmup(Scheduler):
    """Linear warmup: ``lr + delta * n``, for the start of a :class:`SequentialSchedule`.

    Examples
    --------
    >>> from bigdl.orca.learn.optimizers.schedule import Warmup
    >>> [Warmup(delta=0.5).rate(1.0, n) for n in (0, 1, 2)]
    [1.0, 1.5, 2.0]
    """

    def __init__(self, delta: float):
        self.delta = check_number("Warmup: delta", delta)

    def rate(self, lr, n):
        return lr + self.delta * n


class Plateau(Scheduler):
    """Reduction of the learning rate by `factor` after `patience` epochs without improvement.

    Parameters
    ----------
    monitor : str
        Epoch metric such as ``"val_loss"`` or a metric name. ``"Loss"`` means the training loss and
        ``"score"`` the first metric.

    Examples
    --------
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.optimizers.schedule import Plateau
    >>> schedule = Plateau("val_loss", factor=0.5, patience=2)
    >>> SGD(learningrate=0.1, learningrate_schedule=schedule).schedule is schedule
    True
    """

    def __init__(
        self,
        monitor: str,
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "min",
        epsilon: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ):
        check_choice("Plateau: mode", mode, ("min", "max"))
        if not isinstance(monitor, str):
            raise UsageError(
                f"Plateau: monitor should be the name of an epoch metric, got {monitor!r}",
                code="argument-type",
                argument="monitor",
            )
        self.monitor = "train_loss" if monitor == "Loss" else monitor
        self.options = {
            "mode": mode,
            "factor": check_number("Plateau: factor", factor, 0),
            "patience": patience,
            "threshold": epsilon,
            "threshold_mode": "abs",
            "cooldown": cooldown,
            "min_lr": min_lr,
        }

    def __call__(self, optimizer, config=None):
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        made = ReduceLROnPlateau(optimizer, **self.options)
        made.monitor = self.monitor
        return made

    def rate(self, lr, n):
        raise UsageError(
            "Plateau is stepped per epoch, not per update; use it outside SequentialSchedule",
            code="optimizer-unsupported",
        )


class SequentialSchedule(Scheduler):
    """Sequence of schedules, each used for a given number of updates.

    Each schedule starts from the final rate of its predecessor and counts updates from 0. The last
    schedule has no end.

    Parameters
    ----------
    iteration_per_epoch : int
        Accepted for compatibility and ignored.

    Examples
    --------
    >>> from bigdl.orca.learn.optimizers.schedule import Poly, SequentialSchedule, Warmup
    >>> schedule = SequentialSchedule()
    >>> schedule = schedule.add(Warmup(delta=0.25), 4).add(Poly(1, max_iteration=10), 10)
    >>> [schedule.rate(0.0, n) for n in (0, 2, 4, 9, 14)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    def __init__(self, iteration_per_epoch: int = 1):
        self.iteration_per_epoch = check_positive(
            "SequentialSchedule: iteration_per_epoch", iteration_per_epoch
        )
        self.parts: list[tuple[Scheduler, int]] = []

    def add(self, scheduler: Scheduler, max_iteration: int) -> SequentialSchedule:
        """Append a schedule for `max_iteration` updates and return the sequence."""
        if not isinstance(scheduler, Scheduler) or isinstance(scheduler, Plateau):
            raise UsageError(
                "SequentialSchedule: expected a per-update schedule, got "
                f"{type(scheduler).__name__}",
                code="argument-type",
                argument="scheduler",
            )
        number = check_positive("SequentialSchedule: max_iteration", max_iteration)
        self.parts.append((scheduler, number))
        return self

    def rate(self, lr, n):
        for index, (scheduler, number) in enumerate(self.parts):
            if n < number or index == len(self.parts) - 1:
                return scheduler.rate(lr, n)
            lr, n = scheduler.rate(lr, number), n - number
        return lr
