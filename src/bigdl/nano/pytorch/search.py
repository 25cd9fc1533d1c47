"""Hyper-parameter search of a Trainer: trials, metrics and latency of models."""

from __future__ import annotations

import copy
import logging
import math
import operator
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, Checkpoint
from pytorch_lightning.utilities.model_helpers import is_overridden

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError, as_usage_error, one_line
from bigdl.nano.acceleration.search.trial import Block, Candidate, block, time_against, time_alone
from bigdl.nano.pytorch.inference.optimizer import InferenceOptimizer
from bigdl.nano.pytorch.inference.source import ModelBatch, batches_of, evaluating, sample_arguments
from bigdl.nano.searchable import AutoObject, suggested, with_config
from bigdl.nano.searching import Searcher, directions_of, split_arguments
from bigdl.tuning.spaces import Lazy
from bigdl.tuning.study import optuna, raise_log_level

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial


__all__ = ["HPOSearcher", "lazily_compiled", "trial_arguments"]

_OF_FIT = ("train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path")
_LATENCY = "latency"  # measured, not logged: milliseconds of the trained model per batch
_ORIGINAL = "original"
# Methods of InferenceOptimizer to try; all compute in float32, so the accuracy does not change.
_RUNTIMES = ("openvino_fp32", "onnxruntime_fp32", "jit_fp32")
_LATENCY_CALLS = 20
_REPORTS = [f"{name}.utilities.rank_zero" for name in ("pytorch_lightning", "lightning_fabric")]
_log = logging.getLogger(__name__)


class HPOSearcher(Searcher):
    """Hyper-parameter search for models that a Trainer trains.

    Each trial trains a separate model with a separate trainer, which has the arguments of the
    Trainer and copies of its callbacks. Progress bars, summaries, Lightning's default logger and
    default checkpoints are disabled in trials unless the Trainer enables them explicitly.

    Parameters
    ----------
    trainer : Trainer
        Trainer of ``bigdl.nano.pytorch``; ``use_hpo=True`` is not needed.
    num_processes : int
        Number of training processes per trial; the Trainer's by default.

    Raises
    ------
    UsageError
        If `trainer` is not a Trainer of ``bigdl.nano.pytorch``, or its arguments cannot be copied.

    Examples
    --------
    >>> from bigdl.nano.automl.pytorch import HPOSearcher
    >>> from bigdl.nano.pytorch import Trainer
    >>> trainer = Trainer(use_hpo=True, max_epochs=3)
    >>> isinstance(trainer.hposearcher, HPOSearcher)  # what trainer.search uses
    True
    """

    def __init__(self, trainer: pl.Trainer, num_processes: int | None = None):
        if not (hasattr(trainer, "hpo_arguments") and hasattr(trainer, "trial_class")):
            raise UsageError(
                f"HPOSearcher needs a Trainer of bigdl.nano.pytorch, got {type(trainer).__name__} "
                f"of {type(trainer).__module__}",
                code="argument-type",
                argument="trainer",
            )
        self._arguments = trial_arguments(trainer.hpo_arguments)
        self._trainer_class = trainer.trial_class
        if num_processes is not None:
            self._arguments["num_processes"] = num_processes
        self._subject: Any = None

    def search(
        self,
        model: object,
        resume: bool = False,
        target_metric: str | Sequence[str] | None = None,
        mode: str = "best",
        n_parallels: int = 1,
        acceleration: bool = False,
        input_sample: object = None,
        max_epochs: int | None = None,
        **kwargs: Any,  # of the study
    ) -> pl.LightningModule | list[FrozenTrial]:
        """Train models with different hyper-parameters; see :meth:`Trainer.search`."""
        options, data = split_arguments(kwargs, _OF_FIT)
        metrics = _metrics(target_metric)
        self._check(options, metrics, mode, n_parallels)
        directions = directions_of(options, metrics)
        data = {name: value for name, value in data.items() if value is not None}
        self._subject = {"model": model, "data": data}
        objective = _TrainerObjective(
            self._subject,
            self._arguments | ({} if max_epochs is None else {"max_epochs": max_epochs}),
            self._trainer_class,
            directions,
            mode,
            acceleration,
            input_sample,
        )
        self._run(objective, directions, options, resume, n_parallels)
        return self._searched().best_trials if len(metrics) > 1 else self.end_search()

    def end_search(self, use_trial_id: int = -1) -> pl.LightningModule:
        return with_config(self._subject, self._trial(use_trial_id).params)["model"]

    def _check(
        self, options: Mapping[str, Any], metrics: list[str], mode: str, n_parallels: int
    ) -> None:
        check_choice("mode", mode, ("best", "last"))
        is_shared = options.get("storage") is not None or options.get("backend") is not None
        if n_parallels != 1 and not is_shared:
            raise UsageError(
                "parallel search is not supported when in-mem storage is used (n_parallels must be "
                "1); give a storage such as 'sqlite:///search.db'",
                code="argument-conflict",
                argument="n_parallels",
            )
        if options.get("pruner") is None:
            return
        if len(metrics) > 1:
            raise UsageError(
                "Trials with several metrics cannot be pruned; leave out pruner",
                code="argument-conflict",
                argument="pruner",
            )
        if metrics == [_LATENCY]:
            raise UsageError(
                "Trials that are compared by latency cannot be pruned; leave out pruner",
                code="argument-conflict",
                argument="pruner",
            )
        if (self._arguments.get("num_processes") or 1) > 1:
            raise UsageError(
                "Trials that are trained by several processes cannot be pruned; leave out pruner, "
                "or search with n_parallels processes and num_processes=1",
                code="argument-conflict",
                argument="pruner",
            )


def _metrics(target_metric: str | Sequence[str] | None) -> list[str]:
    metrics = [target_metric] if isinstance(target_metric, str) else list(target_metric or ())
    if not metrics or not all(isinstance(metric, str) for metric in metrics):
        raise UsageError(
            "target_metric must be the name of a metric that the model logs, or a list of names, "
            f"not {target_metric!r}",
            code="argument-type",
            argument="target_metric",
        )
    if len(set(metrics)) < len(metrics):
        raise UsageError(
            f"target_metric names a metric twice: {metrics}",
            code="argument-value",
            argument="target_metric",
        )
    return metrics


# Trials -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TrainerObjective:
    """Objective of a study: builds a trial's model, trains it and returns its metrics.

    It is pickled to the processes of a parallel search.

    Attributes
    ----------
    subject : dict
        ``model`` and ``data`` (arguments of ``Trainer.fit`` such as loaders); both may be lazy.
    trainer : dict
        Arguments of the Trainer.
    trainer_class : type
        Class of the trials' trainers.
    directions : dict of str to str
        Direction of each metric.
    mode : {"best", "last"}
        Epoch whose metrics are used: the best by the first metric, or the last.
    acceleration : bool
        True to measure the latency in the fastest runtime.
    input_sample : object
        Input for measuring latency.
    """

    subject: dict[str, Any]
    trainer: dict[str, Any]
    trainer_class: type[pl.Trainer]
    directions: dict[str, str]
    mode: str
    acceleration: bool
    input_sample: Any

    def __call__(self, trial: Trial) -> float | list[float]:
        made = suggested(self.subject, trial)
        model, data = made["model"], made["data"]
        if not isinstance(self.subject["model"], Lazy):
            model = copy.deepcopy(model)  # only the data have search spaces
        logged = [metric for metric in self.directions if metric != _LATENCY]
        alone = (self.trainer.get("num_processes") or 1) == 1
        pruned = trial if alone and len(self.directions) == 1 else None
        epochs = _EpochMetrics(logged, pruned)
        with raise_log_level(logging.WARNING, *_REPORTS), _interruptible():
            arguments = copy.deepcopy(self.trainer)
            arguments["callbacks"] = [*_callbacks(arguments), epochs]
            trainer = self.trainer_class(**arguments)
            trainer.fit(model, **data)
        metrics = self._epoch_metrics(trainer, epochs, logged) if logged else {}
        if pruned is None and len(self.directions) == 1:
            epochs.report(trial)
        if _LATENCY in self.directions or self.acceleration:
            runtime, metrics[_LATENCY] = _fastest(
                model, trainer, data, self.input_sample, self.acceleration
            )
            trial.set_user_attr("optimization", runtime)
        values = [metrics[metric] for metric in self.directions]
        return values if len(values) > 1 else values[0]

    def _epoch_metrics(
        self, trainer: pl.Trainer, epochs: _EpochMetrics, logged: list[str]
    ) -> dict[str, float]:
        """Return the metrics of the last or the best epoch; NaN is never the best."""
        if epochs.history and self.mode == "last":
            return epochs.history[-1]
        if epochs.history:
            first = logged[0]
            numbers = [each for each in epochs.history if not math.isnan(each[first])]
            best = max if self.directions[first].lower() == "maximize" else min
            return best(numbers or epochs.history[:1], key=operator.itemgetter(first))
        missing = [metric for metric in logged if metric not in trainer.callback_metrics]
        if missing:
            known = ", ".join(map(repr, trainer.callback_metrics)) or "nothing"
            raise UsageError(
                f"The model does not log {', '.join(map(repr, missing))}, which target_metric "
                f"names; it logs {known}",
                code="name-unknown",
                metric=missing[0],
                allowed=list(trainer.callback_metrics),
            )
        return {metric: float(trainer.callback_metrics[metric]) for metric in logged}


@contextmanager
def _interruptible() -> Iterator[None]:
    """Context manager that raises KeyboardInterrupt on Ctrl-C, not Lightning's SystemExit."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as ended:
        if not isinstance(ended.__context__, KeyboardInterrupt):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from ended


class _EpochMetrics(Callback):
    """Callback that keeps the metrics of each epoch and prunes trials.

    The pruner decides at the start of the next epoch, because an epoch's last hooks may still log.

    Parameters
    ----------
    metrics : list of str
    trial : optuna.trial.Trial, optional
        Trial that gets reports of the first metric and may be pruned.

    Attributes
    ----------
    history : list of dict
        Metrics of each epoch in which all of them were logged.
    """

    def __init__(self, metrics: list[str], trial: Trial | None = None):
        self._names = metrics
        self._trial = trial
        self._begun = self._validated = False
        self.history: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._begun:
            self._close_epoch(trainer)
            self._prune()
        self._begun, self._validated = True, False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._begun:
            self._close_epoch(trainer)

    def report(self, trial: Trial) -> None:
        """Report the first metric's value in each epoch to an Optuna trial."""
        for epoch, metrics in enumerate(self.history):
            trial.report(metrics[self._names[0]], epoch)

    def _close_epoch(self, trainer: pl.Trainer) -> None:
        if trainer.check_val_every_n_epoch not in (None, 1) and not self._validated:
            return  # metrics of the last validation would count twice
        logged = trainer.callback_metrics
        if not self._names or any(metric not in logged for metric in self._names):
            return
        self.history.append({metric: float(logged[metric]) for metric in self._names})
        if self._trial is not None:
            self._trial.report(self.history[-1][self._names[0]], len(self.history) - 1)

    def _prune(self) -> None:
        if self._trial is not None and self.history and self._trial.should_prune():
            raise optuna.TrialPruned(f"pruned after {len(self.history)} epochs")


def trial_arguments(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the arguments of the trials' trainers from those of the Trainer that searches.

    Parameters
    ----------
    trainer : mapping
        Arguments of the Trainer that searches.

    Returns
    -------
    dict
        Copied arguments. Progress bars, summaries, Lightning's default logger and checkpoints are
        disabled unless they were enabled explicitly.

    Raises
    ------
    UsageError
        If an argument cannot be copied.
    """
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    if not any(isinstance(each, Checkpoint) for each in _callbacks(trainer)):
        quiet["enable_checkpointing"] = False
    sentence = "Each trial has copies of the Trainer's arguments, but one cannot be copied"
    with as_usage_error(sentence, text=str, code="model-copy"):
        return quiet | copy.deepcopy(dict(trainer))


def _callbacks(arguments: Mapping[str, Any]) -> list[Callback]:
    callbacks = arguments.get("callbacks") or []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


# Latency ------------------------------------------------------------------------------------------


def _fastest(
    model: torch.nn.Module,
    trainer: pl.Trainer,
    data: Mapping[str, Any],
    input_sample: object,
    acceleration: bool,
) -> tuple[str, float]:
    """Return the name of a model's fastest runtime, and the milliseconds per call.

    Parameters
    ----------
    model : LightningModule
        The trained model; its mode is restored.
    trainer : Trainer
        Trainer that trained the model.
    data : mapping
        Arguments of ``Trainer.fit`` with the data; the first validation batch is the default
        sample.
    input_sample : object
        See ``InferenceOptimizer.trace``; None for the default.
    acceleration : bool
        Whether to try other runtimes.

    Returns
    -------
    runtime : str
        ``"original"`` or a method of InferenceOptimizer.
    latency : float
        Median milliseconds per call. Another runtime is selected if it is faster than the original
        beyond noise, measured in alternation.

    Raises
    ------
    UsageError
        If no sample is available.
    """
    batch = _sample(model, trainer, data, input_sample)
    with evaluating(model):
        original = _timed(model, batch)
        timings = {_ORIGINAL: time_alone(original, _LATENCY_CALLS)}
        for method in _RUNTIMES if acceleration else ():
            built = _build(model, method, batch)
            if built is not None:
                timing = time_against(original, _timed(built, batch), _LATENCY_CALLS)
                if timing.speedup.exceeds(1.0):  # beyond noise
                    timings[method] = timing
    best = max(timings, key=lambda method: timings[method].speedup.middle)
    return best, timings[best].latency.middle


def _sample(
    model: torch.nn.Module, trainer: pl.Trainer, data: Mapping[str, Any], input_sample: object
) -> ModelBatch:
    if input_sample is not None:
        return ModelBatch(*sample_arguments(model, input_sample))
    for loaders in _loaders(model, trainer, data):
        loader = loaders[0] if isinstance(loaders, (list, tuple)) else loaders
        batch = None if loader is None else next(batches_of(model, loader), None)
        if batch is not None:
            return batch
    raise UsageError(
        "The latency of a model is measured with a sample of its input; pass input_sample",
        code="argument-missing",
        argument="input_sample",
    )


def _loaders(model: torch.nn.Module, trainer: pl.Trainer, data: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the loaders of a fit, validation loaders first; some may be None.

    After a fit in several processes, the trainer of this process has none.
    """
    yield from (trainer.val_dataloaders, trainer.train_dataloader)
    yield from (data.get("val_dataloaders"), data.get("train_dataloaders"))
    source: Any = model
    if (module := data.get("datamodule")) is not None:
        source = module
        module.setup("fit")
    for name in ("val_dataloader", "train_dataloader"):
        if is_overridden(name, source):
            yield getattr(source, name)()


def _build(model: torch.nn.Module, method: str, batch: ModelBatch) -> torch.nn.Module | None:
    sample = batch.kwargs or (batch.args[0] if len(batch.args) == 1 else batch.args)
    # TorchScript reads all properties, but `trainer` of a copied LightningModule raises.
    marked: Any = model
    marked._jit_is_scripting = True
    try:
        return InferenceOptimizer.build(model, method, input_sample=sample)
    except Exception as error:  # the runtime is missing, or lacks an operation
        _log.warning("%s is left out: %s", method, one_line(error))
        return None
    finally:
        del model._jit_is_scripting


def _timed(model: torch.nn.Module, batch: ModelBatch) -> Block:
    @contextmanager
    def context() -> Iterator[None]:
        with InferenceOptimizer.get_context(model), torch.inference_mode():
            yield

    return block(Candidate(model, context), [batch])


# Lazy modules -------------------------------------------------------------------------------------


def lazily_compiled(
    compile_module: Callable[..., Any],
    model: object,
    loss: object,
    optimizer: object,
    scheduler: object,
    metrics: object,
) -> AutoObject:
    """Return a lazy object for ``Trainer.compile`` if one of its arguments is lazy.

    Parameters
    ----------
    compile_module : callable
        ``Trainer.compile``, called when all parameters are selected.
    model, loss, optimizer, scheduler, metrics
        Its arguments.

    Raises
    ------
    UsageError
        If an optimizer or scheduler is bound to a model that does not exist yet.
    """
    if not isinstance(model, Lazy):
        model = AutoObject(copy.deepcopy, model)
    optimizer = _lazy_part("optimizer", optimizer, AutoObject(torch.nn.Module.parameters, model))
    scheduler = _lazy_part("scheduler", scheduler, optimizer)
    metrics = AutoObject(copy.deepcopy, metrics)
    return AutoObject(compile_module, model, loss, optimizer, scheduler, metrics)


def _lazy_part(name: str, part: object, first: object) -> object:
    """Return a lazy call that builds an optimizer or scheduler from its lazy first argument."""
    if part is None:
        return None
    if isinstance(part, AutoObject):
        return AutoObject(part.target, first, *part.args, **part.kwargs)
    if isinstance(part, Lazy) or callable(part):
        return AutoObject(_call, first, **{name: part})
    raise UsageError(
        f"Each trial builds a new model, so its {name} must be built, too: give a "
        "bigdl.nano.automl.hpo.space.AutoObject, such as AutoObject(torch.optim.Adam, lr=0.01), "
        f"not a {type(part).__name__}",
        code="argument-type",
        argument=name,
    )


def _call(first: object, **part: Callable[[Any], Any]) -> object:
    (function,) = part.values()
    return function(first)
