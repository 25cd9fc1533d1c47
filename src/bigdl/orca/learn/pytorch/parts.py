"""Creation, saving and loading of a PyTorch fit's model, optimizer, loss and scheduler.

A file holds a state dict, a pickled module or the full state of BigDL 2.x: epoch, models,
optimizers and schedulers. Checkpoint folders (:mod:`bigdl.training.checkpoint`) can be read, too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
import torch
from torch.utils._pytree import tree_leaves

from bigdl.common.errors import UsageError, one_line
from bigdl.common.storage import read_bytes
from bigdl.orca.learn.arguments import check_creator, check_loss_weight
from bigdl.orca.learn.pytorch.forward import has_builtin_loss, is_lightning
from bigdl.orca.learn.pytorch.lightning import (
    WorkerTrainer,
    configure_optimizer,
    extras_of,
    load_extras,
    overrides,
    set_up,
)
from bigdl.training.checkpoint import Checkpoint, read_checkpoint
from bigdl.training.embedding_tables.placement import TablePlacement, table_placement
from bigdl.training.embedding_tables.torch_model import ShardedTables, cut_tables, has_tables
from bigdl.training.metrics import monitored_metric
from bigdl.training.position import Position
from bigdl.training.sharded_model import FACTS, ShardedModel, has_sliced_weights
from bigdl.training.slices import SavedSlices
from bigdl.training.state import capture_rng, dumps, loads, restore_rng

if TYPE_CHECKING:
    import numpy as np

    from bigdl.orca.learn.types import Loadable, ScheduleRunner


def load_into(part: Loadable, data: bytes, what: str = "weights", whose: str = "model") -> None:
    """Load the bytes of a state dict into a model, optimizer or scheduler.

    Raises
    ------
    UsageError
        If the state belongs to another object.
    """
    with _fitting(what, whose):
        part.load_state_dict(loads(data))


@contextlib.contextmanager
def _fitting(what: str, whose: str) -> Iterator[None]:
    """Context manager that raises a UsageError if a state cannot be loaded into an object."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = " ".join(str(error).split())
        text = text if len(text) < 500 else f"{text[:500]}..."
        raise UsageError(
            f"The {what} do not fit the {whose}: {text}", code="model-mismatch"
        ) from error


def is_lazy(model: torch.nn.Module) -> bool:
    """Return True if the model has parameters whose size its first forward pass determines."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return any(torch.nn.parameter.is_lazy(each) for each in tensors)


def check_sizes(model: torch.nn.Module) -> None:
    """Raise an error if the model has uninitialized lazy layers."""
    if is_lazy(model):
        raise UsageError(
            "The model has lazy layers, such as nn.LazyLinear, whose sizes are unknown: fit infers "
            "them from a row (with any backend but 'bigdl'); before that, pass the sizes, or call "
            "the model on a row in the model creator",
            code="model-unbuilt",
        )


def sparse_parameters(model: torch.nn.Module) -> list:
    """Return the parameters that may get sparse gradients.

    They follow from the modules: a rank without rows has no gradients to look at.
    """
    return [
        module.weight
        for module in model.modules()
        if getattr(module, "sparse", False) is True and hasattr(module, "weight")
    ]


CLASSES = "classes.json"
"""Checkpoint file with the class names of the optimizer and scheduler."""
# Group entries of torch optimizers that only select an implementation; a state may lack them.
_OF_EVERY_OPTIMIZER = {"capturable", "differentiable", "foreach", "fused"}


@dataclass
class BuiltParts:
    """Model, optimizer, loss and scheduler as built in one process.

    Attributes
    ----------
    monitor : str, optional
        Epoch metric for a ``ReduceLROnPlateau``; default the validation loss, or the training loss
        without validation.
    interval : str
        When the scheduler is stepped: ``"epoch"`` (at its end), ``"step"`` (after an update) or
        ``"manual"`` (by user code only).
    frequency : int
        Number of epochs or updates between two scheduler steps.
    sharding : ShardedModel or None
        State of a model whose weights are divided among the workers.
    """

    model: Any
    optimizer: Any = None
    criterion: Any = None
    scheduler: Any = None
    monitor: str | None = None
    frequency: int = 1
    interval: str = "epoch"
    loss_weight: Any = None
    sharding: ShardedModel | None = None

    @functools.cached_property
    def tables(self) -> ShardedTables | None:
        """Sharded embedding tables of the model, or None."""
        return ShardedTables(self.model, self.optimizer) if has_tables(self.model) else None

    def files(self) -> dict[str, bytes]:
        """Return the states of model, optimizer and scheduler as checkpoint files."""
        sharding, tables = self.sharding, self.tables
        if sharding is not None:
            of_model = sharding.model_state()
            of_optimizer = sharding.optimizer_state(self.optimizer)
        else:
            of_model, of_optimizer = self.model.state_dict(), self.optimizer.state_dict()
            if tables is not None:
                of_optimizer = tables.optimizer_state()
        states = {"model.pt": dumps(of_model), "optimizer.pt": dumps(of_optimizer)}
        if self.scheduler is not None:
            states["scheduler.pt"] = dumps(self.scheduler.state_dict())
        if sharding is not None:
            states[FACTS] = sharding.facts(self.optimizer)
        states[CLASSES] = json.dumps(self._classes()).encode()
        if is_lightning(self.model):
            extras = extras_of(self.model, self.optimizer, self.scheduler)
            if extras:
                states[EXTRAS] = dumps(extras)
        return states

    def _classes(self) -> dict[str, str]:
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: type(part).__name__ for name, part in parts.items() if part is not None}

    def _check_classes(self, files: dict[str, bytes]) -> None:
        """Raise an error if the optimizer's or scheduler's class differs from the checkpoint's."""
        built, saved = self._classes(), json.loads(files.get(CLASSES, b"{}"))
        is_whole = "optimizer.pt" in files and "optimizer" in built and "optimizer" in saved
        if is_whole and ("scheduler" in built) != ("scheduler" in saved):
            name = built.get("scheduler") or saved["scheduler"]
            has, lacks = (
                ("program", "checkpoint") if "scheduler" in built else ("checkpoint", "program")
            )
            raise UsageError(
                f"The {has} has the scheduler {name}, but the {lacks} has none; use the "
                "checkpoint's scheduler, or load only the weights (save and load) and fit "
                "without resume",
                code="checkpoint-mismatch",
            )
        for name, saved_class in saved.items():
            if name in built and saved_class != built[name]:
                raise UsageError(
                    f"The checkpoint has the state of the {name} {saved_class}, but the program "
                    f"creates {built[name]}; use {saved_class}, or load only the weights (save "
                    "and load) and fit without resume",
                    code="checkpoint-mismatch",
                )

    def load(self, files: dict[str, bytes]) -> None:
        """Load the files that :meth:`files` returned; only the model's file is required.

        Raises
        ------
        UsageError
            If the state belongs to another object.
        """
        self._check_classes(files)
        if is_lightning(self.model):
            load_extras(self.model, files.get(EXTRAS))
        self.load_model(files["model.pt"], is_partial=FACTS in files)
        if "optimizer.pt" in files:
            keeping = contextlib.nullcontext() if self.tables is None else self.tables.loading()
            with keeping:
                self._load_optimizer(files["optimizer.pt"])
            missing = set(self.optimizer.defaults) - _OF_EVERY_OPTIMIZER
            missing -= set.intersection(*(set(group) for group in self.optimizer.param_groups))
            if missing:
                raise UsageError(
                    "The optimizer's state belongs to another class: it has no "
                    f"{', '.join(sorted(missing))}, which {type(self.optimizer).__name__} needs; "
                    "use the optimizer that wrote it, or load only the weights",
                    code="checkpoint-mismatch",
                )
        if "scheduler.pt" in files and self.scheduler is not None:
            load_into(self.scheduler, files["scheduler.pt"], "scheduler's state", "scheduler")

    def load_model(self, data: bytes, *, is_partial: bool) -> None:
        """Load the weights of the model, or only those that are not in slices of a checkpoint.

        Parameters
        ----------
        data : bytes
            State dict.
        is_partial : bool
            True if :meth:`load_slices` loads the other weights.
        """
        if self.sharding is None and not is_partial:
            load_into(self.model, data)
            return
        with _fitting("weights", "model"):
            self._sharded_model().load_model(loads(data), is_partial=is_partial)

    def _load_optimizer(self, data: bytes) -> None:
        what, whose = "optimizer's state", "optimizer"
        if self.sharding is None:
            load_into(self.optimizer, data, what, whose)
            return
        with _fitting(what, whose):
            self.sharding.load_optimizer(self.optimizer, loads(data))

    def _sharded_model(self) -> ShardedModel:
        """Return the state of the model as slices, also if the model is not divided."""
        return self.sharding or ShardedModel(self.model)

    def slices(self) -> dict[str, np.ndarray]:
        """Return this rank's rows of divided weights and tables, by the names of their slices."""
        if self.sharding is not None:
            return self.sharding.arrays(self.optimizer)
        return {} if self.tables is None else self.tables.arrays()

    def load_slices(self, slices: SavedSlices) -> None:
        """Load this rank's rows of divided weights and tables."""
        if has_sliced_weights(slices):
            self._sharded_model().load(slices, self.optimizer)
        elif self.tables is not None:
            self.tables.load(slices)

    def step_scheduler(self, runner: ScheduleRunner, metrics: dict | None = None) -> None:
        """Step the scheduler if it is due.

        Parameters
        ----------
        runner : TorchRunner
        metrics : dict, optional
            Metrics of the epoch that ended; None after an update.
        """
        main = runner.main if runner.main is not None and runner.main.owns_lr else None
        if main is None and (self.scheduler is None or self.interval == "manual"):
            return
        done = runner.global_step if metrics is None else runner.epochs
        if (self.interval == "step") != (metrics is None) or done % self.frequency:
            return
        if main is not None:
            main.on_lr_adjust(runner)
        elif metrics is not None and _is_plateau(self.scheduler):
            monitor = self.monitor or getattr(self.scheduler, "monitor", None)
            self._step_scheduler(monitored_metric(metrics, monitor, "scheduler"))
        else:
            self._step_scheduler()

    def _step_scheduler(self, *metric: float) -> None:
        if is_lightning(self.model) and overrides(self.model, "lr_scheduler_step"):
            self.model.lr_scheduler_step(self.scheduler, *(metric or [None]))
        else:
            self.scheduler.step(*metric)


@dataclass
class ModelParts:
    """Arguments of ``Estimator.from_torch`` that define a model and its training.

    Attributes
    ----------
    extras : bytes or None
        Entries that ``on_save_checkpoint`` of a LightningModule added to the latest checkpoint.
    shard : {"optimizer", "full", "auto"} or None
        How the state of the model is divided among the workers of a fit.
    """

    model: Any = None
    optimizer: Any = None
    loss: Any = None
    scheduler_creator: Callable | None = None
    config: dict = field(default_factory=dict)
    interval: str | None = None
    initialize: Callable | None = None
    extras: bytes | None = None
    loss_weight: Any = None
    shard: str | None = None

    def check(self) -> None:
        """Raise an error on the driver for arguments that would fail in a worker."""
        if "batch_size" in self.config:
            raise UsageError(
                "config must not contain batch_size; pass batch_size to fit, evaluate or predict",
                code="argument-conflict",
                argument="batch_size",
            )
        check_creator("model", self.model, ("config",), is_creator=not self.is_instance)
        is_creator = not isinstance(self.optimizer, torch.optim.Optimizer | type)
        is_bigdl = type(self.optimizer).__module__.startswith("bigdl.")
        check_creator(
            "optimizer", self.optimizer, ("model", "config"), is_creator=is_creator and not is_bigdl
        )
        if self.model is not None and not (self.is_instance or callable(self.model)):
            raise UsageError(
                "model must be an nn.Module or a function model(config) that returns one, got "
                f"{type(self.model).__name__}",
                code="model-type",
                argument="model",
            )
        if isinstance(self.loss, type):
            raise UsageError(
                f"loss must be an instance or a function, got the class {self.loss.__name__}; "
                f"write loss={self.loss.__name__}()",
                code="argument-type",
                argument="loss",
            )
        if self.loss is not None and not callable(self.loss):
            raise UsageError(
                "loss must be a torch.nn loss, a function loss(config) that returns one, or a "
                f"function of (output, target), got {type(self.loss).__name__}",
                code="argument-type",
                argument="loss",
            )
        check_loss_weight(self.loss_weight, "(output, target)", "a batch")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            self._check_optimizer_instance()
        elif isinstance(self.optimizer, type):
            raise UsageError(
                f"optimizer must be an instance or a function, got the class "
                f"{self.optimizer.__name__}; write optimizer=lambda model, config: "
                f"{self.optimizer.__name__}(model.parameters(), ...)",
                code="argument-type",
                argument="optimizer",
            )
        elif self.optimizer is not None and not callable(self.optimizer):
            raise UsageError(
                "optimizer must be a torch optimizer or a function optimizer(model, config) that "
                f"returns one, got {type(self.optimizer).__name__}",
                code="argument-type",
                argument="optimizer",
            )
        if self.scheduler_creator is not None and not callable(self.scheduler_creator):
            raise UsageError(
                "scheduler_creator must be a function of (optimizer, config)",
                code="argument-type",
                argument="scheduler_creator",
            )
        if self.optimizer is not None:  # it is None if the user only predicts
            self.check_training()

    def _check_optimizer_instance(self):
        if not self.is_instance:
            raise UsageError(
                "An optimizer instance needs a model instance; with a model creator pass a "
                "function "
                "optimizer(model, config)",
                code="argument-conflict",
                argument="optimizer",
            )
        model_parameters = {id(p) for p in self.model.parameters()}
        for group in self.optimizer.param_groups:
            if any(id(p) not in model_parameters for p in group["params"]):
                raise UsageError(
                    "The optimizer has parameters that are not the model's; create it with "
                    "model.parameters() of the same model",
                    code="argument-conflict",
                    argument="optimizer",
                )

    @property
    def is_instance(self) -> bool:
        """True if the model is a module rather than a creator."""
        return isinstance(self.model, torch.nn.Module)

    def build_model(self, placement: TablePlacement | None = None) -> torch.nn.Module:
        """Return a new model: a deep copy of an instance, or the result of the creator.

        Parameters
        ----------
        placement : TablePlacement, optional
            Placement of sharded embedding tables; None builds whole tables.
        """
        model = self._make_model(placement)
        if is_lightning(model):
            set_up(model, "predict")
            load_extras(model, self.extras)
        if placement is not None:
            cut_tables(model, None, placement)
        return model

    def _make_model(self, placement: TablePlacement | None) -> torch.nn.Module:
        if self.is_instance:
            if is_lazy(self.model):  # torch can pickle, but not copy, a buffer without a size
                return cloudpickle.loads(cloudpickle.dumps(self.model))
            return copy.deepcopy(self.model)
        with table_placement(placement):
            model = self.model(self.config)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"The model creator must return an nn.Module, got {type(model).__name__}",
                code="model-type",
                argument="model",
            )
        return model

    def outline(self) -> torch.nn.Module:
        """Return a model with the names and shapes of the weights, if possible without values.

        Do not change it: it may be the user's instance.
        """
        if self.is_instance and not is_lightning(self.model):
            return cast("torch.nn.Module", self.model)
        model = self._make_on_meta()
        return self.build_model() if model is None or is_lightning(model) else model

    def _make_on_meta(self) -> torch.nn.Module | None:
        """Return the model of the creator with weights on the meta device; None if that fails."""
        if self.is_instance:
            return None
        with contextlib.suppress(Exception), torch.device("meta"):
            return self._make_model(None)
        return None  # a creator may need values, such as those of a file

    def _make_for_division(self) -> torch.nn.Module:
        """Return a model that gets all parameters and buffers from another rank."""
        before = capture_rng()
        model = self._make_on_meta()
        if model is not None and not _has_other_meta_tensors(model):
            return model
        restore_rng(before)
        return self._make_model(None)

    def build(
        self,
        *,
        training: bool,
        placement: TablePlacement | None = None,
        is_early: bool = False,
        on_meta: bool = False,
    ) -> BuiltParts:
        """Build all components in a worker, using an unpickled model instance without copying it.

        Parameters
        ----------
        training : bool
            Whether to build the optimizer and scheduler.
        placement : TablePlacement, optional
            Placement of sharded embedding tables; None builds whole tables.
        is_early : bool
            True if the rows are unknown yet. A LightningModule may need them for its optimizer,
            which :meth:`configure` then creates later.
        on_meta : bool
            True if the weights of a creator's model may be on the meta device.
        """
        if self.initialize is not None:
            self.initialize()
        if self.is_instance:
            model = self.model
        else:
            model = self._make_for_division() if on_meta else self._make_model(placement)
        criterion = self.build_loss()
        if is_lightning(model):
            trainer = WorkerTrainer(*((placement.rank, placement.world_size) if placement else ()))
            set_up(model, "fit" if training else "validate", trainer)
            load_extras(model, self.extras)
        built = BuiltParts(model, criterion=criterion, loss_weight=self.loss_weight)
        if placement is not None:
            cut_tables(model, self.optimizer, placement)
        is_late = is_lazy(model) or (self.optimizer is None and is_lightning(model))
        if training and not (is_early and is_late):
            check_sizes(model)
            self.configure(built)
        return built

    def configure(self, built: BuiltParts) -> None:
        """Create the optimizer and scheduler."""
        if isinstance(self.optimizer, torch.optim.Optimizer):
            built.optimizer = self.optimizer
        elif self.optimizer is not None:
            built.optimizer = self.optimizer(built.model, self.config)
            if not isinstance(built.optimizer, torch.optim.Optimizer):
                raise UsageError(
                    "The optimizer creator must return a torch optimizer, got "
                    f"{type(built.optimizer).__name__}",
                    code="argument-type",
                    argument="optimizer",
                )
        elif is_lightning(built.model):
            configuration = configure_optimizer(built.model)
            built.optimizer, built.scheduler, built.monitor, built.frequency = configuration[:4]
            built.interval = configuration[4]
        if isinstance(built.optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS calls the model several times per step, which distributed training does not "
                "support; use another optimizer",
                code="optimizer-unsupported",
            )
        schedule = self.scheduler_creator or getattr(self.optimizer, "schedule", None)
        if schedule is not None:
            built.scheduler = schedule(built.optimizer, self.config)
            if not callable(getattr(built.scheduler, "step", None)):
                raise UsageError(
                    "The scheduler creator must return a torch scheduler, got "
                    f"{type(built.scheduler).__name__}",
                    code="argument-type",
                    argument="scheduler_creator",
                )
            built.monitor, built.frequency = None, 1
            built.interval = self.interval or str(getattr(built.scheduler, "interval", "epoch"))
        if built.interval == "step" and _is_plateau(built.scheduler):
            raise UsageError(
                "ReduceLROnPlateau needs the metrics of an epoch; use scheduler_step_freq='epoch'",
                code="argument-conflict",
                argument="scheduler_step_freq",
            )
        _check_trainable(built.model, built.optimizer, built.criterion)
        if built.tables is not None:
            built.tables.follow(built.optimizer)
        if is_lightning(built.model):
            built.model.trainer.set_optimizer(built)

    def check_training(self) -> None:
        """Raise an error on the driver if the model is known to be untrainable."""
        if isinstance(self.model, torch.nn.Module) and not is_lightning(self.model):
            _check_trainable(self.model, self.optimizer, self.loss)

    def build_loss(self) -> Callable | None:
        """Return the loss, calling its creator if necessary; None if the model computes it."""
        criterion = self.loss
        if criterion is None:
            return None
        if not isinstance(criterion, torch.nn.Module) and _takes_config(criterion):
            criterion = criterion(self.config)
            if not callable(criterion) or isinstance(criterion, type):
                raise UsageError(
                    "The loss creator must return a loss instance or a function of (output, "
                    f"target), got {criterion!r}",
                    code="function-result",
                    argument="loss",
                )
        if getattr(criterion, "reduction", None) == "none":
            raise UsageError(
                "The loss has reduction='none', but training needs one number; use 'mean' or 'sum'",
                code="loss-unsupported",
            )
        return criterion


def _has_other_meta_tensors(model: torch.nn.Module) -> bool:
    """Return True if modules have tensors without values besides parameters and buffers."""
    registered = {"_parameters", "_buffers", "_modules"}
    values = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in registered
    ]
    return any(isinstance(v, torch.Tensor) and v.is_meta for v in tree_leaves(values))


def _is_plateau(scheduler) -> bool:
    """Return True if the scheduler's ``step`` takes a metric."""
    is_known = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    return is_known or hasattr(scheduler, "monitor")


def _takes_config(function) -> bool:
    """Return True if a callable is ``loss(config)`` rather than ``loss(output, target)``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a C function
        return False
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    return len(required) == 1 or (len(positional) == 1 and not required)


EXTRAS = "module.pt"
"""Checkpoint file with the entries that a LightningModule's ``on_save_checkpoint`` added."""

_FULL = (("optimizers", "optimizer.pt"), ("schedulers", "scheduler.pt"))


def full_state(model: torch.nn.Module, snapshot: Checkpoint | None) -> dict[str, Any]:
    """Return a dict of the epoch and model, optimizer and scheduler states in BigDL 2.x format."""
    files = {} if snapshot is None else snapshot.files
    epoch = 0 if snapshot is None else snapshot.position.epochs_with_metrics
    state: dict[str, Any] = {"epoch": epoch, "models": [model.state_dict()]}
    for key, file in _FULL:
        if file in files:
            state[key] = [loads(files[file])]
    return state


def read_model(path: str, is_trusted: Callable[[bytes], bool]) -> tuple[Checkpoint, Any]:
    """Read a checkpoint folder, or a file with a state dict, full state or pickled module.

    Parameters
    ----------
    path : str
        A local path or fsspec URL.
    is_trusted : callable
        Returns True if a file with these bytes may run code, as pickled modules can.

    Returns
    -------
    snapshot : Checkpoint
    module : torch.nn.Module or None
        The module if the file holds an entire module.
    """
    snapshot = read_checkpoint(path)
    if snapshot is not None:
        return snapshot, None
    content, module = _unpickle(path, read_bytes(path), is_trusted), None
    if isinstance(content, torch.nn.Module):
        content, module = content.state_dict(), content
    if not isinstance(content, dict):
        raise UsageError(
            f"{path!r} holds a {type(content).__name__}; expected a state dict, a full state or an "
            "entire module",
            code="file-format",
            path=path,
        )
    return to_checkpoint(content), module


def to_checkpoint(state: dict) -> Checkpoint:
    """Convert a state dict or full state to a Checkpoint."""
    position, files = Position(), {}
    if isinstance(state.get("models"), list) and state["models"]:
        position.epoch = int(state.get("epoch", 0))
        for key, file in _FULL:
            if state.get(key):
                files[file] = dumps(state[key][0])
        state = state["models"][0]
    files["model.pt"] = dumps(state)
    return Checkpoint(position.to_json(), files)


def _unpickle(path, data, is_trusted):

    for weights_only in (True, False):
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except Exception as error:  # a damaged archive, or an error of the code in a pickle
            reason = one_line(error)
            if not data.startswith((b"PK", b"\x80")):  # neither torch's archive nor a pickle
                reason = "it is empty" if not data else "its content is something else"
            elif weights_only and isinstance(error, pickle.UnpicklingError):
                if is_trusted(data):
                    continue
                else:
                    raise UsageError(
                        f"{path!r} holds more than weights (perhaps an entire module); loading it "
                        "can "
                        "run arbitrary code, so pass trust=True only if you trust its source",
                        code="file-untrusted",
                        path=path,
                    ) from error
            raise UsageError(
                f"{path!r} is not a file that torch can load: {reason}",
                code="file-damaged",
                path=path,
            ) from error


def _check_trainable(model: torch.nn.Module, optimizer: object, loss: object) -> None:
    if optimizer is None:
        raise UsageError(
            "fit needs an optimizer; pass optimizer= to Estimator.from_torch",
            code="argument-missing",
            argument="optimizer",
        )
    if loss is None and not (is_lightning(model) or has_builtin_loss(model)):
        raise UsageError(
            "fit needs a loss; pass loss= to Estimator.from_torch, or omit the optimizer to only "
            "predict",
            code="argument-missing",
            argument="loss",
        )
