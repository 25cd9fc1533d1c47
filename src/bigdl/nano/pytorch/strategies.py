"""Lightning strategies with Nano's settings, for one process or several.

A Lightning strategy selects the device and reduces gradients; its launcher starts the processes.
Both strategies apply the same settings (:class:`FastSteps`) during a fit. After a fit in several
processes, trainer and model have the same state as after a fit in this process.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint
from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from pytorch_lightning.strategies import (
    DDPStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from pytorch_lightning.strategies.launchers.launcher import _Launcher
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from pytorch_lightning.utilities.data import _is_dataloader_shuffled, _update_dataloader
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError, user_stacklevel
from bigdl.nano.pytorch.compiling import InductorAutotuner
from bigdl.nano.pytorch.frozen.automatic import AutomaticPrefix, replace_prefix_phrase
from bigdl.nano.pytorch.frozen.callback import FrozenPrefixCallback
from bigdl.nano.pytorch.training.group import LocalGroup, ddp_arguments
from bigdl.nano.pytorch.training.optimizers import scale_rates, scale_schedule, warmup_factor
from bigdl.nano.pytorch.training.options import TrainingOptions
from bigdl.nano.pytorch.training.processes import run_processes
from bigdl.nano.pytorch.training.rates import AS_WRITTEN, BUILDING, WITH_PREFIX, StepRates
from bigdl.nano.pytorch.training.shared_batches import with_shared_batches
from bigdl.nano.pytorch.training.shared_objects import Changes, GlobalState, ObjectRegistry
from bigdl.nano.pytorch.training.steps import FastSteps

if TYPE_CHECKING:
    from pytorch_lightning.utilities.types import STEP_OUTPUT

_OF_LIGHTNING = frozenset(vars(LightningModule())) - frozenset(vars(torch.nn.Module()))
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")  # of a trainer


class AutoLr:
    """Learning-rate scaling for training in several processes, as set by ``auto_lr``.

    Rates are multiplied by the number of processes. Unless the model has schedulers, they increase
    gradually during the first tenth of the epochs, or of the steps if a tenth is below one epoch.

    Parameters
    ----------
    auto_lr : bool or dict
        False disables scaling. A dict may contain ``"warmup_epochs"``.

    Raises
    ------
    UsageError
        If `auto_lr` has another type, or ``"warmup_epochs"`` is not a non-negative int.
    """

    def __init__(self, auto_lr: bool | dict):
        if not isinstance(auto_lr, (bool, dict)):
            raise UsageError(
                "auto_lr must be True, False or a dict such as {'warmup_epochs': 3}, "
                f"not {auto_lr!r}",
                code="argument-type",
                argument="auto_lr",
            )
        options = auto_lr if isinstance(auto_lr, dict) else {}
        unknown = ", ".join(repr(name) for name in options if name != "warmup_epochs")
        if unknown:
            warnings.warn(
                f"auto_lr takes 'warmup_epochs' only; {unknown} has no effect",
                stacklevel=user_stacklevel(),
            )
        self._epochs = options.get("warmup_epochs")
        if self._epochs is not None:
            check_integer("warmup_epochs of auto_lr", self._epochs, 0)
        self._enabled = auto_lr is not False

    def apply(self, trainer: Trainer, strategy: ParallelStrategy) -> list[str]:
        """Scale the learning rates of a strategy's optimizers and add warm-up schedulers.

        Returns
        -------
        list of str
            Short descriptions for the log.
        """
        count = strategy.world_size
        if not self._enabled or count == 1 or not strategy.optimizers:
            return []
        scale_rates(strategy.optimizers, count)
        if strategy.lr_scheduler_configs:
            for config in strategy.lr_scheduler_configs:
                scale_schedule(config.scheduler, count)
            warnings.warn(
                "The model has learning-rate schedulers: auto_lr multiplies learning rates by the "
                f"number of processes ({count}) and does not warm them up",
                stacklevel=user_stacklevel(),
            )
            return [f"learning rates × {count}"]
        interval, length = self._warmup(trainer)
        if not length:
            return [f"learning rates × {count}"]
        factor = functools.partial(warmup_factor, length=length, processes=count)
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
            for optimizer in strategy.optimizers
        ]
        strategy.lr_scheduler_configs = [
            LRSchedulerConfig(scheduler, name="auto_lr", interval=interval)
            for scheduler in schedulers
        ]
        if not trainer.lightning_module.automatic_optimization:
            # With manual optimization Lightning does not step schedulers.
            _callbacks(trainer).append(_scheduler_callback(schedulers, interval))
        return [f"learning rates × {count} after a warm-up of {length} {interval}s"]

    def _warmup(self, trainer: Trainer) -> tuple[str, int]:
        if self._epochs is not None:
            return "epoch", self._epochs
        epochs = trainer.max_epochs
        if epochs is not None and epochs >= 10:
            return "epoch", epochs // 10
        steps = trainer.estimated_stepping_batches
        return "step", 0 if steps == float("inf") else int(steps) // 10


def _scheduler_callback(schedulers: list[Any], interval: str) -> Callback:
    """Return a callback that steps schedulers after each step or each epoch."""

    def step(*args: object) -> None:
        for scheduler in schedulers:
            scheduler.step()

    of_steps = interval == "step"
    return LambdaCallback(**{"on_train_batch_end" if of_steps else "on_train_epoch_end": step})


class _FastStrategy(Strategy):
    """Base class of Nano's strategies: applies FastSteps and other settings during a fit.

    Attributes
    ----------
    settings : tuple of str
        Short descriptions of the settings of the last fit.
    process_report : sequence of str
        Short descriptions of the process settings.
    rates : StepRates
        Durations of the steps of the last fit.
    """

    options: TrainingOptions
    steps: FastSteps | None = None
    prefix: AutomaticPrefix | None = None
    compiler: InductorAutotuner | None = None
    settings: tuple[str, ...] = ()
    process_report: Sequence[str] = ()
    rates = StepRates()
    _reported = 0  # number of leading settings that come from the steps

    def setup(self, trainer: Trainer) -> None:
        # Before optimizers and gradient buckets are created.
        if trainer.state.fn == TrainerFn.FITTING:
            module = cast("LightningModule", self.lightning_module)
            several = self.options.count > 1
            self.steps = FastSteps(
                self.options,
                module,
                device=self.root_device.type,
                steps_left=functools.partial(_batches_left, trainer),
                broadcast=self.broadcast if several else None,
                notify=self._on_step_config,
                on_layout=self._on_layout,
            )
        super().setup(trainer)
        if self.steps is not None:
            self.steps.optimizers(self.optimizers)
            self.settings = (*self.steps.report, *self._describe())
            self._reported = len(self.steps.report)
            rank_zero_info(f"Nano trains with {', '.join(self.settings)}")
            self.prefix = self._automatic_prefix(trainer)
            self.rates = StepRates()
            self.compiler = self._inductor_autotuner(trainer)

    def _on_layout(self) -> None:
        """Do nothing, since nothing depends on the memory format of the weights in one process."""

    def _automatic_prefix(self, trainer: Trainer) -> AutomaticPrefix:
        chosen = any(isinstance(each, FrozenPrefixCallback) for each in _callbacks(trainer))
        return AutomaticPrefix(
            cast("LightningModule", self.lightning_module),
            False if chosen or self.root_device.type != "cpu" else self.options.frozen_prefix,
            self.options.precision,
            functools.partial(_batches_left, trainer),
            self._on_prefix,
        )

    def _on_prefix(self, phrase: str, line: str) -> None:
        self.settings = replace_prefix_phrase(self.settings, phrase)
        rank_zero_info(line)

    def _inductor_autotuner(self, trainer: Trainer) -> InductorAutotuner | None:
        if self.options.inductor != "auto":
            return None
        module = cast("LightningModule", self.lightning_module)
        left = functools.partial(_batches_left, trainer)
        return InductorAutotuner(module, self.rates, left, self._on_compiler)

    def _on_step_config(self, line: str) -> None:
        self._update_settings()
        rank_zero_info(line)

    def _update_settings(self) -> None:
        """Update the phrases about training steps in the list of settings."""
        steps = cast("FastSteps", self.steps)
        others = self.settings[self._reported :]
        self.settings, self._reported = (*steps.report, *others), len(steps.report)

    def _on_compiler(self, phrase: str) -> None:
        self.settings = (*self.settings, phrase)
        rank_zero_info(f"Nano trains with {phrase}")

    def batch_to_device(self, batch: object, device=None, dataloader_idx: int = 0) -> object:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return batch if self.steps is None else self.steps.batch(batch)

    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        prefix = cast("AutomaticPrefix", self.prefix)
        steps = cast("FastSteps", self.steps)
        if self._begin_step(prefix, steps, args[:1]):
            args = steps.batch(args)
        with prefix.step(first=steps.autotuner is None):
            return cast("STEP_OUTPUT", steps.step(super().training_step, *args, **kwargs))

    def _begin_step(self, prefix: AutomaticPrefix, steps: FastSteps, batch: object) -> bool:
        """Record the start of a step; return True if precision or memory format has changed."""
        if not self.rates.has_begun:
            steps.align()
        self.rates.end()
        compiler = self.compiler
        others = prefix.is_building or prefix.segments or (compiler and compiler.is_compiled)
        is_changed = steps.begin(batch, possible=not others)
        if compiler is not None:
            compiler.begin(prefix)
        if prefix.is_building:
            phase = BUILDING
        elif prefix.segments:
            phase = WITH_PREFIX
        else:
            phase = AS_WRITTEN if compiler is None else compiler.phase
        self.rates.begin(phase)
        return is_changed

    def teardown(self) -> None:
        if self.compiler is not None:
            self.compiler.undo()
            self.compiler = None
        if self.prefix is not None:
            self.prefix.close()
            self.prefix = None
            if self.rates.gain is not None:
                rank_zero_info(f"Nano trained at {self.rates.gain}")
        if self.steps is not None:
            self.steps.undo()
            self.steps = None
        super().teardown()

    def _describe(self) -> list[str]:
        device = self.root_device
        on = f"{torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
        return [*self.process_report, on]


def _batches_left(trainer: Trainer) -> float | None:
    """Return the number of batches that a fit still has to train on; None if unknown."""
    left = []
    batches, epochs, steps = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    if epochs not in (None, -1) and batches != float("inf"):
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        left.append((cast("int", epochs) - trainer.current_epoch) * batches - ready)
    if steps not in (None, -1):
        left.append((steps - trainer.global_step) * trainer.accumulate_grad_batches)
    return min(left, default=None)


class SingleProcessStrategy(_FastStrategy, SingleDeviceStrategy):
    """Strategy that trains in the calling process.

    Parameters
    ----------
    options : TrainingOptions
    device : torch.device or str
        The CPU, or a CUDA GPU.
    """

    strategy_name = "nano_single_process"

    def __init__(self, options: TrainingOptions, device: torch.device | str = "cpu"):
        super().__init__(device=device)
        self.options = options

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        scale_rates(self.optimizers, 1)  # an earlier fit may have had more processes


class _FitDdpStrategy(DDPStrategy):
    """DDP strategy whose process group exists only in the processes of a fit."""

    def setup(self, trainer: Trainer) -> None:
        if self.world_size > 1:
            super().setup(trainer)
        else:
            super(DDPStrategy, self).setup(trainer)

    def configure_ddp(self) -> None:
        model = cast("torch.nn.Module", self.model)
        if any(parameter.requires_grad for parameter in model.parameters()):
            super().configure_ddp()

    def reduce(
        self, tensor: torch.Tensor, group: object = None, reduce_op: Any = "mean"
    ) -> torch.Tensor:
        # Lightning would use integer division for the mean of integer tensors.
        whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        if whole and reduce_op in (None, "mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]  # one process has no DDP
        return super()._setup_model(model) if self.world_size > 1 else model


class ProcessesStrategy(_FastStrategy, _FitDdpStrategy):
    """Strategy that trains in several processes; evaluation and prediction run in the caller.

    Parameters
    ----------
    options : TrainingOptions
    auto_lr : AutoLr
    """

    strategy_name = "nano_processes"

    def __init__(self, options: TrainingOptions, auto_lr: AutoLr):
        super().__init__(**ddp_arguments(LocalGroup(), options))
        self.options = options
        self.auto_lr = auto_lr
        self._rates_report: list[str] = []

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Do nothing: a worker knows its rank before it has a strategy."""

    def setup_distributed(self) -> None:
        """Do nothing: the process group of a fit is already initialized."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        self._rates_report = self.auto_lr.apply(trainer, self)

    def _configure_launcher(self) -> None:
        self._launcher = FitLauncher()

    def _on_layout(self) -> None:
        """Rebuild the gradient buckets for the new memory format of the weights."""
        if self.world_size > 1 and isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
            self.configure_ddp()

    def _describe(self) -> list[str]:
        return [*self.options.describe_processes(), *self._rates_report]


class FitLauncher(_Launcher):
    """Launcher that runs fits in worker processes, and everything else in this process."""

    is_interactive_compatible = True

    def launch(
        self, function: Callable, *args: object, trainer: Trainer | None = None, **kwargs: object
    ) -> object:
        """Call a trainer's stage function; a fit runs in the worker processes."""
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        registry = _registry(trainer)
        task = (function, trainer, args, kwargs, GlobalState())
        options = cast("ProcessesStrategy", trainer.strategy).options
        state = registry.loads(run_processes(options, _fit, *task)[0])
        Changes.apply(registry, state["changes"])
        _restore(trainer, state)
        return None

    def kill(self, signum: int) -> None:
        """Do nothing: no process outlives :meth:`launch`."""


def _fit(
    rank: int, function: Callable, trainer: Trainer, args: tuple, kwargs: dict, state: GlobalState
) -> bytes | None:
    """Run the fit in one rank; return the pickled state of rank 0."""
    strategy = cast("ProcessesStrategy", trainer.strategy)
    cast("LocalGroup", strategy.cluster_environment).join(rank, strategy.options.count)
    state.restore()
    reset_seed()
    module = trainer.lightning_module
    registry = _registry(trainer)
    changes = Changes(registry, _user_callbacks(trainer), _OF_LIGHTNING)
    _share_loaders(trainer)
    _sync_validation_metrics(trainer, module)
    function(*args, **kwargs)
    del vars(module)["log"]
    if rank:
        # A module's metrics may synchronize in state_dict, on all ranks.
        module.state_dict()
        return None
    return _pack_state(registry, changes, trainer)


def _registry(trainer: Trainer) -> ObjectRegistry:
    module = trainer.lightning_module
    optimizers = {
        f"attribute {name}": value
        for name, value in vars(module).items()
        if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))
    }
    return ObjectRegistry(
        {"model": module, "trainer": trainer, **_named_callbacks(trainer), **optimizers}
    )


def _callbacks(trainer: Any) -> list[Callback]:
    return trainer.callbacks  # set by a connector, invisible to type checkers


def _named_callbacks(trainer: Trainer) -> dict[str, Callback]:
    return {f"callback {index}": each for index, each in enumerate(_callbacks(trainer))}


def _user_callbacks(trainer: Trainer) -> dict[str, Callback]:
    """Return the user's callbacks by name; Lightning's callbacks are transferred as state dicts."""
    return {
        name: each
        for name, each in _named_callbacks(trainer).items()
        if not type(each).__module__.startswith("pytorch_lightning.")
    }


def _pack_state(registry: ObjectRegistry, changes: Changes, trainer: Trainer) -> bytes:
    trainer.lightning_module.state_dict()
    state = {
        "changes": changes.collect(),
        "state": trainer.state,
        "metrics": {name: getattr(trainer._logger_connector, name) for name in _METRICS},
        "callbacks": [each.state_dict() for each in _callbacks(trainer)],
        "fit_loop": trainer.fit_loop.state_dict(),
        "max_epochs": trainer.fit_loop.max_epochs,
        "should_stop": trainer.should_stop,
        "settings": cast("ProcessesStrategy", trainer.strategy).settings,
        "rates": cast("ProcessesStrategy", trainer.strategy).rates,
    }
    optimizers = (trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs)
    try:
        return registry.dumps(state | {"optimizers": optimizers})
    except Exception:  # custom optimizers and schedulers may not be picklable
        return registry.dumps(state | {"optimizers": ([], [])})


def _restore(trainer: Trainer, state: dict[str, Any]) -> None:
    for name, metrics in state["metrics"].items():
        getattr(trainer._logger_connector, name).update(metrics)
    for callback, callback_state in zip(_callbacks(trainer), state["callbacks"], strict=False):
        if isinstance(callback, ModelCheckpoint):
            callback.dirpath = callback_state["dirpath"]  # else it ignores the state's scores
        if callback_state:
            callback.load_state_dict(callback_state)
    loop = trainer.fit_loop
    loop.load_state_dict(state["fit_loop"])
    loop.restarting = False  # the state does not come from a checkpoint file
    loop.max_epochs = state["max_epochs"]
    trainer.should_stop = state["should_stop"]
    strategy = cast("ProcessesStrategy", trainer.strategy)
    strategy.optimizers, strategy.lr_scheduler_configs = state["optimizers"]
    strategy.settings, strategy.rates = state["settings"], state["rates"]
    trainer.state = state["state"]


def _sync_validation_metrics(trainer: Trainer, module: LightningModule) -> None:
    """Make ``log`` synchronize a module's validation metrics across processes by default.

    Parameters
    ----------
    trainer : Trainer
        Trainer in a process of a fit.
    module : LightningModule
    """
    log = module.log
    signature = inspect.signature(log)

    @functools.wraps(log)
    def log_together(*args: object, **kwargs: object) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        of_epoch = arguments.get("on_epoch")
        if of_epoch is None:
            of_epoch = trainer.validating or trainer.sanity_checking
        alone = arguments.get("on_step") or arguments.get("rank_zero_only")
        arguments.setdefault("sync_dist", bool(of_epoch and not alone))
        log(**arguments)

    vars(module)["log"] = log_together


def _share_loaders(trainer: Trainer) -> None:
    """Make a trainer distribute its loaders' rows in the order in which one process reads them.

    Custom samplers are kept; see :func:`with_shared_batches`. Sequential loaders stay sequential,
    while Lightning would shuffle them for training. Validation counts each row once if all
    processes then have equally many batches; Lightning repeats rows.

    Parameters
    ----------
    trainer : Trainer
        Trainer in a process of a fit.
    """
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader

    def prepare_as_here(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        sharing = with_shared_batches(dataloader, trainer.global_rank, trainer.world_size)
        if sharing is not dataloader:
            return sharing
        shared = prepare(dataloader, shuffle=_is_dataloader_shuffled(dataloader), mode=mode)
        return shared if mode is RunningStage.TRAINING else _without_repeats(shared)

    vars(connector)["_prepare_dataloader"] = prepare_as_here


def _without_repeats(dataloader: object) -> object:
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(dataloader, DataLoader) or type(sampler) is not DistributedSampler:
        return dataloader
    dataset = cast("Sized", sampler.dataset)
    rows, count, size = len(dataset), sampler.num_replicas, dataloader.batch_size
    if sampler.shuffle or sampler.drop_last or dataloader.drop_last or not size or rows < count:
        return dataloader
    fewest, most = rows // count, -(-rows // count)
    if fewest == most or -(-fewest // size) != -(-most // size):
        return dataloader
    exact = UnrepeatedDistributedSamplerWrapper(
        SequentialSampler(dataset), num_replicas=count, rank=sampler.rank, shuffle=False
    )
    return _update_dataloader(dataloader, exact)
