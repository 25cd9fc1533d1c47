"""LightningModules in Orca's workers: their hooks, logged values, and ``self.trainer``.

A worker has no Lightning Trainer. :class:`LightningForward` calls the module's steps and hooks at
the corresponding points of Orca's loop. :class:`WorkerTrainer` is the module's ``self.trainer``.
Values of ``self.log`` are kept in :class:`LoggedValues` and merged over the workers at the end of
an epoch. The states of the module's torchmetrics objects are merged before the epoch-end hooks, so
that ``compute()`` in a hook covers all rows.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from bigdl.common.errors import UsageError
from bigdl.orca.learn.metrics.metric import merge_tensors, reductions_of
from bigdl.orca.learn.pytorch.forward import (
    BatchColumns,
    ForwardPass,
    is_lightning,
    lightning_base,
)
from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.batches import all_gather_json
from bigdl.training.fit import FitContext
from bigdl.training.loss_form import LossWeights
from bigdl.training.position import Position, StoppingCriterion
from bigdl.training.state import dumps, loads

if TYPE_CHECKING:
    from typing import NoReturn, Self

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from bigdl.common.types import Tensors
    from bigdl.orca.learn.pytorch.parts import BuiltParts
    from bigdl.training.fit import EpochRunner

T = TypeVar("T")

GUIDE = "docs/guides/from-lightning"

_DROPPED = (
    *("prepare_data", "configure_callbacks", "configure_sharded_model"),
    *("train_dataloader", "val_dataloader"),
)
"""Hooks of a fit that Orca's loop never calls."""

_STEP_HOOKS = (
    *("training_step", "backward", "on_before_backward", "on_after_backward"),
    *("on_before_zero_grad", "optimizer_zero_grad", "on_before_optimizer_step", "optimizer_step"),
    *("configure_gradient_clipping", "on_train_batch_start", "on_train_batch_end"),
)
_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "sum", "min", "max")},
    "avg": "mean",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    sum: "sum",
    min: "min",
    max: "max",
}


def overrides(model: object, name: str) -> bool:
    """Return True if a LightningModule overrides a hook."""
    hook = getattr(type(model), name, None)
    is_overridden = hook is not None and hook is not getattr(lightning_base(model), name, None)
    return is_overridden or name in vars(model)


def dropped_hooks(model: object, *, has_loss: bool, in_driver: bool = False) -> str | None:
    """Return a warning that lists the hooks not called by a fit, or None if there are none.

    Parameters
    ----------
    model : LightningModule
    has_loss : bool
        True if ``loss=`` was passed, so that the module is trained like a plain module.
    in_driver : bool
        True for the parameter layer, whose workers only call the training step.
    """
    names = [name for name in _DROPPED if overrides(model, name)]
    if has_loss or in_driver:
        hooks = [n for n in dir(lightning_base(model)) if n.startswith("on_")]
        steps = () if in_driver else ("training_step", "validation_step")
        for name in (*steps, *_STEP_HOOKS, *hooks):
            is_called = in_driver and (name == "training_step" or name.startswith("on_validation"))
            if overrides(model, name) and not is_called and name not in names:
                names.append(name)
    if not names:
        return None
    because = " because loss= was passed" if has_loss else ""
    if in_driver:
        because = " by backend='bigdl', which also drops values logged in training"
    return (
        f"{type(model).__name__} has Lightning hooks that are not called{because}: "
        f"{', '.join(names)}; see {GUIDE}"
    )


_UNUSED = {
    "predict": ("predict", "predict calls forward"),
    "evaluate": ("test", "evaluate is Lightning's validate, not its test"),
}


def unused_hooks(model: object, verb: str) -> str | None:
    """Return a warning that lists the hooks not called by prediction or evaluation, or None.

    Parameters
    ----------
    model : torch.nn.Module
    verb : {"predict", "evaluate"}
        ``"predict"`` checks the hooks of Lightning's ``predict``, ``"evaluate"`` those of its
        ``test``.
    """
    base = lightning_base(model)
    if base is None:
        return None
    of, instead = _UNUSED[verb]
    hooks = (n for n in dir(base) if n.startswith(f"on_{of}_"))
    names = [n for n in (f"{of}_step", f"{of}_dataloader", *hooks) if overrides(model, n)]
    if not names:
        return None
    return (
        f"{type(model).__name__} has Lightning hooks that are not called: {', '.join(names)}; "
        f"{instead}; see {GUIDE}"
    )


# Optimizers of a module ---------------------------------------------------------------------------


def configure_optimizer(
    module: Any,
) -> tuple[Any, Any, str | None, int, str]:  # module: a LightningModule
    """Return the optimizer and scheduler from a LightningModule's ``configure_optimizers``.

    Returns
    -------
    optimizer : torch.optim.Optimizer
    scheduler : object or None
    monitor : str or None
        Metric that the scheduler monitors.
    frequency : int
        Number of epochs or steps between two scheduler steps.
    interval : str
        ``"epoch"`` or ``"step"``.
    """
    configuration, schedulers, monitor = module.configure_optimizers(), None, None
    if isinstance(configuration, list | tuple):
        if len(configuration) == 2 and isinstance(configuration[0], list | tuple):
            configuration, schedulers = configuration
        elif len(configuration) == 1 and isinstance(configuration[0], dict):
            configuration = configuration[0]
    if isinstance(configuration, dict):
        monitor, schedulers = configuration.get("monitor"), configuration.get("lr_scheduler")
        configuration = configuration.get("optimizer")
    if isinstance(configuration, list | tuple):
        if len(configuration) != 1:
            raise UsageError(
                "A LightningModule with several optimizers is not supported; train it with the "
                "Trainer of bigdl.nano.pytorch, or return one optimizer with several parameter "
                "groups",
                code="optimizer-unsupported",
            )
        configuration = configuration[0]
    if isinstance(schedulers, list | tuple):
        if len(schedulers) > 1:
            raise UsageError(
                "A LightningModule with several schedulers is not supported; combine them, e.g. "
                "with "
                "torch.optim.lr_scheduler.ChainedScheduler",
                code="optimizer-unsupported",
            )
        schedulers = schedulers[0] if schedulers else None
    if configuration is None:
        raise UsageError(
            "configure_optimizers of the LightningModule returned no optimizer",
            code="optimizer-unsupported",
        )
    if schedulers is None:
        return configuration, None, None, 1, "epoch"
    options = schedulers
    if not isinstance(schedulers, dict):
        options = {"scheduler": schedulers, "monitor": monitor}
    interval = options.get("interval", "epoch")
    if interval not in ("epoch", "step"):
        raise UsageError(
            "The scheduler of a LightningModule must have the interval 'epoch' or 'step', got "
            f"{interval!r}",
            code="argument-value",
            argument="interval",
            allowed=["epoch", "step"],
        )
    frequency = int(options.get("frequency", 1))
    return configuration, options["scheduler"], options.get("monitor"), frequency, interval


# self.trainer -------------------------------------------------------------------------------------


class _UnsupportedAttribute(UsageError, AttributeError):
    """Raised for an attribute of Lightning's Trainer that workers do not have."""

    code = "unsupported"


class _NoLogger:
    """Lightning logger that discards everything and warns when it is first used."""

    def __init__(self, warn: Callable[[str], None]):
        self._warn = warn

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        self._warn(
            "The LightningModule writes to self.logger, but Orca has no Lightning logger, so the "
            "output is dropped; use self.log, or a callback of "
            "bigdl.orca.learn.pytorch.callbacks"
        )
        return self

    def __call__(self, *_: object, **__: object) -> Self:
        return self


class _Loader:
    """Training data as ``self.trainer.train_dataloader``; its length is the number of batches."""

    def __init__(self, trainer: WorkerTrainer):
        self._trainer = trainer

    def __len__(self) -> int:
        return self._trainer.num_training_batches

    def __iter__(self) -> Iterator:
        if self._trainer._loop.train_loader is None:
            raise UsageError(
                "self.trainer.train_dataloader can only be read in hooks", code="state"
            )
        return iter(self._trainer._loop.train_loader)


class _FitLoop:
    """Subset of ``self.trainer.fit_loop`` that programs use to get the number of steps."""

    def __init__(self, trainer: WorkerTrainer):
        self._trainer = trainer

    def setup_data(self) -> None:
        """Do nothing: the rows are already known."""

    def __getattr__(self, name: str) -> int:
        if name in ("max_epochs", "max_steps"):
            return getattr(self._trainer, name)
        raise _UnsupportedAttribute(
            f"Orca's workers have no self.trainer.fit_loop.{name} ({GUIDE})"
        )


class _Strategy:
    """Single-process subset of ``self.trainer.strategy``, without collectives."""

    def __init__(self, trainer: WorkerTrainer):
        self._trainer = trainer

    @property
    def _lightning_optimizers(self) -> list:
        return self._trainer.optimizers

    @property
    def root_device(self) -> torch.device:
        return next((p.device for p in self._trainer.model.parameters()), torch.device("cpu"))

    def barrier(self, *_: object, **__: object) -> None:
        """Do nothing, since every step synchronizes the workers."""

    def all_gather(self, tensor: T, *_: object, **__: object) -> T:
        return self._single_process("all_gather", tensor)

    def reduce(self, tensor: T, *_: object, **__: object) -> T:
        return self._single_process("reduce", tensor)

    def broadcast(self, value: T, *_: object, **__: object) -> T:
        return self._single_process("broadcast", value)

    def _single_process(self, name: str, value: T) -> T:
        if self._trainer.world_size > 1:
            raise UsageError(
                f"{name} is a Lightning collective, which Orca's workers cannot run in module "
                "hooks "
                "because a worker may have fewer batches than others; log values with self.log, "
                "whose reduce_fx covers all workers, or use a torchmetrics object",
                code="unsupported",
                method=name,
            )
        return value


class WorkerTrainer:
    """Replacement for Lightning's Trainer as ``self.trainer`` in an Orca worker.

    Parameters
    ----------
    rank, world_size : int
    """

    accumulate_grad_batches = 1
    check_val_every_n_epoch, val_check_interval, limit_train_batches = 1, 1.0, 1.0
    datamodule = checkpoint_callback = progress_bar_callback = early_stopping_callback = None
    early_stopping_callbacks: Sequence = ()
    fast_dev_run = sanity_checking = testing = predicting = interrupted = False
    gradient_clip_algorithm: str | None = None
    gradient_clip_val: float | None = None
    log_every_n_steps, num_sanity_val_steps, min_epochs, min_steps = 1, 0, None, None
    log_dir = ckpt_path = profiler = None
    num_nodes, local_rank, node_rank = 1, 0, 0
    precision = "32-true"

    def __init__(self, rank: int = 0, world_size: int = 1):
        self.global_rank, self.world_size = rank, world_size
        self.num_devices = world_size
        self.is_global_zero = rank == 0
        self.model: Any = None
        self.training = self.validating = False
        self.should_stop = False
        self.callbacks: list = []
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.lr_scheduler_configs: list = []
        self.optimizers: list = []
        self.strategy, self.fit_loop = _Strategy(self), _FitLoop(self)
        self.train_dataloader, self.val_dataloaders = _Loader(self), None
        self.warn: Callable[[str], None] = lambda text: print(text, flush=True)
        self.logger = _NoLogger(lambda text: self.warn(text))
        self._stop_at = StoppingCriterion()
        self._loop: Any = SimpleNamespace(position=Position(), train_loader=None)
        self._steps: int | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        known = sorted(n for n in {*vars(self), *dir(type(self))} if not n.startswith("_"))
        raise _UnsupportedAttribute(
            f"Orca's workers have no Lightning Trainer, and self.trainer.{name} is not supported; "
            f"supported attributes: {', '.join(known)} ({GUIDE})"
        )

    def attach(self, model: Any) -> None:  # model: a LightningModule
        """Set this object as the trainer of a module."""
        self.model = self.lightning_module = model
        model.trainer = self

    def begin_fit(self, runner: EpochRunner, context: FitContext, steps: int) -> None:
        """Set the attributes that depend on the settings and the rows of a fit.

        Parameters
        ----------
        runner : TorchRunner
        context : FitContext
        steps : int
            Number of batches per epoch.
        """
        settings = context.settings
        self._loop, self._steps, self.warn = runner, steps, context.warn
        self._stop_at = settings.stop_at
        self.accumulate_grad_batches = settings.accumulate
        clipping = settings.clipping
        if clipping.norm is not None:
            self.gradient_clip_val, self.gradient_clip_algorithm = clipping.norm, "norm"
        elif clipping.maximum is not None:
            self.gradient_clip_val, self.gradient_clip_algorithm = clipping.maximum, "value"

    def set_optimizer(self, built: BuiltParts) -> None:
        """Set the optimizer and scheduler of a fit."""
        self.optimizers = [built.optimizer]
        if built.scheduler is not None:
            config = SimpleNamespace(
                scheduler=built.scheduler,
                name=None,
                interval=built.interval,
                frequency=built.frequency,
                monitor=built.monitor,
                strict=True,
                reduce_on_plateau=hasattr(built.scheduler, "best"),
            )
            self.lr_scheduler_configs = [config]

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics of all workers to ``callback_metrics``."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.callback_metrics[name] = torch.tensor(float(value))

    @property
    def loggers(self) -> list:
        return []

    @property
    def evaluating(self) -> bool:
        return self.validating

    @property
    def logged_metrics(self) -> dict:
        return self.callback_metrics

    @property
    def progress_bar_metrics(self) -> dict:
        return {name: float(value) for name, value in self.callback_metrics.items()}

    @property
    def current_epoch(self) -> int:
        return self._loop.position.epoch

    @property
    def global_step(self) -> int:
        return self._loop.position.global_step

    @property
    def max_epochs(self) -> int | None:
        return self._stop_at.epochs

    @property
    def max_steps(self) -> int:
        return -1 if self._stop_at.steps is None else self._stop_at.steps

    @property
    def num_training_batches(self) -> int:
        if self._steps is None:
            raise UsageError(
                "The number of batches, and thus self.trainer.estimated_stepping_batches, "
                "num_training_batches and len(train_dataloader), is unknown here; it is known in "
                "a fit of any backend but 'bigdl'",
                code="unsupported",
            )
        return self._steps

    @property
    def estimated_stepping_batches(self) -> int:
        """Number of optimizer steps from the start of the run to the end of this fit."""
        steps_per_epoch = -(-self.num_training_batches // self.accumulate_grad_batches)
        if self._stop_at.steps is not None:
            return self._stop_at.steps
        return steps_per_epoch * max(self._stop_at.epochs or 1, 1)


# Logged values ------------------------------------------------------------------------------------


class LoggedValues:
    """Values that a module logged on one worker in a training or validation epoch.

    Attributes
    ----------
    values : dict of str to dict
        JSON-serializable. Per name: the reduction, whether it is logged on steps and on epochs, the
        value of the epoch with its weight, and the value of the last step.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict] = {}

    def add(
        self, name: str, value: float, weight: float, step: int, how: str, on: tuple[bool, bool]
    ) -> None:
        """Add a logged value.

        Parameters
        ----------
        name : str
        value : float
        weight : float
            Weight of the value in a mean, such as the number of rows in the batch.
        step : int
            Index of the batch.
        how : {"mean", "sum", "min", "max"}
            Reduction.
        on : tuple of bool
            ``on_step`` and ``on_epoch``.
        """
        kept = self.values.get(name)
        if kept is None or kept["how"] != how:
            kept = self.values[name] = {"how": how, "parts": []}
        kept["on"], kept["last"] = list(on), [step, value, weight]
        kept["parts"] = [_reduce([*kept["parts"], [value, weight]], how)]


def _reduce(parts: Sequence, how: str) -> list[float]:
    """Reduce pairs of value and weight by `how`, e.g. ``"mean"``; return the result and weight."""
    values = [value for value, _ in parts]
    weight = math.fsum(weight for _, weight in parts)
    if how == "sum":
        return [math.fsum(values), weight]
    if how != "mean":
        return [min(values) if how == "min" else max(values), weight]
    if weight <= 0:
        return [math.fsum(values) / len(values), 0.0]
    # ignore values of workers without rows, which may be nan
    return [math.fsum(value * w for value, w in parts if w) / weight, weight]


def merged_values(logs: Sequence[Mapping[str, dict]]) -> dict[str, float]:
    """Merge the values that several workers logged, under the names that Lightning uses."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for log in logs for name in log):
        kept = [log[name] for log in logs if name in log]
        how, (on_step, on_epoch) = kept[0]["how"], kept[0]["on"]
        # ignore workers without rows
        counted = [each for each in kept if each["parts"][0][1] > 0] or kept
        whole = _reduce([part for each in counted for part in each["parts"]], how)[0]
        newest = max(each["last"][0] for each in counted)
        last = [each["last"][1:] for each in counted if each["last"][0] == newest]
        step_value = _reduce(last, how)[0]
        merged[name] = whole if on_epoch else step_value
        if on_step and on_epoch:
            merged |= {f"{name}_step": step_value, f"{name}_epoch": whole}
    return merged


# torchmetrics objects -----------------------------------------------------------------------------


class ModuleMetrics:
    """The torchmetrics objects of a module, which can be merged over the workers.

    Parameters
    ----------
    model : torch.nn.Module
    """

    def __init__(self, model: torch.nn.Module):
        self._metrics, self._collections = {}, []
        with contextlib.suppress(ImportError):
            import torchmetrics

            for path, module in model.named_modules():
                if isinstance(module, torchmetrics.Metric):
                    self._metrics[path] = module
                    # compute() must not start a collective, which other ranks may not join
                    module.sync_on_compute = module._to_sync = module.dist_sync_on_step = False
                elif isinstance(module, torchmetrics.MetricCollection):
                    self._collections.append(module)

    def __contains__(self, metric: object) -> bool:
        return any(each is metric for each in self._metrics.values())

    def states(self) -> dict[str, list]:
        """Return the update count and state of each updated metric, by the metric's module path."""
        for collection in self._collections:
            list(collection.items(copy_state=False))  # metrics of a compute group share one state
        return {
            path: [metric._update_count, {n: getattr(metric, n) for n in metric._defaults}]
            for path, metric in self._metrics.items()
            if metric._update_count
        }

    def put(self, states: Mapping[str, list]) -> None:
        """Set the update counts and states of the metrics from the result of :meth:`states`."""
        for path, (count, state) in states.items():
            metric = self._metrics[path]
            for name, value in state.items():
                setattr(metric, name, _to_device(value, metric.device))
            metric._update_count, metric._computed = count, None

    @contextlib.contextmanager
    def merged(self, sync: GradientSync) -> Iterator[None]:
        """Temporarily set the metrics to states merged over all workers; a collective call.

        A metric that is reset inside the context stays reset.
        """
        if sync.world_size == 1 or not self._metrics:
            for metric in self._metrics.values():
                metric._computed = None
            yield
            return
        local = self.states()
        gathered = sync.gather(dumps(local))
        merged = None if gathered is None else dumps(self._merge([loads(g) for g in gathered]))
        everything = loads(cast("bytes", sync.broadcast(merged)))
        self.put(everything)
        yield
        for path in everything:
            metric = self._metrics[path]
            if not metric._update_count:
                continue
            if path in local:
                self.put({path: local[path]})
            else:
                metric.reset()

    def _merge(self, everyone: Sequence[Mapping[str, list]]) -> dict[str, list]:
        merged = {}
        for path in dict.fromkeys(path for states in everyone for path in states):
            parts = [states[path] for states in everyone if path in states]
            reductions = reductions_of(self._metrics[path])
            state = {
                name: merge_tensors(name, [_as_list(s[name], how) for _, s in parts], how)
                for name, how in reductions.items()
            }
            merged[path] = [sum(count for count, _ in parts), state]
        return merged


def _as_list(value, how):
    return [value] if how == "cat" and not isinstance(value, list) else value


def _to_device(value, device):
    if isinstance(value, list):
        return [each.to(device) for each in value]
    return value.to(device)


# The forward pass ---------------------------------------------------------------------------------


class LightningForward(ForwardPass):
    """Forward pass that calls the steps and hooks of a LightningModule.

    Steps get the batch as a tuple of the feature columns and the target, or as the dict.
    ``training_step`` must return the mean over its batch, as Lightning expects.
    """

    def __init__(
        self,
        model: Any,  # a LightningModule
        columns: BatchColumns | None = None,
        loss_weights: LossWeights | None = None,
    ):
        if not getattr(model, "automatic_optimization", True):
            raise UsageError(
                "A LightningModule with automatic_optimization=False is not supported; return the "
                "loss from training_step, or train it with the Trainer of bigdl.nano.pytorch",
                code="unsupported",
            )
        super().__init__(model, columns, loss_weights)
        self.module = self
        self.rows = 0  # this worker's rows in the batch
        self.trainer = getattr(model, "_trainer", None) or WorkerTrainer()
        self._metrics = ModuleMetrics(model)
        self._training, self._validation = LoggedValues(), LoggedValues()
        self._rows = {True: 0.0, False: 0.0}  # rows of the training and validation epoch
        self._logged_metrics: dict[bool, list] = {True: [], False: []}
        self._fx, self._index = "", 0
        self._outputs: Any = None  # outputs of a step
        self._loss: Any = None  # loss of the latest training step
        self._weight = 0.0  # weight of a value logged at the end of an epoch
        model.log, model.log_dict = self._log, self._log_dict
        model.clip_gradients = self._clip_gradients
        self._clip: Callable[..., None] | None = None

    # -- hooks -----------------------------------------------------------------------------------

    def call_hook(self, hook: str, *arguments: object) -> object:
        """Call a hook of the module if the module overrides it."""
        if not overrides(self.model, hook):
            return None
        before, self._fx = self._fx, hook
        try:
            return getattr(self.model, hook)(*arguments)
        finally:
            self._fx = before

    def begin_training(self) -> None:
        """Switch the trainer to training mode before the batches of an epoch."""
        self.trainer.training, self.trainer.validating = True, False

    def begin_batch(self, batch: Tensors, index: int, rows: int) -> Tensors:
        """Run the hooks before a batch and return the transferred batch."""
        self.rows, self._index, self._outputs = rows, index, None
        self._rows[self.trainer.training] += rows
        if not rows:
            return batch
        batch = self._transfer(batch)
        if self.trainer.training:
            if self.call_hook("on_train_batch_start", _as_lightning_batch(batch), index) == -1:
                raise UsageError(
                    "on_train_batch_start of the LightningModule returned -1, which skips the rest "
                    "of the epoch in Lightning; Orca's workers must run equal numbers of steps, so "
                    "set self.trainer.should_stop = True, or train on fewer rows",
                    code="unsupported",
                )
        else:
            self.call_hook("on_validation_batch_start", _as_lightning_batch(batch), index)
        return batch

    def end_batch(self, batch: Tensors) -> None:
        """Run the hooks after a batch and its optimizer step."""
        if self.rows:
            stage = "train" if self.trainer.training else "validation"
            self.call_hook(
                f"on_{stage}_batch_end", self._outputs, _as_lightning_batch(batch), self._index
            )

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Reset the gradients through the module's hooks."""
        self.call_hook("on_before_zero_grad", optimizer)
        if overrides(self.model, "optimizer_zero_grad"):
            self.call_hook(
                "optimizer_zero_grad", self.trainer.current_epoch, self._index, optimizer
            )
        else:
            optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients through the module's hooks."""
        self.call_hook("on_before_backward", loss)
        if overrides(self.model, "backward"):
            self.call_hook("backward", loss)
        else:
            loss.backward()

    def step(self, optimizer: Optimizer, clip: Callable[..., None]) -> None:
        """Clip the all-reduced gradients and update the weights through the module's hooks.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
        clip : callable
            Clips gradients with the limits of ``fit``, or with its arguments for Clipping.
        """
        self.call_hook("on_after_backward")
        self.call_hook("on_before_optimizer_step", optimizer)
        if overrides(self.model, "configure_gradient_clipping"):
            trainer, self._clip = self.trainer, clip
            values = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            self.call_hook("configure_gradient_clipping", optimizer, *values)
            self._clip = None
        else:
            clip()
        if overrides(self.model, "optimizer_step"):
            loss = self._loss

            def closure():
                return loss  # gradients are already computed and all-reduced

            self.call_hook(
                "optimizer_step", self.trainer.current_epoch, self._index, optimizer, closure
            )
        else:
            optimizer.step()

    def _clip_gradients(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self._clip is None:
            raise UsageError(
                "Call clip_gradients in configure_gradient_clipping",
                code="state",
                method="clip_gradients",
            )
        value = gradient_clip_val
        if value is None:
            value = self.trainer.gradient_clip_val
        algorithm = gradient_clip_algorithm or self.trainer.gradient_clip_algorithm or "norm"
        if value is None:
            return
        if algorithm == "norm":
            self._clip(norm=float(value))
        elif algorithm == "value":
            self._clip(minimum=-float(value), maximum=float(value))
        else:
            raise UsageError(
                f"gradient_clip_algorithm must be 'norm' or 'value', got {algorithm!r}",
                code="argument-value",
                argument="gradient_clip_algorithm",
                allowed=["norm", "value"],
            )

    # -- steps -----------------------------------------------------------------------------------

    def forward(self, batch: Tensors, index: int) -> tuple[Any, Any, torch.Tensor]:
        """Return the output (None), target and loss of a training batch."""
        result = self._call("training_step", batch, index)
        loss = _loss_of(result)
        if loss is None:
            raise UsageError(
                "training_step returned no loss; return a tensor or a dict with the key 'loss'",
                code="model-output",
            )
        others = result if isinstance(result, dict) else {}
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._outputs = {**others, "loss": self._loss}
        return None, self._target(batch), loss

    def evaluate(self, batch: Tensors, index: int, *, need_output: bool) -> tuple[Any, Any, Any]:
        """Return the output (if needed), target and loss (None without ``validation_step``)."""
        loss = None
        if overrides(self.model, "validation_step"):
            self._outputs = self._call("validation_step", batch, index)
            loss = _loss_of(self._outputs)
        if not (need_output and overrides(self.model, "forward")):
            return None, self._target(batch), loss
        inputs, named, target = self.columns.split(batch)
        return self.model(*inputs, **named), target, loss

    def _call(self, step: str, batch: Tensors, index: int) -> object:
        parameters = inspect.signature(getattr(self.model, step)).parameters
        if "dataloader_iter" in parameters:
            raise UsageError(
                f"{step} of the LightningModule takes dataloader_iter, which Orca does not "
                "support; "
                "take (batch, batch_idx)",
                code="unsupported",
                method=step,
            )
        takes_index = "batch_idx" in parameters or len(parameters) > 1
        return self.call_hook(step, _as_lightning_batch(batch), *([index] if takes_index else []))

    def prepare_batch(self, batch: Tensors, rows: int) -> Tensors:
        """Switch the trainer to training and return the transferred batch, skipping batch hooks."""
        self.begin_training()
        self.rows = rows
        return self._transfer(batch)

    def _transfer(self, batch: Tensors) -> Tensors:
        """Apply the module's batch transfer hooks to a batch."""
        for hook in ("on_before_batch_transfer", "transfer_batch_to_device"):
            if overrides(self.model, hook):
                device = [self.trainer.strategy.root_device] if hook.startswith("tr") else []
                batch = self.call_hook(hook, _as_lightning_batch(batch), *device, 0)
        if overrides(self.model, "on_after_batch_transfer"):
            batch = self.call_hook("on_after_batch_transfer", _as_lightning_batch(batch), 0)
        return batch

    def _target(self, batch):
        """Return a batch's target, or None for a dict batch without ``label_cols``."""
        if isinstance(batch, Mapping) and not self.columns.labels:
            return None
        if not isinstance(batch, Mapping | list | tuple):
            return None
        return self.columns.split(batch)[-1]

    # -- epoch ends --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        trainer, training = self.trainer, self.model.training
        was_training, trainer.training, trainer.validating = trainer.training, False, True
        self._validation, self._rows[False] = LoggedValues(), 0.0
        rows = self.rows
        if overrides(self.model, "on_validation_model_eval"):
            self.call_hook("on_validation_model_eval")
        else:
            self.model.eval()
        self.call_hook("on_validation_start")
        self.call_hook("on_validation_epoch_start")
        try:
            yield
        finally:
            if training and overrides(self.model, "on_validation_model_train"):
                self.call_hook("on_validation_model_train")
            else:
                self.model.train(training)
            trainer.training, trainer.validating, self.rows = was_training, False, rows

    def end_validation(self, sync: GradientSync) -> dict:
        """Return the values logged in an evaluation on this worker; may be a collective call."""
        log = self._end(sync, is_training=False)
        self.call_hook("on_validation_end")
        return log

    def end_epoch(self, sync: GradientSync, entry: dict) -> tuple[dict, bool]:
        """Return the values logged in a training epoch; a collective call.

        Parameters
        ----------
        sync : GradientSync
        entry : dict
            Other metrics of the epoch.

        Returns
        -------
        metrics : dict
        stop : bool
            Whether the module ends the training here.
        """
        self.trainer.add_metrics(entry)
        log = self._end(sync, is_training=True)
        everyone = all_gather_json(sync, {"log": log, "stop": bool(self.trainer.should_stop)})
        logged = merged_values([each["log"] for each in everyone])
        self.trainer.add_metrics(logged)
        out = {name: value for name, value in logged.items() if name not in entry}
        for name in logged.keys() & entry.keys():
            metric = entry[name]
            is_same = isinstance(metric, int | float) and math.isclose(
                metric, logged[name], rel_tol=1e-3, abs_tol=1e-6
            )
            if not is_same and log.get(name, {}).get("on", [False, True])[1]:
                self.trainer.warn(
                    f"The LightningModule logs {name!r} in training, but fit has a metric of that "
                    f"name: {metric} (fit) is kept and {logged[name]} (logged) is dropped; log it "
                    "under another name"
                )
        return out, any(each["stop"] for each in everyone)

    def _end(self, sync: GradientSync, *, is_training: bool) -> dict:
        """Run the epoch-end hook with merged metrics and return the logged values."""
        log = self._training if is_training else self._validation
        hook = "on_train_epoch_end" if is_training else "on_validation_epoch_end"
        logged = self._logged_metrics[is_training]
        self._weight = self._rows[is_training]
        with self._metrics.merged(sync):
            self._add_metrics(log, logged)
            if overrides(self.model, hook):
                gathered = all_gather_json(sync, log.values)
                self.trainer.add_metrics(merged_values(gathered))
                # without rows, the hook may fail to compute a mean
                errors = (RuntimeError, ValueError, IndexError, ZeroDivisionError)
                with contextlib.suppress(*() if self._weight else errors):
                    self.call_hook(hook)
                self._add_metrics(log, logged)
            if not is_training:
                self._reset_metrics(logged)
        return log.values

    def _add_metrics(self, log: LoggedValues, logged: list) -> None:
        """Add the epoch values of the logged torchmetrics objects to `log`."""
        for name, metric, on in logged:
            if metric._update_count:
                with torch.no_grad():
                    value = _number(name, metric.compute())
                last = log.values.get(name, {}).get("last")
                log.values[name] = {
                    "how": "mean",
                    "on": list(on),
                    "parts": [[value, 1.0]],
                    "last": last or [-1, value, 1.0],
                }

    @staticmethod
    def _reset_metrics(logged: list) -> None:
        for _, metric, _ in logged:
            metric.reset()
        logged.clear()

    def close_epoch(self) -> None:
        """Reset the logged values of a finished epoch."""
        self._reset_metrics(self._logged_metrics[True])
        self._training, self._rows[True] = LoggedValues(), 0.0

    def log_state(self) -> dict:
        """Return the values logged so far in the epoch, for a checkpoint."""
        return {
            "values": self._training.values,
            "rows": self._rows[True],
            "metrics": self._metrics.states(),
        }

    def load_log(self, states: Sequence[dict]) -> None:
        """Restore logged values from :meth:`log_state` of one or several workers."""
        if len(states) == 1:
            self._training.values = states[0]["values"]
            self._metrics.put(states[0]["metrics"])
        else:
            self._training.values = _merge_logs([state["values"] for state in states])
            self._metrics.put(self._metrics._merge([state["metrics"] for state in states]))
        self._rows[True] = sum(state["rows"] for state in states)

    # -- logged values -----------------------------------------------------------------------------

    def _log(
        self,
        name,
        value,
        prog_bar=False,
        logger=None,
        on_step=None,
        on_epoch=None,
        reduce_fx="mean",
        enable_graph=False,
        sync_dist=False,
        sync_dist_group=None,
        add_dataloader_idx=True,
        batch_size=None,
        metric_attribute=None,
        rank_zero_only=False,
    ):
        """Record a call of the module's ``self.log``."""
        if rank_zero_only and not self.trainer.is_global_zero:
            return
        on = self._on(name, on_step, on_epoch)
        how = _REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
        if how is None:
            raise UsageError(
                f"self.log({name!r}) takes reduce_fx 'mean', 'sum', 'min' or 'max', got "
                f"{reduce_fx!r}; for another reduction log a torchmetrics object",
                code="argument-value",
                argument="reduce_fx",
                allowed=["mean", "sum", "min", "max"],
            )
        is_training = self.trainer.training
        if hasattr(value, "compute") and hasattr(value, "update"):
            value = self._log_metric(name, value, on, is_training)
            if value is None:
                return
        log = self._training if is_training else self._validation
        weight = float(batch_size or self.rows)
        if "epoch" in self._fx or self._fx in ("on_train_start", "on_validation_start"):
            weight = self._weight if self._fx.endswith("end") else 0.0
        log.add(name, _number(name, value), weight, self._index, how, on)

    def _on(self, name, on_step, on_epoch):
        """Return whether a value is logged per step and per epoch, with Lightning's defaults."""
        if not self._fx:
            raise UsageError(
                f"self.log({name!r}) was called outside of training and validation hooks",
                code="state",
                metric=name,
            )
        if self._fx in _NO_LOG:
            raise UsageError(
                f"You can't self.log({name!r}) in {self._fx}", code="state", metric=name
            )
        is_step = "validation" not in self._fx and "epoch" not in self._fx
        is_step = is_step and self._fx != "on_train_start"
        on = is_step if on_step is None else on_step, not is_step if on_epoch is None else on_epoch
        if not any(on):
            raise UsageError(
                f"self.log({name!r}, on_step=False, on_epoch=False) has no effect",
                code="argument-conflict",
                metric=name,
            )
        return bool(on[0]), bool(on[1])

    def _log_metric(self, name, metric, on, is_training):
        """Record a logged torchmetrics object; return its batch value if it is logged per step."""
        if isinstance(metric, Mapping) or hasattr(metric, "keys"):
            raise UsageError(
                f"self.log({name!r}) got a {type(metric).__name__}; use self.log_dict",
                code="argument-type",
                metric=name,
            )
        if metric not in self._metrics:
            raise UsageError(
                f"self.log({name!r}) got a {type(metric).__name__} that is not an attribute of the "
                f"LightningModule, so the workers cannot merge it; set self.{name} = ... in "
                "__init__",
                code="metric-unsupported",
                metric=name,
            )
        logged = self._logged_metrics[is_training]
        if on[1] and all(each is not metric or known != name for known, each, _ in logged):
            logged.append((name, metric, on))
        return getattr(metric, "_forward_cache", None) if on[0] else None

    def _log_dict(self, dictionary, *arguments, **options):
        """Record a call of the module's ``self.log_dict``."""
        named = {}
        if hasattr(dictionary, "_enable_compute_groups"):  # a MetricCollection
            named = {"keep_base": False, "copy_state": False}
        for name, value in dictionary.items(**named):
            self._log(name, value, *arguments, **options)


_NO_LOG = (
    *("on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "lr_scheduler_step"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("setup", "teardown", "configure_model", "on_save_checkpoint", "on_load_checkpoint"),
)


def _merge_logs(logs: Sequence[Mapping[str, dict]]) -> dict[str, dict]:
    """Merge the logged values of several workers, as if one worker had logged all of them."""
    out: dict[str, dict] = {}
    for log in logs:
        for name, kept in log.items():
            before = out.get(name)
            if before is None:
                out[name] = kept
                continue
            parts = [_reduce([*before["parts"], *kept["parts"]], kept["how"])]
            last = max(before["last"], kept["last"])
            out[name] = {**kept, "parts": parts, "last": last}
    return out


def _number(name: str, value: Any) -> float:
    """Convert a logged value to a float."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
    if not isinstance(value, str | bytes | None):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return float(value)
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise UsageError(
        f"self.log({name!r}) takes one number or a torchmetrics object of one number, got "
        f"{type(value).__name__}{shape}",
        code="argument-type",
        metric=name,
    )


def _as_lightning_batch(batch):
    return tuple(batch) if isinstance(batch, list) else batch


def _loss_of(result):
    return result.get("loss") if isinstance(result, Mapping) else result


# Setup and checkpoint hooks -----------------------------------------------------------------------


def set_up(model: Any, stage: str, trainer: WorkerTrainer | None = None) -> None:
    """Call ``setup`` and ``configure_model`` of a LightningModule.

    Parameters
    ----------
    model : torch.nn.Module
    stage : {"fit", "validate", "predict"}
    trainer : WorkerTrainer, optional
        Trainer to attach to the module; by default a temporary one, which is removed afterwards.
    """
    if not is_lightning(model):
        return
    (trainer or WorkerTrainer()).attach(model)
    if overrides(model, "setup"):
        model.setup(stage)
    if overrides(model, "configure_model"):
        model.configure_model()
    if trainer is None:
        model.trainer = None


_CHECKPOINT_KEYS = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")


def extras_of(
    model: Any, optimizer: Optimizer | None = None, scheduler: LRScheduler | None = None
) -> dict:  # model: a LightningModule
    """Return the entries that a LightningModule's ``on_save_checkpoint`` adds to a checkpoint."""
    if not (is_lightning(model) and overrides(model, "on_save_checkpoint")):
        return {}
    trainer = getattr(model, "_trainer", None) or WorkerTrainer()
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": model.state_dict(),
        "optimizer_states": [] if optimizer is None else [optimizer.state_dict()],
        "lr_schedulers": [] if scheduler is None else [scheduler.state_dict()],
        "hyper_parameters": dict(model.hparams),
    }
    known = set(checkpoint)
    model.on_save_checkpoint(checkpoint)
    return {key: value for key, value in checkpoint.items() if key not in known}


def load_extras(model: Any, extras: bytes | None) -> None:  # model: a LightningModule
    """Pass saved entries to a LightningModule's ``on_load_checkpoint``."""
    if extras is not None and is_lightning(model) and overrides(model, "on_load_checkpoint"):
        model.on_load_checkpoint({"state_dict": model.state_dict(), **loads(extras)})
