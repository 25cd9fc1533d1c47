"""One model in several processes, each on cores of its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.accelerated import context_of
from bigdl.nano.pytorch.inference.serialization import ready_in_worker
from bigdl.nano.utils.common import schedule_workers
from bigdl.runtime.pool import Stage, TaskError, WorkerPool
from bigdl.runtime.process import CpuSlot, cpu_slots

__all__ = ["ForwardError", "to_multi_instance"]

_WRONG_INPUT = "The input should be a DataLoader or a list of input batchs"


class ForwardError(TaskError):
    """The model raised an exception in a worker; ``original`` is that exception."""

    def __init__(self, *content):
        super().__init__(*content)
        last = self.traceback.rstrip().rpartition("\n")[2]
        where = "" if self.item is None else f" for input {self.item}"
        self.args = (f"forward error: {last} (in worker {self.rank}{where})\n{self.traceback}",)


class MultiInstanceModel(torch.nn.Module):
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
            self._pool = WorkerPool(
                [Stage("the model", partial(_called, make), slots)], ForwardError
            )

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
        if self._pool is None:
            return self._in_process(calls)
        return self._pool.run(calls)

    def train(self, mode: bool = True) -> MultiInstanceModel:
        """Stays in evaluation mode: the processes have copies of the model."""
        return self

    def close(self) -> None:
        """End the processes; the object cannot be called afterwards."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> MultiInstanceModel:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _in_process(self, calls: Iterator[tuple]) -> list[Any]:
        model = copy.deepcopy(self.model).eval() if self.model.training else self.model
        with context_of(model):
            return [model(*args, **kwargs) for args, kwargs in calls]


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
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"to_multi_instance takes a torch.nn.Module, but got a {type(model).__name__}"
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
            f"but it lists those of {len(cpu_for_each_process)}"
        )
    return MultiInstanceModel(model, cpu_slots(num_processes, cpu_for_each_process))


def _called(make: Callable[[], torch.nn.Module]) -> Callable[[tuple], Any]:
    model = make()
    return lambda call: model(*call[0], **call[1])


def _calls(inputs: Any) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Arguments and keyword arguments of each call."""
    single = (torch.Tensor, np.ndarray, str, bytes, Mapping, torch.nn.Module)
    if isinstance(inputs, single) or not isinstance(inputs, Iterable):
        raise UsageError(f"{_WRONG_INPUT}, not a {type(inputs).__name__}")
    unpacked = (tuple, list) if isinstance(inputs, torch.utils.data.DataLoader) else (tuple,)
    return (_call(each, unpacked) for each in inputs)


def _call(
    given: Any, unpacked: tuple[type[Sequence], ...]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, unpacked) else (given,)), {}
