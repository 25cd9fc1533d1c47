"""Models in worker processes: pipelines of stages, and many instances of one model."""

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
from bigdl.common.errors import UsageError, user_stacklevel
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
    """Error raised by a pipeline stage; ``original`` is the stage's exception.

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
    """Pipeline of stages that run concurrently, each on separate cores.

    While the model computes one batch, the previous stage prepares the next. Each worker of a stage
    is a new interpreter pinned to its cores. Workers stop at :meth:`close`, at the end of a
    ``with`` block, when the object is deleted, or when the program exits.

    Parameters
    ----------
    stages : sequence of (name, stage, options)
        The stage is a function of one argument, or a Module, which runs in evaluation mode inside
        ``InferenceOptimizer.get_context``. Options are ``cores_per_worker``, the number of physical
        cores per worker (by default an even share of the cores that no stage requests), and
        ``worker_num``, the number of workers (1 by default).

    Raises
    ------
    UsageError
        If a stage is not such a triple, an option is invalid, or a stage can neither be pickled nor
        saved.

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
        """Run all inputs through the stages and return the results.

        Parameters
        ----------
        inputs : iterable
            Inputs of the first stage, one per call.

        Returns
        -------
        list
            Results of the last stage, in the order of `inputs`.

        Raises
        ------
        StageError
            If a stage raised an exception. The pipeline remains usable.
        WorkerLost
            If a worker was killed. The next run starts a new worker.
        UsageError
            If the pipeline was closed or an input cannot be pickled.
        """
        return super().run(inputs)

    def _maker(self, stage: Callable, slots: list[CpuSlot]) -> Callable[[], Callable]:
        if isinstance(stage, torch.nn.Module):
            return ready_in_worker(stage, min(slot.threads for slot in slots), self)
        # A lambda, because a function of this module would make every worker import torch.
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
    """Return a list for each pipeline stage with the CPU cores of each of its workers."""
    counts = [each.get("worker_num", 1) for each in options]
    wanted = [
        each.get("cores_per_worker")
        for each, count in zip(options, counts, strict=True)
        for _ in range(count)
    ]
    slots = iter(cpu_slots(len(wanted), _cores(wanted)))
    return [list(itertools.islice(slots, count)) for count in counts]


def _cores(wanted: list[int | None]) -> list[list[int]]:
    """Return each worker's logical cores; None requests an even share of the remaining cores."""
    units = topology().cores
    unspecified = wanted.count(None)
    requested = sum(count for count in wanted if count is not None)
    rest = max(len(units) - requested, unspecified)
    if requested + (rest if unspecified else 0) > len(units):
        warnings.warn(
            f"The stages need {requested + unspecified} physical cores, but {len(units)} are "
            "available: workers share cores and slow each other down; lower cores_per_worker or "
            "worker_num",
            stacklevel=user_stacklevel(),
        )
    even = iter([rest // unspecified + (i < rest % unspecified) for i in range(unspecified)])
    around = itertools.cycle(units)
    cores = []
    for count in wanted:
        count = min(next(even) if count is None else count, len(units))
        chosen = itertools.islice(around, count)
        cores.append(sorted(core for siblings in chosen for core in siblings))
    return cores


class ForwardError(TaskError):
    """Error raised by the model in a worker; ``original`` is the model's exception."""

    def __init__(self, *content):
        super().__init__(*content)
        where = "" if self.item is None else f" for input {self.item}"
        error = f"forward error: {self.last_line} (in worker {self.rank}{where})"
        self.args = (f"{error}\n{self.traceback}",)


class MultiInstanceModel(contextlib.AbstractContextManager, torch.nn.Module):
    """Model that processes many inputs concurrently in several processes.

    Created by :func:`to_multi_instance`. Calls from several threads are serialized. The processes
    stop at :meth:`close`, at the end of a ``with`` block, when the object is deleted, or when the
    program exits.

    Parameters
    ----------
    model : Module
        The model.
    slots : sequence of CpuSlot
        Core slots of the processes. With fewer than two, the model runs in this process.
    """

    def __init__(self, model: torch.nn.Module, slots: Sequence[CpuSlot]):
        super().__init__()
        self.model = model
        self.training = False
        self._pool: WorkerPool | None = None
        if len(slots) > 1:
            make = ready_in_worker(model, min(slot.threads for slot in slots), self)
            stage = PoolStage("the model", partial(_make_caller, make), slots)
            self._pool = WorkerPool([stage], ForwardError)

    def forward(self, inputs: Iterable[Any]) -> list[Any]:
        """Run the model on each of the inputs.

        Parameters
        ----------
        inputs : DataLoader, list or other iterable
            A tuple contains the positional arguments of one call, a dict its keyword arguments; any
            other element is the only argument. Lists from a DataLoader are treated as tuples. A
            DataLoader is iterated in this process, with its sampler, shuffling and last batch.

        Returns
        -------
        list
            Outputs of the model, in the order of `inputs`.

        Raises
        ------
        ForwardError
            If the model raised an exception. The processes remain usable.
        WorkerLost
            If a process was killed. The next call starts a new one.
        UsageError
            If `inputs` has another type.
        """
        calls = _calls(inputs)
        if self._pool is not None:
            return self._pool.run(calls)
        model = copy.deepcopy(self.model).eval() if self.model.training else self.model
        with context_of(model):
            return [model(*args, **kwargs) for args, kwargs in calls]

    def train(self, mode: bool = True) -> MultiInstanceModel:
        """Stay in evaluation mode, since the processes have copies of the model."""
        return self

    def close(self) -> None:
        """Stop the processes; the object cannot be called afterwards."""
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
    """Wrap a model so that it processes many inputs concurrently in several processes.

    Several instances with few cores each have a higher throughput than one with all cores. The
    processes are new interpreters pinned to their cores. The weights exist once in memory.

    Parameters
    ----------
    model : Module
        Any module, including accelerated models. It is not changed.
    num_processes : int
        Number of processes. With 1 the model runs in this process.
    cores_per_process : int, optional
        Physical cores of each process; by default they are split evenly.
    cpu_for_each_process : sequence of sequence of int, optional
        Logical core ids of each process. They may overlap.

    Returns
    -------
    MultiInstanceModel
        Called with a list of inputs or a DataLoader; returns the list of outputs. It is a context
        manager.

    Raises
    ------
    UsageError
        If a number is invalid, there are not enough cores, or the model can neither be pickled nor
        saved.

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
            stacklevel=user_stacklevel(),
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


def _make_caller(make: Callable[[], torch.nn.Module]) -> Callable[[tuple], Any]:
    model = make()
    return lambda call: model(*call[0], **call[1])


def _calls(inputs: object) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Yield the positional and keyword arguments of one model call per input."""
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
    """Return a function that loads a model in a worker and applies its settings there.

    The model is pickled. If that fails, as for sessions of some runtimes, the files written by
    ``InferenceOptimizer.save`` are sent instead.

    Parameters
    ----------
    model : Module
        The model; it is not changed.
    threads : int
        Number of threads of the worker; the upper limit of the model's setting.
    owner : object
        Object that keeps the files alive.

    Returns
    -------
    callable
        Function without arguments, to be called once in each worker.

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
        return partial(_load_in_worker, settings, torch.jit.load, script)
    failure = _pickling_error(model)
    if failure is None:
        return partial(_load_in_worker, settings, lambda: model)
    if not isinstance(model, AcceleratedModel):  # a directory would contain weights only
        raise UsageError(
            "The model cannot be sent to other processes, because it cannot be pickled: "
            f"{failure!r}; accelerate it first, or create unpicklable objects inside forward",
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
    # The class is included so that the module that defines it is imported.
    return partial(_load_in_worker, settings, _load, folder, source, type(model))


def _pickling_error(value: object) -> Exception | None:
    try:
        encode(value).close()
    except Exception as error:
        return error
    return None


def _load_in_worker(settings: Settings, make: Callable[..., Any], *content: object) -> object:
    """Return the model in evaluation mode and apply its settings to the whole process."""
    model = make(*content)
    with contextlib.suppress(NotImplementedError):  # exported programs have only one mode
        model.eval()
    InferenceContext(settings).__enter__()  # for the life of the worker
    return model


def _load(folder: str, source: torch.nn.Module | None, cls: type) -> object:
    return load_model(folder, source, trust=True)  # written by the parent process
