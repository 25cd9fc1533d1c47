"""A training loop of the user's own, with Nano's settings and in several processes."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.training.loops import LoopSettings, Parts, run_loop

__all__ = ["TorchNano", "nano"]

_fabric = require("lightning_fabric", "nano")


class TorchNano(ABC):
    """Turns a training loop into one that runs faster, and in several processes.

    A subclass moves its loop to ``train``, calls ``self.setup`` on model, optimizer and loaders,
    and ``self.backward(loss)`` in the place of ``loss.backward()``. Calling ``train`` on an object
    runs the loop, in each process with its own share of the rows.

    Parameters
    ----------
    num_processes : int, optional
    use_ipex : bool
        Accepted; the automatic settings have taken its place.
    distributed_backend : str
        As for :class:`~bigdl.nano.pytorch.Trainer`; another name is passed on to Lightning Fabric
        as its strategy.
    process_group_backend : {"gloo"}, optional
    precision : optional
        As for :class:`~bigdl.nano.pytorch.Trainer`.
    cpu_for_each_process : list of list of int, optional
    channels_last : bool, optional
    auto_lr : bool
        With several processes, let learning rates grow linearly to `num_processes` times the
        user's within 1000 steps of each optimizer.
    fused_optimizers, tune_process, inductor, bucket_cap_mb
        As for :class:`~bigdl.nano.pytorch.Trainer`.
    *args, **kwargs
        Of ``lightning_fabric.Fabric``.

    Raises
    ------
    UsageError
        If an argument is wrong.

    Examples
    --------
    >>> class Loop(TorchNano):
    ...     def train(self, epochs):
    ...         model, optimizer, loader = self.setup(make_model(), make_optimizer(), make_loader())
    ...         for _ in range(epochs):
    ...             for x, y in loader:
    ...                 optimizer.zero_grad()
    ...                 self.backward(loss(model(x), y))
    ...                 optimizer.step()
    >>> Loop(num_processes=2).train(10)
    """

    def __init__(
        self,
        num_processes: int | None = None,
        use_ipex: bool = False,
        distributed_backend: str = "subprocess",
        process_group_backend: str | None = None,
        precision: Any = None,
        cpu_for_each_process: list[list[int]] | None = None,
        channels_last: bool | None = None,
        auto_lr: bool = True,
        *args: Any,
        fused_optimizers: bool = True,
        tune_process: bool = True,
        inductor: bool = False,
        bucket_cap_mb: float = 25.0,
        **kwargs: Any,
    ):
        if args:
            raise UsageError(
                f"TorchNano takes Fabric's arguments by keyword, but it got {len(args)} more "
                "positional ones"
            )
        self._settings = LoopSettings.of(
            num_processes,
            use_ipex,
            distributed_backend,
            process_group_backend,
            precision,
            cpu_for_each_process,
            channels_last,
            auto_lr,
            kwargs,
            fused_optimizers=fused_optimizers,
            tune_process=tune_process,
            inductor=inductor,
            bucket_cap_mb=bucket_cap_mb,
        )
        self._parts: Parts | None = None
        self.train = functools.partial(self._launch, type(self).train)

    @abstractmethod
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The loop. Its result is that of the first process.

        Modules and optimizers among the arguments are trained in place; modules and attributes of
        this object are, after it, as the first process left them.
        """

    def setup(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *dataloaders: DataLoader,
        move_to_device: bool = True,
    ) -> tuple[Any, ...]:
        """Prepare a model and what trains it.

        Parameters
        ----------
        model : Module
        optimizer : Optimizer or sequence of Optimizer
        *dataloaders : DataLoader
            Each process gets a share of the rows, shuffled if the loader shuffles.
        move_to_device : bool

        Returns
        -------
        model : Module
            With all attributes of the user's.
        optimizer : Optimizer or list of Optimizer
            As given: one for one, a list for a sequence.
        dataloader : DataLoader or list of DataLoader
            One for one, a list for several, and left out for none.
        """
        several = isinstance(optimizer, (list, tuple))
        optimizers = list(optimizer) if several else [optimizer]
        prepared = self._running.model(model, optimizers, move_to_device)
        model, optimizers = prepared
        result: tuple[Any, ...] = (model, optimizers if several else optimizers[0])
        if dataloaders:
            result += (self.setup_dataloaders(*dataloaders, move_to_device=move_to_device),)
        return result

    def setup_dataloaders(
        self,
        *dataloaders: DataLoader,
        replace_sampler: bool = True,
        move_to_device: bool = True,
    ) -> Any:
        """Prepare loaders: one for one, a list for several."""
        return self._running.loaders(dataloaders, replace_sampler, move_to_device)

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """As ``tensor.backward(*args, **kwargs)``."""
        kwargs.pop("model", None)
        self._running.fabric.backward(tensor, *args, **kwargs)

    def save(self, content: Mapping[str, Any], filepath: Any) -> None:
        """Save a checkpoint, in one of the processes; its place may come first, too."""
        if isinstance(content, (str, os.PathLike)):
            content, filepath = filepath, content
        self._running.fabric.save(filepath, dict(content))

    def load(self, filepath: Any) -> Any:
        """Load a checkpoint."""
        return self._running.fabric.load(filepath)

    @property
    def settings(self) -> tuple[str, ...]:
        """What the last loop was trained with, as its report says."""
        return self.__dict__.get("_report", ())

    def __getattr__(self, name: str) -> Any:
        """What Fabric has: device, is_global_zero, print, barrier, all_gather, …"""
        if name.startswith("__") or name in ("_parts", "_settings"):
            raise AttributeError(name)
        parts = self.__dict__.get("_parts")
        if parts is None or not hasattr(parts.fabric, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(parts.fabric, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _BOUND}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._parts = None
        self.train = functools.partial(self._launch, type(self).train)

    @property
    def _running(self) -> Parts:
        if self._parts is None:
            raise UsageError(
                f"{type(self).__name__}.setup belongs in its train method, which starts the "
                "processes; call it there"
            )
        return self._parts

    def _launch(self, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._parts is not None:  # train is called by train
            return loop(self, *args, **kwargs)
        return run_loop(self._settings, _OwnLoop(self, loop), args, kwargs)


_SWITCHES = ("fused_optimizers", "tune_process", "inductor", "bucket_cap_mb")
_BOUND = ("train", "_parts", "_report")


class _OwnLoop:
    """The loop of a TorchNano as a function of its parts."""

    def __init__(self, owner: TorchNano, loop: Callable[..., Any]):
        self.owner, self._loop = owner, loop

    def __call__(self, parts: Parts, args: tuple, kwargs: dict) -> Any:
        self.owner._parts = parts
        try:
            return self._loop(self.owner, *args, **kwargs)
        finally:
            self.owner._parts = None
            self.owner.__dict__["_report"] = tuple(parts.report)


def nano(
    num_processes: int | None = None,
    use_ipex: bool = False,
    distributed_backend: str = "subprocess",
    precision: Any = None,
    cpu_for_each_process: list[list[int]] | None = None,
    channels_last: bool | None = None,
    auto_lr: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Callable[[Callable], Callable]:
    """A decorator for a training function: its body stays as it is.

    Among the function's arguments there must be one module that is no loss; it is prepared as
    :meth:`TorchNano.setup` does, with all optimizers and loaders among them. After a call with
    several processes, module and optimizers are as the first process left them.

    Parameters
    ----------
    num_processes, use_ipex, distributed_backend, precision, cpu_for_each_process, channels_last, \
auto_lr
        As for :class:`TorchNano`.
    *args, **kwargs
        The others of :class:`TorchNano`, and those of ``lightning_fabric.Fabric``.

    Returns
    -------
    callable
        A decorator.

    Raises
    ------
    UsageError
        If an argument is wrong; when the function is called, if there is not one module.

    Examples
    --------
    >>> @nano(num_processes=2)
    ... def train(model, optimizer, loader):
    ...     for x, y in loader:
    ...         optimizer.zero_grad()
    ...         loss(model(x), y).backward()
    ...         optimizer.step()
    """
    if distributed_backend == "spawn":
        raise UsageError(
            "bigdl.nano.pytorch.nano do not support spawn; use distributed_backend='subprocess'"
        )
    strategy = kwargs.get("strategy", distributed_backend)
    if "deepspeed" in str(strategy).lower():
        raise UsageError(
            "bigdl.nano.pytorch.nano do not support deepspeed, whose backward is another; use "
            "TorchNano"
        )
    if callable(num_processes):  # @nano without parentheses
        return nano()(num_processes)

    def decorate(function: Callable) -> Callable:
        loop = _DecoratedLoop(function)
        settings = LoopSettings.of(
            num_processes,
            use_ipex,
            distributed_backend,
            None,
            precision,
            cpu_for_each_process,
            channels_last,
            auto_lr,
            {name: value for name, value in kwargs.items() if name not in _SWITCHES},
            **{name: value for name, value in kwargs.items() if name in _SWITCHES},
        )

        @functools.wraps(function)
        def train(*given: Any, **named: Any) -> Any:
            loop.check(given, named)
            return run_loop(settings, loop, given, named)

        return train

    return decorate


class _DecoratedLoop:
    """The body of a decorated function as a function of its parts."""

    owner = None

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    @staticmethod
    def check(args: tuple, kwargs: dict) -> None:
        found = sum(_is_model(value) for value in (*args, *kwargs.values()))
        if found != 1:
            raise UsageError(
                "there should be only one nn.Module in the function parameter list, but got "
                f"{found}"
            )

    def __call__(self, parts: Parts, args: tuple, kwargs: dict) -> Any:
        values = {**dict(enumerate(args)), **kwargs}
        place = next(name for name, value in values.items() if _is_model(value))
        optimizers = _places(values, torch.optim.Optimizer)
        loaders = _places(values, DataLoader)
        values[place], prepared = parts.model(values[place], list(optimizers.values()), True)
        values |= dict(zip(optimizers, prepared, strict=True))
        if loaders:
            found = parts.loaders(tuple(loaders.values()), True, True)
            found = [found] if len(loaders) == 1 else found
            values |= dict(zip(loaders, found, strict=True))
        positional = [values.pop(index) for index in range(len(args))]
        return self._function(*positional, **values)


def _is_model(value: Any) -> bool:
    from torchmetrics import Metric, MetricCollection

    if not isinstance(value, nn.Module) or isinstance(value, (Metric, MetricCollection)):
        return False
    return not isinstance(value, nn.modules.loss._Loss)


def _places(values: Mapping[Any, Any], kind: type) -> dict[Any, Any]:
    return {name: value for name, value in values.items() if isinstance(value, kind)}
