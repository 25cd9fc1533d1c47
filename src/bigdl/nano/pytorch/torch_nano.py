"""TorchNano and nano: custom training loops with Nano's settings and several processes."""

from __future__ import annotations

import functools
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from bigdl.common.errors import UsageError, hide_frames, require, user_stacklevel
from bigdl.nano.pytorch.frozen.automatic import ForwardPrefix, replace_prefix_phrase
from bigdl.nano.pytorch.training.group import LocalGroup, ddp_arguments
from bigdl.nano.pytorch.training.optimizers import LearningRateRamp
from bigdl.nano.pytorch.training.options import (
    BACKENDS,
    TrainingOptions,
    check_bool,
    check_lightning_arguments,
)
from bigdl.nano.pytorch.training.processes import run_processes
from bigdl.nano.pytorch.training.shared_batches import with_shared_batches
from bigdl.nano.pytorch.training.shared_objects import Changes, GlobalState, ObjectRegistry
from bigdl.nano.pytorch.training.steps import FastSteps, full_precision, is_model

require("lightning_fabric", "nano")

from lightning_fabric import Fabric  # noqa: E402
from lightning_fabric.plugins import Precision  # noqa: E402
from lightning_fabric.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402
from lightning_fabric.utilities.rank_zero import rank_zero_info  # noqa: E402
from lightning_fabric.wrappers import _FabricModule, _FabricOptimizer  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TorchNano", "nano"]

P = ParamSpec("P")
T = TypeVar("T")
# Attributes that are local to a process and not part of the loop's state.
_BOUND = ("_fabric", "_steps", "_prefixes")


def _wrap_train(train: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``train`` to start the processes first, unless it is called inside one of them."""

    @functools.wraps(train)
    def launch(loop: TorchNano, *args: object, **kwargs: object) -> object:
        if loop._fabric is None:
            return loop._launch(args, kwargs)
        return train(loop, *args, **kwargs)

    return launch


@hide_frames
class TorchNano(ABC):
    """Base class of custom training loops that run faster and in several processes.

    A subclass implements the loop in ``train``, calls ``self.setup`` with model, optimizer and
    loaders, and replaces ``loss.backward()`` by ``self.backward(loss)``. ``train`` runs the loop in
    each process on a share of the rows.

    Parameters
    ----------
    num_processes : int, optional
    use_ipex : bool
        Accepted; it has no effect beyond the automatic settings.
    distributed_backend : str
        See :class:`~bigdl.nano.pytorch.Trainer`; any other name is passed to Lightning Fabric as
        its strategy.
    process_group_backend : {"gloo"}, optional
    precision : optional
        See :class:`~bigdl.nano.pytorch.Trainer`.
    cpu_for_each_process : list of list of int, optional
    channels_last : bool, optional
    auto_lr : bool
        With several processes, increase learning rates linearly to `num_processes` times the
        user's rate within 1000 steps of each optimizer.
    fused_optimizers, tune_process, inductor, bucket_cap_mb, frozen_prefix
        See :class:`~bigdl.nano.pytorch.Trainer`.
    *args, **kwargs
        Arguments of ``lightning_fabric.Fabric``.

    Raises
    ------
    UsageError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import TorchNano
    >>> class Regression(TorchNano):
    ...     def train(self, x, y, epochs):
    ...         rows = torch.utils.data.TensorDataset(x, y)
    ...         loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    ...         model = torch.nn.Linear(2, 1)
    ...         optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...         model, optimizer, loader = self.setup(model, optimizer, loader)
    ...         for _ in range(epochs):
    ...             for inputs, targets in loader:
    ...                 optimizer.zero_grad()
    ...                 loss = torch.nn.functional.mse_loss(model(inputs), targets)
    ...                 self.backward(loss)
    ...                 optimizer.step()
    ...         return loss.item()
    >>> x = torch.rand(64, 2)
    >>> Regression(num_processes=1).train(x, x.sum(1, keepdim=True), epochs=50) < 0.01
    True
    """

    _fabric: Fabric | None = None  # while the loop runs
    _steps: Sequence[FastSteps] = ()
    _prefixes: Sequence[ForwardPrefix] = ()
    _report: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__(**kwargs)
        if "train" in vars(cls):
            setattr(cls, "train", _wrap_train(cls.train))  # noqa: B010 - mypy knows no assignment to a method

    def __init__(
        self,
        num_processes: int | None = None,
        use_ipex: bool = False,
        distributed_backend: str = "subprocess",
        process_group_backend: str | None = None,
        precision: object = None,
        cpu_for_each_process: list[list[int]] | None = None,
        channels_last: bool | None = None,
        auto_lr: bool = True,
        *args: Any,
        fused_optimizers: bool = True,
        tune_process: bool = True,
        inductor: bool = False,
        bucket_cap_mb: float = 25.0,
        frozen_prefix: bool | None = None,
        **kwargs: Any,
    ):
        _check_positional(args)
        check_bool("auto_lr", auto_lr)
        if distributed_backend not in (*BACKENDS, "k8s"):
            warnings.warn(
                f"distributed_backend={distributed_backend!r} is not a backend of Nano and is "
                "passed to Lightning Fabric as its strategy",
                stacklevel=user_stacklevel(),
            )
            kwargs.setdefault("strategy", distributed_backend)
            kwargs.setdefault("devices", num_processes or 1)
            num_processes, distributed_backend = None, "subprocess"
        self._options = TrainingOptions(
            num_processes=num_processes,
            distributed_backend=distributed_backend,
            process_group_backend=process_group_backend,
            cpu_for_each_process=cpu_for_each_process,
            tune_process=tune_process,
            precision=precision,
            channels_last=channels_last,
            fused_optimizers=fused_optimizers,
            use_ipex=use_ipex,
            inductor=inductor,
            bucket_cap_mb=bucket_cap_mb,
            frozen_prefix=frozen_prefix,
        )
        if self._options.inductor == "auto":
            raise UsageError(
                "inductor='auto' compares the steps of a fit, which a custom loop does not have; "
                "pass True or False, or use Trainer",
                code="unsupported",
                argument="inductor",
            )
        check_lightning_arguments(kwargs, self._options.count)
        self._auto_lr, self._fabric_keywords = auto_lr, kwargs

    @abstractmethod
    def train(self, *args: Any, **kwargs: Any) -> Any:  # the subclass declares the types
        """Run the training loop; return the result of rank 0.

        Modules and optimizers among the arguments are trained in place. Afterwards, modules and
        attributes of this object have the state of rank 0.
        """

    def setup(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *dataloaders: DataLoader,
        move_to_device: bool = True,
    ) -> tuple[Any, ...]:
        """Prepare a model, its optimizers and its loaders for the training loop.

        Parameters
        ----------
        model : Module
        optimizer : Optimizer or sequence of Optimizer
        *dataloaders : DataLoader
            Loaders; each process gets a share of the rows, shuffled if the loader shuffles.
        move_to_device : bool

        Returns
        -------
        model : Module
            Wrapped model with all attributes of the original.
        optimizer : Optimizer or list of Optimizer
            One optimizer, or a list if a sequence was passed.
        dataloader : DataLoader or list of DataLoader
            One loader, or a list for several; omitted if there is none.

        Examples
        --------
        >>> import torch
        >>> from bigdl.nano.pytorch import TorchNano
        >>> class Loop(TorchNano):
        ...     def train(self):
        ...         net = torch.nn.Linear(2, 1)
        ...         loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
        ...         optimizer = torch.optim.SGD(net.parameters())
        ...         model, optimizer, batches = self.setup(net, optimizer, loader)
        ...         return [model(batch).shape for batch in batches]
        >>> Loop().train()
        [torch.Size([2, 1]), torch.Size([2, 1])]
        """
        single = isinstance(optimizer, Optimizer)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        model, optimizers = self._prepare(model, optimizers, move_to_device)
        result: tuple[Any, ...] = (model, optimizers[0] if single else optimizers)
        if dataloaders:
            result += (self.setup_dataloaders(*dataloaders, move_to_device=move_to_device),)
        return result

    def setup_dataloaders(
        self,
        *dataloaders: DataLoader,
        replace_sampler: bool = True,
        move_to_device: bool = True,
    ) -> object:
        """Prepare loaders for the training loop; return one loader, or a list of several.

        A custom sampler is kept, and its batches are distributed to the processes.
        """
        fabric, prepared = self._running, []
        for loader in dataloaders:
            shared = loader
            if replace_sampler:
                shared = with_shared_batches(loader, fabric.global_rank, fabric.world_size)
            prepared.append(
                fabric.setup_dataloaders(
                    shared,
                    use_distributed_sampler=replace_sampler and shared is loader,
                    move_to_device=move_to_device,
                )
            )
        return prepared[0] if len(prepared) == 1 else prepared

    def backward(self, tensor: torch.Tensor, *args: object, **kwargs: Any) -> None:
        """Run ``tensor.backward(*args, **kwargs)`` with the loop's precision and strategy."""
        kwargs.pop("model", None)
        self._running.backward(tensor, *args, **kwargs)

    def save(self, content: Any, filepath: Any) -> None:  # content: a dict or a path
        """Save a checkpoint from one process; `filepath` may be the first argument."""
        if isinstance(content, (str, os.PathLike)):
            content, filepath = filepath, content
        self._running.save(filepath, dict(content))

    def load(self, filepath: str | Path) -> Any:  # any content
        """Load a checkpoint from a file."""
        return self._running.load(filepath)

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the last loop, as logged."""
        return self._report

    def __getattr__(self, name: str) -> Any:  # an attribute of Fabric
        """Return an option such as ``num_processes``, or an attribute of Fabric.

        Fabric's attributes exist while the loop runs: device, is_global_zero, print, barrier, …
        """
        if name in _SETTINGS and "_options" in vars(self):
            return _setting(self, name)
        fabric = None if name.startswith("__") else self._fabric
        if fabric is None or not hasattr(fabric, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(fabric, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _BOUND}

    @property
    def _running(self) -> Fabric:
        if self._fabric is None:
            raise UsageError(
                f"{type(self).__name__}.setup belongs in its train method, which starts the "
                "processes; call it there",
                code="state",
            )
        return self._fabric

    def _launch(self, args: tuple, kwargs: dict[str, Any]) -> object:
        """Run ``train`` in each process and return the result of rank 0."""
        options = self._options
        if options.count == 1:
            with options.tuning_context() as process_report:
                return self._run(0, args, kwargs, process_report)
        registry = self._registry(args, kwargs)
        task = (self, args, kwargs, GlobalState())
        content = run_processes(options, TorchNano._run_in_worker, *task)[0]
        returned = registry.loads(content)
        Changes.apply(registry, returned["changes"])
        return returned["result"]

    @staticmethod
    def _run_in_worker(
        rank: int, loop: TorchNano, args: tuple, kwargs: dict[str, Any], state: GlobalState
    ) -> bytes | None:
        state.restore()
        registry = loop._registry(args, kwargs)
        ignored = (*_BOUND, "_options", "_auto_lr", "_fabric_keywords", "_function")
        changes = Changes(registry, {"owner": loop}, ignored)
        result = loop._run(rank, args, kwargs)
        if rank:
            return None
        try:
            return registry.dumps({"changes": changes.collect(), "result": result})
        except Exception as error:
            raise UsageError(
                f"The result of train, a {type(result).__name__}, cannot be pickled and sent from "
                f"its process: {error}; return something else",
                code="model-copy",
            ) from error

    def _run(
        self, rank: int, args: tuple, kwargs: dict[str, Any], process_report: Sequence[str] = ()
    ) -> object:
        """Run the training loop in this process."""
        fabric = Fabric(**_fabric_arguments(self._options, self._fabric_keywords, rank))
        fabric._launched = True
        fabric.strategy.setup_environment()
        self._fabric, self._steps, self._report = fabric, [], ()
        self._process_report = process_report
        try:
            return self.train(*args, **kwargs)
        finally:
            self._fabric = None
            for steps in self._steps:
                steps.undo()
            for prefix in self._prefixes:
                prefix.undo()
            self._prefixes = []

    def _prepare(
        self, model: nn.Module, optimizers: list[Optimizer], move_to_device: bool
    ) -> tuple[nn.Module, list[Any]]:
        """Prepare a model and its optimizers for the training loop."""
        fabric, options = self._running, self._options
        if not options.inductor:  # TorchInductor compiles the forward that this would replace
            add = functools.partial(TorchNano._add_setting, self)
            self._prefixes = [*self._prefixes, ForwardPrefix(model, options, add)]
        reported = 0

        def notify(line: str) -> None:
            nonlocal reported
            self._report = (*steps.report, *self._report[reported:])
            reported = len(steps.report)
            rank_zero_info(line)

        together = fabric.world_size > 1
        steps = FastSteps(
            options,
            model,
            calls=True,
            broadcast=fabric.broadcast if together else None,
            notify=notify,
            relayouts=not together,  # gradient buckets exist by then
        )
        self._steps = [*self._steps, steps]
        steps.optimizers(optimizers)
        count = fabric.world_size
        if self._auto_lr and count > 1:
            for optimizer in optimizers:
                LearningRateRamp(optimizer, count)
            steps.report.append(f"learning rates × {count} after 1000 steps")
        prepared = fabric.setup(model, *optimizers, move_to_device=move_to_device)
        model, *optimizers = prepared if optimizers else (prepared,)
        if options.count > 1:
            process_report = options.describe_processes()
        else:
            several = f"{count} processes × " if count > 1 else ""  # of a Fabric strategy
            process_report = [*self._process_report, f"{several}{torch.get_num_threads()} threads"]
        self._report, reported = (*steps.report, *process_report), len(steps.report)
        rank_zero_info(f"Nano trains with {', '.join(self._report)}")
        return model, optimizers

    def _add_setting(self, phrase: str, line: str) -> None:
        """Record and log which runtime computes the frozen layers of a model."""
        self._report = replace_prefix_phrase(self._report, phrase)
        rank_zero_info(line)

    def _registry(self, args: tuple, kwargs: Mapping[str, Any]) -> ObjectRegistry:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        values = {f"argument {name}": value for name, value in arguments.items()}
        values |= {f"attribute {name}": value for name, value in vars(self).items()}
        trained = {
            name: value
            for name, value in values.items()
            if isinstance(value, (nn.Module, Optimizer))
        }
        return ObjectRegistry({"owner": self, **trained}, _unwrap)


def nano(
    num_processes: int | None = None,
    use_ipex: bool = False,
    distributed_backend: str = "subprocess",
    precision: object = None,
    cpu_for_each_process: list[list[int]] | None = None,
    channels_last: bool | None = None,
    auto_lr: bool = True,
    *args: object,
    **kwargs: Any,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that accelerates a training function without changes to its code.

    The function's arguments must include exactly one module that is not a loss. It is prepared as
    in :meth:`TorchNano.setup`, with all optimizers and loaders among the arguments. After a call
    with several processes, module and optimizers have the state of rank 0.

    Parameters
    ----------
    num_processes, use_ipex, distributed_backend, precision, cpu_for_each_process, channels_last, \
auto_lr
        See :class:`TorchNano`.
    *args, **kwargs
        Further arguments of :class:`TorchNano` and of ``lightning_fabric.Fabric``.

    Returns
    -------
    callable
        The decorator.

    Raises
    ------
    UsageError
        If an argument is invalid. When the function is called, if there is not exactly one module.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import nano
    >>> @nano(num_processes=1)  # 2: two processes, each with half of the rows
    ... def train(model, optimizer, loader, epochs):
    ...     for _ in range(epochs):
    ...         for x, y in loader:
    ...             optimizer.zero_grad()
    ...             torch.nn.functional.mse_loss(model(x), y).backward()
    ...             optimizer.step()
    >>> x = torch.rand(64, 2)
    >>> rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    >>> loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    >>> model = torch.nn.Linear(2, 1)
    >>> train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=100)
    >>> torch.allclose(model(x), x.sum(1, keepdim=True), atol=0.1)  # the model is trained
    True
    """
    _check_positional(args)
    if distributed_backend == "spawn":
        raise UsageError(
            "bigdl.nano.pytorch.nano do not support spawn; use distributed_backend='subprocess'",
            code="unsupported",
        )
    strategy = kwargs.get("strategy", distributed_backend)
    if "deepspeed" in str(strategy).lower():
        raise UsageError(
            "bigdl.nano.pytorch.nano do not support deepspeed, which has a different backward; use "
            "TorchNano",
            code="unsupported",
        )
    if callable(num_processes):  # @nano without parentheses
        return nano()(num_processes)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        loop = _DecoratedLoop(
            num_processes,
            use_ipex,
            distributed_backend,
            precision=precision,
            cpu_for_each_process=cpu_for_each_process,
            channels_last=channels_last,
            auto_lr=auto_lr,
            **kwargs,
        )
        loop._function = function

        @functools.wraps(function)
        def train(*inputs: P.args, **keywords: P.kwargs) -> T:
            models = sum(is_model(value) for value in (*inputs, *keywords.values()))
            if models != 1:
                raise UsageError(
                    "there should be only one nn.Module in the function parameter list, but got "
                    f"{models}",
                    code="argument-value",
                )
            return cast("T", loop.train(*inputs, **keywords))

        return train

    return decorate


_DTYPES = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "64-true": torch.float64}
_SETTINGS = (
    "num_processes",
    "use_ipex",
    "cpu_for_each_process",
    "channels_last",
    "auto_lr",
    "dtype",
)
"""Attributes that programs for BigDL 2.x read. A subclass may override them."""


def _setting(loop: TorchNano, name: str) -> object:
    if name == "num_processes":
        return loop._options.count
    if name == "auto_lr":
        return loop._auto_lr
    if name == "dtype":
        return _DTYPES.get(loop._options.precision or "", torch.float32)
    return getattr(loop._options, name)


def _check_positional(args: tuple) -> None:
    if args:
        raise UsageError(
            f"TorchNano takes Fabric's arguments by keyword, but it got {len(args)} more "
            "positional ones",
            code="argument-unknown",
        )


class _DecoratedLoop(TorchNano):
    """Training loop of a function decorated with :func:`nano`."""

    _function: Callable[..., Any]

    def train(self, *args: Any, **kwargs: Any) -> object:
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        model_key = next(name for name, value in values.items() if is_model(value))
        optimizers = {name: value for name, value in values.items() if isinstance(value, Optimizer)}
        loaders = {name: value for name, value in values.items() if isinstance(value, DataLoader)}
        values[model_key], prepared = self._prepare(
            values[model_key], list(optimizers.values()), True
        )
        values |= dict(zip(optimizers, prepared, strict=True))
        for name, loader in loaders.items():
            values[name] = self.setup_dataloaders(loader)
        positional = [values.pop(index) for index in range(len(args))]
        return self._function(*positional, **values)


def _unwrap(value: object) -> object:
    """Return the user's object in a Fabric wrapper; return other objects unchanged."""
    if isinstance(value, _FabricModule):
        return value.module
    return value.optimizer if isinstance(value, _FabricOptimizer) else value


def _fabric_arguments(
    options: TrainingOptions, keywords: Mapping[str, Any], rank: int
) -> dict[str, Any]:
    arguments = dict(keywords)
    if "plugins" not in arguments and options.precision in ("bf16-mixed", "16-mixed"):
        # Fabric's plugin would reject ``loss.backward()``.
        arguments["plugins"] = [_Bf16Autocast()]
    elif "plugins" not in arguments and options.precision is not None:
        arguments["precision"] = options.precision
    if options.count > 1:
        group = LocalGroup()
        group.join(rank, options.count)
        strategy = _FabricDdpStrategy(**ddp_arguments(group, options))
        return arguments | {"accelerator": "cpu", "strategy": strategy}
    arguments = {"accelerator": "cpu", "devices": 1} | arguments
    if arguments["accelerator"] == "cpu" and arguments["devices"] == 1:
        arguments.setdefault("strategy", SingleDeviceStrategy(torch.device("cpu")))
    return arguments


class _Bf16Autocast(Precision):
    """Precision plugin with autocast to bfloat16 that permits a plain ``loss.backward()``."""

    precision = "bf16-mixed"

    def forward_context(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    def convert_output(self, data: object) -> object:
        return tree_map_only(torch.Tensor, full_precision, data)


class _FabricDdpStrategy(DDPStrategy):
    """Fabric's DDP strategy for an already initialized process group."""

    def _configure_launcher(self) -> None:
        self._launcher = None

    def _set_world_ranks(self) -> None:
        """Do nothing: the process group knows the ranks."""

    def _setup_distributed(self) -> None:
        """Do nothing: the process group is already initialized."""
