"""Models in processes of their own: a pipeline of stages, and many instances of one model."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bigdl.common.checks import check_positive
from bigdl.common.cpu import schedule_workers, topology
from bigdl.common.errors import UsageError
from bigdl.common.private_folders import scratch_directory
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    InferenceContext,
    Settings,
    context_of,
    settings_of,
)
from bigdl.nano.pytorch.inference.serialization import load_model, save_model
from bigdl.runtime.messages import encode
from bigdl.runtime.pool import PoolStage, TaskError, WorkerPool
from bigdl.runtime.process import CpuSlot, cpu_slots

__all__ = ["ForwardError", "Pipeline", "StageError", "ready_in_worker", "to_multi_instance"]


_OPTIONS = ("cores_per_worker", "worker_num")


class StageError(TaskError):
    """A stage raised an exception; ``original`` is that exception.

    Examples
    --------
    >>> from bigdl.nano.pytorch import Pipeline
    >>> from bigdl.nano.pytorch.inference.pipeline import StageError
    >>> with Pipeline([("parse", float, {})]) as pipeline:
    ...     try:
    ...         pipeline.run(["1.5", "two"])
    ...     except StageError as error:
    ...         print(error.stage, error.item, repr(error.original))
    parse 1 ValueError("could not convert string to float: 'two'")
    """

    def __init__(self, *content):
        super().__init__(*content)
        when = "when it was set up" if self.item is None else f"on input {self.item}"
        self.args = (f"Stage {self.stage!r} failed {when}: {self.last_line}\n{self.traceback}",)


class Pipeline(WorkerPool):
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
    >>> import torch
    >>> from bigdl.nano.pytorch import Pipeline
    >>> def preprocess(text):
    ...     return torch.tensor([float(number) for number in text.split()])
    >>> stages = [
    ...     ("preprocess", preprocess, {"cores_per_worker": 1}),
    ...     ("inference", torch.nn.ReLU(), {"cores_per_worker": 1}),
    ... ]
    >>> with Pipeline(stages) as pipeline:
    ...     pipeline.run(["-1 2", "3 -4"])
    [tensor([0., 2.]), tensor([3., 0.])]
    """

    def __init__(self, stages: Sequence[tuple[str, Callable[[Any], Any], Mapping[str, int]]]):
        checked = [_checked(stage) for stage in stages]
        if not checked:
            raise UsageError(
                "A pipeline needs at least one stage, but stages is empty",
                code="argument-missing",
                argument="stages",
            )
        slots = _slots([options for _, _, options in checked])
        made = [
            PoolStage(name, self._maker(stage, each), each)
            for (name, stage, _), each in zip(checked, slots, strict=True)
        ]
        super().__init__(made, StageError)

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
        return super().run(inputs)

    def _maker(self, stage: Callable, slots: list[CpuSlot]) -> Callable[[], Callable]:
        if isinstance(stage, torch.nn.Module):
            return ready_in_worker(stage, min(slot.threads for slot in slots), self)
        # A function of this module would make a worker that needs no torch import it.
        return lambda: stage


def _checked(stage: object) -> tuple[str, Callable, Mapping[str, int]]:
    if not isinstance(stage, tuple | list) or len(stage) != 3:
        raise UsageError(
            f"A stage is (name, function or Module, options), where options may be {{}}; "
            f"got {stage!r}",
            code="argument-type",
            argument="stages",
        )
    name, function, options = stage
    if not callable(function):
        raise UsageError(
            f"Stage {name!r} must be callable, but it is {function!r}",
            code="argument-type",
            argument="stages",
        )
    if not isinstance(options, Mapping) or not set(options) <= set(_OPTIONS):
        raise UsageError(
            f"The options of stage {name!r} are a dict with {' and '.join(_OPTIONS)}, "
            f"but they are {options!r}",
            code="argument-value",
            argument="stages",
            allowed=list(_OPTIONS),
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
            stacklevel=4,
        )
    even = iter([rest // unsaid + (i < rest % unsaid) for i in range(unsaid)])
    around = itertools.cycle(units)
    cores = []
    for count in wanted:
        count = min(next(even) if count is None else count, len(units))
        chosen = itertools.islice(around, count)
        cores.append(sorted(core for siblings in chosen for core in siblings))
    return cores


class ForwardError(TaskError):
    """The model raised an exception in a worker; ``original`` is that exception."""

    def __init__(self, *content):
        super().__init__(*content)
        where = "" if self.item is None else f" for input {self.item}"
        error = f"forward error: {self.last_line} (in worker {self.rank}{where})"
        self.args = (f"{error}\n{self.traceback}",)


class MultiInstanceModel(contextlib.AbstractContextManager, torch.nn.Module):
    """A model that takes many inputs at once and computes them in several processes.

    Made by :func:`to_multi_instance`. Calls from several threads take turns. The processes end
    with :meth:`close`, at the end of a ``with`` block, when the object is no longer referenced,
    and with the program.

    Parameters
    ----------
    model : Module
        The model.
    slots : sequence of CpuSlot
        Cores of its processes; with one or none, the model runs in this process.
    """

    def __init__(self, model: torch.nn.Module, slots: Sequence[CpuSlot]):
        super().__init__()
        self.model = model
        self.training = False
        self._pool: WorkerPool | None = None
        if len(slots) > 1:
            make = ready_in_worker(model, min(slot.threads for slot in slots), self)
            stage = PoolStage("the model", partial(_called, make), slots)
            self._pool = WorkerPool([stage], ForwardError)

    def forward(self, inputs: Iterable[Any]) -> list[Any]:
        """Call the model with each of the inputs.

        Parameters
        ----------
        inputs : DataLoader, list or other iterable
            An element that is a tuple holds the positional arguments of one call, a dict its
            keyword arguments, anything else its only argument. The list that a DataLoader makes
            of several values counts as a tuple. A DataLoader runs in this process, as it is: with
            its own sampler, its shuffling and its last batch.

        Returns
        -------
        list
            The model's outputs in the order of `inputs`.

        Raises
        ------
        ForwardError
            If the model raised an exception; the processes can be used again.
        WorkerLost
            If a process was killed. The next call starts another in its place.
        UsageError
            If `inputs` is something else.
        """
        calls = _calls(inputs)
        if self._pool is not None:
            return self._pool.run(calls)
        model = copy.deepcopy(self.model).eval() if self.model.training else self.model
        with context_of(model):
            return [model(*args, **kwargs) for args, kwargs in calls]

    def train(self, mode: bool = True) -> MultiInstanceModel:
        """Stays in evaluation mode: the processes have copies of the model."""
        return self

    def close(self) -> None:
        """End the processes; the object cannot be called afterwards."""
        if self._pool is not None:
            self._pool.close()

    def __exit__(self, *exception) -> None:
        self.close()


def to_multi_instance(
    model: torch.nn.Module,
    num_processes: int = 4,
    cores_per_process: int | None = None,
    cpu_for_each_process: Sequence[Sequence[int]] | None = None,
) -> MultiInstanceModel:
    """Run a model in several processes, so that many inputs are computed at the same time.

    Several instances with few cores each have a higher throughput than one with all of them. The
    processes are fresh interpreters, pinned to their cores from their start; the weights are in
    memory once.

    Parameters
    ----------
    model : Module
        Any module, also one that ``InferenceOptimizer`` made. It stays as it is.
    num_processes : int
        Number of processes. With 1 the model is called in this process.
    cores_per_process : int, optional
        Physical cores of each process; by default they are split evenly.
    cpu_for_each_process : sequence of sequence of int, optional
        Ids of the logical cores of each process. They may overlap.

    Returns
    -------
    MultiInstanceModel
        Called with a list of inputs or a DataLoader; returns the list of outputs. It is a context
        manager.

    Raises
    ------
    UsageError
        If a number makes no sense, there are not enough cores, or the model can neither be
        pickled nor saved.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> many = InferenceOptimizer.to_multi_instance(torch.nn.ReLU(), num_processes=2)
    >>> many([torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -4.0])])
    [tensor([0., 2.]), tensor([3., 0.])]
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"to_multi_instance takes a torch.nn.Module, but got a {type(model).__name__}",
            code="model-type",
        )
    check_positive("num_processes", num_processes)
    if num_processes == 1:
        warnings.warn(
            "num_processes is 1: the model runs in this process, and cores are not set",
            stacklevel=2,
        )
        return MultiInstanceModel(model, [])
    if cpu_for_each_process is None:
        cpu_for_each_process = schedule_workers(num_processes, cores_per_process)
    elif len(cpu_for_each_process) != num_processes:
        raise UsageError(
            f"cpu_for_each_process must list the cores of each of {num_processes} processes, "
            f"but it lists those of {len(cpu_for_each_process)}",
            code="argument-value",
            argument="cpu_for_each_process",
        )
    return MultiInstanceModel(model, cpu_slots(num_processes, cpu_for_each_process))


def _called(make: Callable[[], torch.nn.Module]) -> Callable[[tuple], Any]:
    model = make()
    return lambda call: model(*call[0], **call[1])


def _calls(inputs: object) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Return arguments and keyword arguments of each call."""
    single = (torch.Tensor, np.ndarray, str, bytes, Mapping, torch.nn.Module)
    if isinstance(inputs, single) or not isinstance(inputs, Iterable):
        raise UsageError(
            "The input should be a DataLoader or a list of input batchs, not a "
            f"{type(inputs).__name__}",
            code="data-type",
        )
    unpacked = (tuple, list) if isinstance(inputs, torch.utils.data.DataLoader) else tuple
    for each in inputs:
        if isinstance(each, Mapping):
            yield (), dict(each)
        else:
            yield (tuple(each) if isinstance(each, unpacked) else (each,)), {}


def ready_in_worker(model: torch.nn.Module, threads: int, owner: object) -> Callable[[], Any]:
    """Return a function that makes a model in a worker and gives that process its settings.

    The model is pickled; if it cannot be, as the sessions of some runtimes, it is sent as the
    files that ``InferenceOptimizer.save`` writes.

    Parameters
    ----------
    model : Module
        It stays as it is.
    threads : int
        Threads of the worker: a model that asks for more gets these.
    owner : object
        While it lives, the files stay.

    Returns
    -------
    callable
        Without arguments; to be called once in each worker.

    Raises
    ------
    UsageError
        If the model can neither be pickled nor saved.
    """
    settings = settings_of(model)
    if settings.threads is not None:
        settings = replace(settings, threads=min(settings.threads, threads))
    if isinstance(model, torch.jit.ScriptModule):
        script = io.BytesIO()
        torch.jit.save(model, script)
        script.seek(0)
        return partial(_ready, settings, torch.jit.load, script)
    failure = _pickling_error(model)
    if failure is None:
        return partial(_ready, settings, lambda: model)
    if not isinstance(model, AcceleratedModel):  # its directory would hold weights only
        raise UsageError(
            "The model cannot be sent to other processes, since it cannot be pickled: "
            f"{failure!r}; accelerate it first, or create what cannot be pickled inside forward",
            code="model-copy",
        )
    folder = str(scratch_directory("bigdl-model-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    try:
        save_model(model, folder)
    except Exception as error:
        raise UsageError(
            f"The model cannot be sent to other processes: pickling it failed with {failure!r}, "
            f"saving it with {error!r}",
            code="model-copy",
        ) from error
    source = model.nano_source if _pickling_error(model.nano_source) is None else None
    # The class comes along so that the module that defines it is imported.
    return partial(_ready, settings, _load, folder, source, type(model))


def _pickling_error(value: object) -> Exception | None:
    try:
        encode(value).close()
    except Exception as error:
        return error
    return None


def _ready(settings: Settings, make: Callable[..., Any], *content: object) -> object:
    """Return the model, ready for inference, in a process that does nothing else."""
    model = make(*content)
    with contextlib.suppress(NotImplementedError):  # an exported program has one mode only
        model.eval()
    InferenceContext(settings).__enter__()  # for the life of the worker
    return model


def _load(folder: str, source: torch.nn.Module | None, cls: type) -> object:
    return load_model(folder, source, trust=True)  # of the process that started this one
