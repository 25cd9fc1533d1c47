"""Lightning's Trainer with the machine's best settings, several processes, and inference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from bigdl.common.errors import UsageError, require
from bigdl.nano.automl.hpo.lazy import Lazy
from bigdl.nano.automl.pytorch import HPOSearcher
from bigdl.nano.automl.pytorch.compiling import lazily_compiled, refuse_lazy
from bigdl.nano.automl.pytorch.trainers import trial_arguments
from bigdl.nano.pytorch.inference.optimizer import InferenceOptimizer, SwitchableModel
from bigdl.nano.pytorch.lightning import LightningModule
from bigdl.nano.pytorch.training.arguments import (
    check_algorithms,
    check_bucket,
    check_lightning_arguments,
    precision_of_plugin,
    translated,
)
from bigdl.nano.pytorch.training.auto_lr import AutoLr
from bigdl.nano.pytorch.training.fitted import (
    OfClassOrTrainer,
    quantize_arguments,
    quantize_source,
)
from bigdl.nano.pytorch.training.processes import Processes
from bigdl.nano.pytorch.training.settings import Wishes
from bigdl.nano.pytorch.training.strategies import ProcessesStrategy, SingleProcessStrategy

__all__ = ["Trainer"]

_lightning = require("pytorch_lightning", "nano")

_OF_TRIALS = frozenset(
    (
        "num_processes",
        "use_ipex",
        "distributed_backend",
        "process_group_backend",
        "cpu_for_each_process",
        "channels_last",
        "auto_lr",
        "precision",
        "fused_optimizers",
        "tune_process",
        "inductor",
        "bucket_cap_mb",
        "algorithms",
    )
)


class Trainer(_lightning.Trainer):
    """``pytorch_lightning.Trainer``, all of whose arguments it takes, with faster steps.

    The class is a Trainer so that a program only changes its import (Dai et al., BigDL 2.0,
    CVPR 2022, Fig. 2). What it does by default is said in one line when a fit starts, and each of
    these settings has a switch. They apply on the CPU; with another `accelerator`, or a `strategy`
    of the user's own, training is Lightning's.

    Parameters
    ----------
    num_processes : int, optional
        Processes of this machine that train together. Each takes its batches of the loader's size,
        so a batch of all of them is `num_processes` times as large. Validation and prediction
        outside of ``fit`` run in the calling process.
    use_ipex : bool
        Accepted; the automatic settings have taken its place.
    distributed_backend : {"subprocess", "spawn", "fork", "ray"}
        How processes are started. ``"subprocess"`` and ``"spawn"`` are fresh interpreters, from
        scripts and notebooks alike. ``"fork"`` copies this process, which must not have started
        threads. ``"ray"`` starts them as tasks of Ray.
    process_group_backend : {"gloo"}, optional
    cpu_for_each_process : list of list of int, optional
        Logical cores of each process. By default this process's own are split.
    use_hpo : bool
        Whether :meth:`search` is to be used, which makes trainers like this one for its trials.
    channels_last : bool, optional
        Whether convolutions see images with the channels last in memory. By default they do where
        the model has any and bears it.
    auto_lr : bool or dict
        With several processes, multiply learning rates by their number, after a warm-up over the
        first tenth of the training, or over ``{"warmup_epochs": n}`` epochs. A model that has
        schedulers of its own gets no warm-up.
    precision : optional
        As Lightning's. By default layers compute in bfloat16 in training steps where the processor
        has instructions for it and the layers are large enough; everything else, and all
        evaluation, is float32. 32 means float32 throughout.
    fused_optimizers : bool
        Whether Adam, AdamW, SGD and Adagrad use their fused implementations.
    tune_process : bool
        Whether the allocator and the thread count are those of :func:`bigdl.nano.runtime.tune`
        during a fit; what it frees is kept for a minute, for a fit that may follow.
    inductor : bool
        Whether TorchInductor compiles the model's layers, which takes a minute or so: it pays where
        a training is long and its layers are not mostly convolutions or products.
    bucket_cap_mb : float
        Megabytes of gradients that travel together between processes.
    algorithms : list of Callback, optional
        Algorithms such as :class:`~bigdl.nano.pytorch.algorithms.SelectiveBackprop`.
    **kwargs
        Of ``pytorch_lightning.Trainer``.

    Raises
    ------
    UsageError
        If an argument is wrong, or contradicts another.
    """

    def __init__(
        self,
        num_processes: int | None = None,
        use_ipex: bool = False,
        distributed_backend: str = "subprocess",
        process_group_backend: str | None = None,
        cpu_for_each_process: list[list[int]] | None = None,
        use_hpo: bool = False,
        channels_last: bool | None = None,
        auto_lr: bool | dict = True,
        precision: Any = None,
        *,
        fused_optimizers: bool = True,
        tune_process: bool = True,
        inductor: bool = False,
        bucket_cap_mb: float = 25.0,
        algorithms: Sequence[Any] | None = None,
        **kwargs: Any,
    ):
        given = {name: value for name, value in locals().items() if name in _OF_TRIALS}
        processes = Processes.of(
            num_processes,
            distributed_backend,
            process_group_backend,
            cpu_for_each_process,
            tune_process,
        )
        wishes = Wishes.of(precision, channels_last, fused_optimizers, use_ipex, inductor)
        check_bucket(bucket_cap_mb)
        rates = AutoLr(auto_lr)
        kwargs = translated(kwargs)
        check_lightning_arguments(kwargs, processes.count)
        self.hpo_arguments = trial_arguments(given | kwargs) if use_hpo else {}
        if algorithms:
            check_algorithms(algorithms)
            callbacks = kwargs.get("callbacks") or []
            callbacks = [callbacks] if not isinstance(callbacks, (list, tuple)) else callbacks
            kwargs["callbacks"] = [*callbacks, *algorithms]
        self.use_ipex = use_ipex
        # Of several processes each tunes itself, and this one waits.
        self._is_tuned_here = processes.count == 1 and _is_on_cpu(kwargs)
        self._processes = processes
        own_precision = precision_of_plugin(kwargs.get("plugins"))
        given_precision = wishes.precision
        if given_precision is None and own_precision is not None:
            wishes = replace(wishes, precision=own_precision)
        if processes.count > 1:
            kwargs["accelerator"] = "cpu"
            kwargs["strategy"] = ProcessesStrategy(processes, wishes, rates, bucket_cap_mb)
        elif _is_on_cpu(kwargs) and kwargs.get("devices", "auto") in ("auto", 1):
            kwargs |= {"accelerator": "cpu", "devices": 1}
            kwargs["strategy"] = SingleProcessStrategy(wishes)
        super().__init__(precision=given_precision, **kwargs)
        self.hposearcher = HPOSearcher(self) if use_hpo else None

    @property
    def settings(self) -> tuple[str, ...]:
        """What the last fit was trained with, as its report says; empty before."""
        return getattr(self.strategy, "settings", ())

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; with several processes, model and trainer are afterwards as rank 0's."""
        refuse_lazy(args, kwargs)
        if not self._is_tuned_here:
            super().fit(*args, **kwargs)
            return
        with self._processes.tuned_here() as said:
            self.strategy.said = said
            super().fit(*args, **kwargs)

    def search(
        self,
        model: Any,
        resume: bool = False,
        target_metric: str | Sequence[str] | None = None,
        mode: str = "best",
        n_parallels: int = 1,
        acceleration: bool = False,
        input_sample: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Search the hyper-parameters of a model, by Optuna.

        Each trial trains a model of its own with a trainer like this one. A parameter is reported
        under the name of the argument that holds its space, with its value.

        Parameters
        ----------
        model : AutoObject
            Of a class under ``@hpo.plmodel()``, constructed with search spaces
            (:mod:`bigdl.nano.automl.hpo.space`), or what :meth:`compile` makes of one.
        resume : bool
            Go on with the study ``study_name`` of the storage, or with the last search of this
            trainer where there is no storage. Finished trials are kept; those that a killed search
            was at are tried again.
        target_metric : str or list of str
            What the model logs and the search optimizes. ``"latency"`` is not logged but measured:
            milliseconds that the trained model takes for a batch.
        mode : {"best", "last"}
            Of which epoch the metrics are: the best in the (first) metric, or the last.
        n_parallels : int
            Processes that run trials at the same time; they need a storage. One that is killed
            loses the trial it was at, which is tried again once.
        acceleration : bool
            Whether the latency is that of the fastest of PyTorch, OpenVINO, ONNX Runtime and
            TorchScript. The trial's user attribute ``"optimization"`` names it.
        input_sample : Tensor, tuple or dict, optional
            What latency is measured with; by default the first batch of validation.
        **kwargs
            Of the training: ``train_dataloaders``, ``val_dataloaders``, ``datamodule``,
            ``ckpt_path``, ``max_epochs``. Loaders may be lazy, too.

            Of the study: ``storage``, ``study_name``, ``load_if_exists``, ``direction`` or
            ``directions``, ``sampler`` and ``pruner`` (a name of
            :mod:`bigdl.nano.automl.hpo.backend`, or an object of Optuna), ``sampler_kwargs``,
            ``pruner_kwargs``.

            Of its run: ``n_trials``, ``timeout`` (seconds), ``n_jobs`` (threads), ``catch``,
            ``tune_callbacks``, ``gc_after_trial``, ``show_progress_bar``.

        Returns
        -------
        LightningModule or list of optuna.trial.FrozenTrial
            A model with the best parameters, not trained; for several metrics the trials that no
            other is better than in everything. None without ``use_hpo=True``.

        Raises
        ------
        UsageError
            If an argument is wrong, or the model does not log the metric.
        """
        if self.hposearcher is None:
            warnings.warn("This Trainer does not search; make it with use_hpo=True", stacklevel=2)
            return None
        return self.hposearcher.search(
            model, resume, target_metric, mode, n_parallels, acceleration, input_sample, **kwargs
        )

    def search_summary(self) -> Any:
        """Print the best trials of the last search; returns its ``optuna.Study``."""
        return None if self.hposearcher is None else self.hposearcher.search_summary()

    def end_search(self, use_trial_id: int = -1) -> Any:
        """A model with the parameters of trial `use_trial_id`, by default the best, not trained."""
        return None if self.hposearcher is None else self.hposearcher.end_search(use_trial_id)

    @staticmethod
    def compile(
        model: torch.nn.Module,
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        metrics: Sequence[Any] | None = None,
    ) -> Any:
        """Make a LightningModule of an ordinary module.

        Parameters
        ----------
        model : Module
            A LightningModule is returned as it is, and takes no other argument.
        loss, optimizer, scheduler, metrics
            As for :class:`bigdl.nano.pytorch.lightning.LightningModule`.

        Returns
        -------
        LightningModule

        Raises
        ------
        UsageError
            If the arguments do not fit.

        Notes
        -----
        For :meth:`search`, the model, or what holds its spaces, may be lazy
        (:class:`bigdl.nano.automl.hpo.space.AutoObject`). An optimizer and a scheduler are then
        lazy objects too, without the parameters and the optimizer that they belong to:
        ``AutoObject(torch.optim.Adam, lr=space.Real(1e-4, 1e-1, log=True))``.
        """
        if any(isinstance(part, Lazy) for part in (model, loss, optimizer, scheduler, metrics)):
            return lazily_compiled(model, loss, optimizer, scheduler, metrics)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"Model must be instance of nn.Module but got {type(model).__name__}")
        if not isinstance(model, _lightning.LightningModule):
            return LightningModule(model, loss, optimizer, scheduler, metrics)
        given = {"loss": loss, "optimizer": optimizer, "scheduler": scheduler, "metrics": metrics}
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise UsageError(
                f"The model is a LightningModule, which has its own {' and '.join(extra)}; "
                "leave the argument out"
            )
        return model

    @staticmethod
    def trace(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """As :meth:`InferenceOptimizer.trace`, which has taken its place."""
        _say_deprecated("trace")
        return InferenceOptimizer.trace(model, *args, **kwargs)

    @OfClassOrTrainer
    def quantize(
        model: torch.nn.Module,
        *args: Any,
        onnx: bool = False,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> torch.nn.Module:
        """As :meth:`InferenceOptimizer.quantize`, which has taken its place but for `onnx`.

        Parameters
        ----------
        model : Module
            Not changed.
        onnx : bool
            Quantize for ONNX Runtime, and return a model that starts as the original and is
            switched by its ``eval_onnx`` and ``exit_onnx``.
        trainer : Trainer, optional
            The loader of its last fit is the calibration data, if none are given. Called on a
            trainer, ``trainer.quantize(model)``, this is that trainer.
        *args, **kwargs
            Of :meth:`InferenceOptimizer.quantize`.

        Returns
        -------
        Module
        """
        arguments = quantize_arguments(model, args, kwargs, trainer)
        if not onnx:
            _say_deprecated("quantize")
            return InferenceOptimizer.quantize(**arguments)
        arguments.setdefault("accelerator", "onnxruntime")
        quantized = InferenceOptimizer.quantize(**arguments)
        return SwitchableModel(model, quantized, quantize_source(arguments))

    @staticmethod
    def save(model: torch.nn.Module, path: Any) -> None:
        """As :meth:`InferenceOptimizer.save`."""
        InferenceOptimizer.save(model, path)

    @staticmethod
    def load(
        path: Any,
        model: torch.nn.Module | None = None,
        input_sample: Any = None,
        inplace: bool = False,
        device: str | None = None,
        cache_dir: str | None = None,
        shapes: str | None = None,
        thread_num: int | None = None,
    ) -> torch.nn.Module:
        """As :meth:`InferenceOptimizer.load`."""
        return InferenceOptimizer.load(
            path, model, input_sample, inplace, device, cache_dir, shapes, thread_num
        )


def _say_deprecated(name: str) -> None:
    warnings.warn(
        f"Trainer.{name} is deprecated; use InferenceOptimizer.{name} of bigdl.nano.pytorch",
        DeprecationWarning,
        stacklevel=3,
    )


def _is_on_cpu(arguments: dict[str, Any]) -> bool:
    """Whether Lightning would train on the CPU, by a strategy of its own choice."""
    if arguments.get("strategy", "auto") != "auto" or arguments.get("num_nodes", 1) != 1:
        return False
    accelerator = arguments.get("accelerator", "auto")
    if accelerator == "auto":
        backends = (torch.cuda, torch.backends.mps)
        return not any(backend.is_available() for backend in backends)
    return accelerator == "cpu"
