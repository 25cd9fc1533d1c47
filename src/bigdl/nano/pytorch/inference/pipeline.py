"""``Pipeline``: stages of inference in processes of their own, with items flowing through them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bigdl.common.checks import check_positive
from bigdl.common.cpu import topology
from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.serialization import ready_in_worker
from bigdl.runtime.pool import Stage, TaskError, WorkerPool
from bigdl.runtime.process import CpuSlot, cpu_slots

__all__ = ["Pipeline", "StageError"]

_OPTIONS = ("cores_per_worker", "worker_num")


class StageError(TaskError):
    """A stage raised an exception; ``original`` is that exception."""

    def __init__(self, *content):
        super().__init__(*content)
        last = self.traceback.rstrip().rpartition("\n")[2]
        when = "when it was set up" if self.item is None else f"on input {self.item}"
        self.args = (f"Stage {self.stage!r} failed {when}: {last}\n{self.traceback}",)


class Pipeline:
    """Stages that work at the same time, each on cores of its own.

    While the model computes one batch, the stage before it prepares the next. Each worker of a
    stage is a fresh interpreter, pinned to its cores from its start. The workers end with
    :meth:`close`, at the end of a ``with`` block, when the object is no longer referenced, and
    with the program.

    Parameters
    ----------
    stages : sequence of (name, stage, options)
        The stage is a function of one argument, or a Module, which runs in evaluation mode
        within its ``InferenceOptimizer.get_context``. The options are
        ``{"cores_per_worker": int, "worker_num": int}``: physical cores of each worker, by
        default an even share of those that no stage asks for, and the number of workers, by
        default 1.

    Raises
    ------
    UsageError
        If a stage is not such a triple, an option makes no sense, or a stage can neither be
        pickled nor saved.

    Examples
    --------
    >>> with Pipeline([
    ...     ("preprocess", decode, {"cores_per_worker": 1}),
    ...     ("inference", model, {"cores_per_worker": 3}),
    ... ]) as pipeline:  # doctest: +SKIP
    ...     outputs = pipeline.run(images)
    """

    def __init__(self, stages: Sequence[tuple[str, Callable[[Any], Any], Mapping[str, int]]]):
        checked = [_checked(stage) for stage in stages]
        if not checked:
            raise UsageError("A pipeline needs at least one stage, but stages is empty")
        slots = _slots([options for _, _, options in checked])
        made = [
            Stage(name, self._maker(stage, each), each)
            for (name, stage, _), each in zip(checked, slots, strict=True)
        ]
        self._pool = WorkerPool(made, StageError)

    def run(self, inputs: Iterable[Any]) -> list[Any]:
        """Send inputs through all stages.

        Parameters
        ----------
        inputs : iterable
            Each element is the argument of one call of the first stage.

        Returns
        -------
        list
            What the last stage returned, in the order of `inputs`.

        Raises
        ------
        StageError
            If a stage raised an exception; the pipeline can be used again.
        WorkerLost
            If a worker was killed. The next run starts another in its place.
        UsageError
            If the pipeline was closed or an input cannot be pickled.
        """
        return self._pool.run(inputs)

    def close(self) -> None:
        """End the workers; the pipeline cannot be used afterwards."""
        self._pool.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _maker(self, stage: Callable, slots: list[CpuSlot]) -> Callable[[], Callable]:
        if isinstance(stage, torch.nn.Module):
            return ready_in_worker(stage, min(slot.threads for slot in slots), self)
        # A function of this module would make a worker that needs no torch import it.
        return lambda: stage


def _checked(stage: Any) -> tuple[str, Callable, Mapping[str, int]]:
    if not isinstance(stage, tuple | list) or len(stage) != 3:
        raise UsageError(
            f"A stage is (name, function or Module, options), where options may be {{}}; "
            f"got {stage!r}"
        )
    name, function, options = stage
    if not callable(function):
        raise UsageError(f"Stage {name!r} must be callable, but it is {function!r}")
    if not isinstance(options, Mapping) or not set(options) <= set(_OPTIONS):
        raise UsageError(
            f"The options of stage {name!r} are a dict with {' and '.join(_OPTIONS)}, "
            f"but they are {options!r}"
        )
    for option in _OPTIONS:
        value = options.get(option)
        if option in options and not (option == "cores_per_worker" and value is None):
            check_positive(f"{option} of stage {name!r}", value)
    return str(name), function, options


def _slots(options: Sequence[Mapping[str, int]]) -> list[list[CpuSlot]]:
    """Return the cores of each worker of each stage."""
    counts = [each.get("worker_num", 1) for each in options]
    wanted = [
        each.get("cores_per_worker")
        for each, count in zip(options, counts, strict=True)
        for _ in range(count)
    ]
    slots = iter(cpu_slots(len(wanted), _cores(wanted)))
    return [list(itertools.islice(slots, count)) for count in counts]


def _cores(wanted: list[int | None]) -> list[list[int]]:
    """Logical cores of each worker; None is an even share of what the others leave."""
    units = topology().cores
    unsaid = wanted.count(None)
    asked = sum(count for count in wanted if count is not None)
    rest = max(len(units) - asked, unsaid)
    if asked + (rest if unsaid else 0) > len(units):
        warnings.warn(
            f"The stages ask for {asked + unsaid} physical cores and {len(units)} may be used: "
            "workers share cores and slow each other down; lower cores_per_worker or worker_num",
            stacklevel=5,
        )
    even = iter([rest // unsaid + (i < rest % unsaid) for i in range(unsaid)])
    cores, start = [], 0
    for count in wanted:
        count = min(next(even) if count is None else count, len(units))
        chosen = {units[(start + i) % len(units)] for i in range(count)}
        cores.append(sorted(core for siblings in chosen for core in siblings))
        start += count
    return cores
