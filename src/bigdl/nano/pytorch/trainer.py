"""Lightning's Trainer with tuned settings, several processes, search and inference."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from bigdl.common.errors import UsageError, hide_frames, require, user_stacklevel
from bigdl.common.program_state import preserve_start_method
from bigdl.nano.acceleration.precision import INT8
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.optimizer import InferenceOptimizer, SwitchableModel
from bigdl.nano.pytorch.inference.source import TorchSource
from bigdl.nano.pytorch.lightning import LightningModule
from bigdl.nano.pytorch.strategies import (
    AutoLr,
    ProcessesStrategy,
    SingleProcessStrategy,
)
from bigdl.nano.pytorch.training.options import (
    TrainingOptions,
    check_lightning_arguments,
    precision_of_plugin,
    translate_arguments,
)
from bigdl.nano.pytorch.training.rates import StepRates
from bigdl.tuning.spaces import Lazy, holds_lazy

if TYPE_CHECKING:
    import optuna

    from bigdl.nano.pytorch.search import HPOSearcher

__all__ = ["Trainer"]

require("pytorch_lightning", "nano")

import pytorch_lightning as pl  # noqa: E402
from pytorch_lightning.utilities.types import (  # noqa: E402
    _PREDICT_OUTPUT,
    EVAL_DATALOADERS,
    TRAIN_DATALOADERS,
)


class _OptionalTrainerMethod(staticmethod):
    """Static method that, called on a Trainer, receives this Trainer as the argument `trainer`."""

    def __get__(self, trainer: object, owner: type | None = None) -> Callable[..., torch.nn.Module]:
        function = super().__get__(trainer, owner)
        if trainer is None:
            return function
        return functools.update_wrapper(functools.partial(function, trainer=trainer), function)


@hide_frames
class Trainer(pl.Trainer):
    """``pytorch_lightning.Trainer`` with faster training steps.

    It accepts all arguments of Lightning's Trainer, so that a program only changes its import (Dai
    et al., BigDL 2.0, CVPR 2022, Fig. 2). Each fit logs its settings in one line, and each setting
    has an argument. Settings apply on the CPU and, except for the frozen prefix, on one CUDA GPU.
    With several GPUs, another `accelerator` or a custom `strategy`, training is Lightning's.

    Parameters
    ----------
    num_processes : int, optional
        Number of training processes on this machine. Each uses the loader's batch size, so the
        global batch is `num_processes` times as large. Validation and prediction outside of
        ``fit`` run in the calling process.
    use_ipex : bool
        Accepted; it has no effect beyond the automatic settings.
    distributed_backend : {"subprocess", "spawn", "fork", "ray"}
        Start method of the processes. ``"subprocess"`` and ``"spawn"`` start new interpreters and
        work in scripts and notebooks. ``"fork"`` copies this process, which must not have other
        threads. ``"ray"`` runs Ray tasks.
    process_group_backend : {"gloo"}, optional
    cpu_for_each_process : list of list of int, optional
        Logical cores of each process. By default the cores of this process are split.
    use_hpo : bool
        Enable :meth:`search`, which creates trainers with the same arguments for its trials.
    channels_last : bool, optional
        Whether images are stored with channels last. By default, if a measurement finds it faster
        and the model supports it.
    auto_lr : bool or dict
        With several processes, multiply learning rates by their number, after a warm-up over the
        first tenth of the training, or over ``{"warmup_epochs": n}`` epochs. There is no warm-up
        if the model has schedulers.
    precision : optional
        See Lightning's Trainer. The default is float32; long fits measure on this processor whether
        bfloat16 is faster in the layers of training steps. Evaluation is always float32. 32 means
        float32 without a measurement.
    fused_optimizers : bool
        Whether to use the fused implementations of Adam, AdamW, SGD and Adagrad.
    tune_process : bool
        Whether to tune allocator and thread count with :func:`bigdl.nano.runtime.tune` during a
        fit. Freed memory is kept for a minute for a following fit.
    inductor : bool or "auto"
        Whether TorchInductor compiles the model's layers, which takes about a minute. It saves time
        in long fits whose layers are not mostly convolutions or matrix products. ``"auto"``
        compiles after twenty steps if the remaining steps may repay it, and keeps the compiled
        layers after twenty more steps if they are faster.
    bucket_cap_mb : float
        Megabytes of gradients that are all-reduced together.
    frozen_prefix : bool, optional
        Whether layers without gradients run in a faster inference runtime during training steps. By
        default, if that is safe and the remaining steps repay the build, which runs in the
        background. True always builds it after the second step. Evaluation is not changed.
    algorithms : list of Callback, optional
        Training algorithms such as :class:`~bigdl.nano.pytorch.algorithms.SelectiveBackprop`.
    **kwargs
        Arguments of ``pytorch_lightning.Trainer``.

    Raises
    ------
    UsageError
        If an argument is invalid, or contradicts another.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import Trainer
    >>> net = torch.nn.Linear(2, 1)
    >>> model = Trainer.compile(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    >>> x = torch.rand(64, 2)
    >>> rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    >>> loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    >>> trainer = Trainer(max_epochs=50, logger=False, enable_checkpointing=False,
    ...                   enable_progress_bar=False, enable_model_summary=False)
    >>> trainer.fit(model, loader)
    >>> trainer.callback_metrics["train/loss"] < 0.01
    tensor(True)
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
        precision: str | int | None = None,
        *,
        fused_optimizers: bool = True,
        tune_process: bool = True,
        inductor: bool | str = False,
        bucket_cap_mb: float = 25.0,
        frozen_prefix: bool | None = None,
        algorithms: Sequence[pl.Callback] | None = None,
        **kwargs: Any,
    ):
        options = TrainingOptions(
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
        rates = AutoLr(auto_lr)
        kwargs = translate_arguments(kwargs)
        check_lightning_arguments(kwargs, options.count)
        others = {"auto_lr": auto_lr, "algorithms": algorithms, **kwargs}
        self.hpo_arguments: dict[str, object] = dataclasses.asdict(options) | others
        self.hposearcher: HPOSearcher | None = None
        if use_hpo:
            from bigdl.nano.pytorch.search import HPOSearcher

            self.hposearcher = HPOSearcher(self)
        if algorithms:
            is_list = isinstance(algorithms, list | tuple)
            if not is_list or not all(isinstance(each, pl.Callback) for each in algorithms):
                raise UsageError(
                    "algorithms must be a list of callbacks such as [SelectiveBackprop()], not "
                    f"{algorithms!r}",
                    code="argument-type",
                    argument="algorithms",
                )
            callbacks = kwargs.get("callbacks") or []
            callbacks = [callbacks] if not isinstance(callbacks, (list, tuple)) else callbacks
            kwargs["callbacks"] = [*callbacks, *algorithms]
        self.use_ipex = use_ipex
        # Several processes tune themselves while this one waits.
        self._is_tuned_here = options.count == 1 and _is_on_cpu(kwargs)
        self._options = options
        self._fitted_on: Any = None  # data source of the last fit
        lightning_precision = options.precision
        if options.precision is None:
            options.precision = precision_of_plugin(kwargs.get("plugins"))
        if options.count > 1:
            kwargs["accelerator"] = "cpu"
            kwargs["strategy"] = ProcessesStrategy(options, rates)
        elif _is_on_cpu(kwargs) and kwargs.get("devices", "auto") in ("auto", 1):
            kwargs |= {"accelerator": "cpu", "devices": 1}
            kwargs["strategy"] = SingleProcessStrategy(options)
        elif (gpu := gpu_of(kwargs)) is not None:
            kwargs |= {"accelerator": "cuda", "devices": [gpu.index]}
            kwargs["strategy"] = SingleProcessStrategy(options, gpu)
        with _without_tips():
            super().__init__(precision=cast("Any", lightning_precision), **kwargs)
        self._callback_connector._pending_litmodels_tip = False

    @property
    def trial_class(self) -> type[Trainer]:
        """Class of the trainers that train the trials of a search."""
        return Trainer

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the last fit, as logged; empty before a fit."""
        return getattr(self.strategy, "settings", ())

    @property
    def rates(self) -> StepRates:
        """Durations of the last fit's steps, before and after layers were accelerated.

        Printing it shows a table; ``rates.rows()`` returns the values. If a part was accelerated,
        the fit logs the speed-up at its end.

        Examples
        --------
        >>> from bigdl.nano.pytorch import Trainer
        >>> print(Trainer(logger=False, enable_checkpointing=False).rates)
        There were fewer than three training steps
        """
        return getattr(self.strategy, "rates", None) or StepRates()

    def fit(
        self,
        model: pl.LightningModule,
        train_dataloaders: TRAIN_DATALOADERS | pl.LightningDataModule | None = None,
        val_dataloaders: EVAL_DATALOADERS | None = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | os.PathLike | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Fit a model like Lightning's Trainer; with several processes, keep rank 0's state."""
        if holds_lazy([model, train_dataloaders, val_dataloaders, datamodule]):
            raise UsageError(
                "The model or the data have search spaces; call search first, and fit the "
                "model that it returns",
                code="state",
            )
        sources = (train_dataloaders, datamodule, model)
        self._fitted_on = next((source for source in sources if source is not None), None)
        with self._options.tuning_context() if self._is_tuned_here else nullcontext([]) as report:
            cast("Any", self.strategy).process_report = report
            with preserve_start_method():  # Lightning reads the start method, which fixes it
                super().fit(
                    model,
                    train_dataloaders,
                    val_dataloaders,
                    datamodule,
                    cast("Any", ckpt_path),
                    weights_only,
                )

    def validate(
        self,
        model: torch.nn.Module | None = None,
        dataloaders: EVAL_DATALOADERS | pl.LightningDataModule | None = None,
        ckpt_path: str | os.PathLike | None = None,
        verbose: bool = True,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Validate like Lightning's Trainer; the model may be an accelerated LightningModule."""
        steps, path = _with_steps(model, self), cast("Any", ckpt_path)
        with preserve_start_method():
            return super().validate(steps, dataloaders, path, verbose, datamodule, weights_only)

    def test(
        self,
        model: torch.nn.Module | None = None,
        dataloaders: EVAL_DATALOADERS | pl.LightningDataModule | None = None,
        ckpt_path: str | os.PathLike | None = None,
        verbose: bool = True,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Test like Lightning's Trainer; the model may be an accelerated LightningModule."""
        steps, path = _with_steps(model, self), cast("Any", ckpt_path)
        with preserve_start_method():
            return super().test(steps, dataloaders, path, verbose, datamodule, weights_only)

    def predict(
        self,
        model: torch.nn.Module | None = None,
        dataloaders: EVAL_DATALOADERS | pl.LightningDataModule | None = None,
        datamodule: pl.LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike | None = None,
        weights_only: bool | None = None,
    ) -> _PREDICT_OUTPUT | None:
        """Predict like Lightning's Trainer; the model may be an accelerated LightningModule."""
        steps, path = _with_steps(model, self), cast("Any", ckpt_path)
        with preserve_start_method():
            return super().predict(
                steps, dataloaders, datamodule, return_predictions, path, weights_only
            )

    def search(
        self,
        model: object,
        resume: bool = False,
        target_metric: str | Sequence[str] | None = None,
        mode: str = "best",
        n_parallels: int = 1,
        acceleration: bool = False,
        input_sample: object = None,
        **kwargs: Any,
    ) -> pl.LightningModule | list[optuna.trial.FrozenTrial] | None:
        """Search the hyper-parameters of a model with Optuna.

        Each trial trains a separate model with a trainer like this one. Parameters are reported by
        the name of the argument that has the search space.

        Parameters
        ----------
        model : AutoObject
            Object of a class decorated with ``@hpo.plmodel()``, constructed with search spaces
            (:mod:`bigdl.nano.automl.hpo.space`), or the result of :meth:`compile` on one.
        resume : bool
            Continue the study ``study_name`` of the storage or, without a storage, the last search
            of this trainer. Finished trials are kept; interrupted trials are repeated.
        target_metric : str or list of str
            Logged metric or metrics to optimize. ``"latency"`` is measured instead: milliseconds
            of the trained model per batch.
        mode : {"best", "last"}
            Epoch whose metrics are used: the best by the (first) metric, or the last.
        n_parallels : int
            Number of processes that run trials concurrently; more than one requires a storage. If
            a process is killed, its trial is repeated once.
        acceleration : bool
            Whether to measure the latency in the fastest of PyTorch, OpenVINO, ONNX Runtime and
            TorchScript. The trial's user attribute ``"optimization"`` has its name.
        input_sample : Tensor, tuple or dict, optional
            Input for measuring latency; by default the first validation batch.
        **kwargs
            Arguments of the fit: ``train_dataloaders``, ``val_dataloaders``, ``datamodule``,
            ``ckpt_path``, ``max_epochs``. Loaders may be lazy.

            Arguments of the study: ``storage``, ``study_name``, ``load_if_exists``, ``direction``
            or ``directions``, ``sampler`` and ``pruner`` (a name from
            :mod:`bigdl.nano.automl.hpo.backend`, or an Optuna object), ``sampler_kwargs``,
            ``pruner_kwargs``.

            Arguments of the run: ``n_trials``, ``timeout`` (seconds), ``n_jobs`` (threads),
            ``catch``, ``tune_callbacks``, ``gc_after_trial``, ``show_progress_bar``; ``backend``,
            which runs trials on ``"spark"`` or ``"ray"``, `n_parallels` at the same time, or as
            many as the cluster can if that is 1.

        Returns
        -------
        LightningModule or list of optuna.trial.FrozenTrial
            An untrained model with the best parameters. For several metrics, the Pareto-optimal
            trials. None without ``use_hpo=True``.

        Raises
        ------
        UsageError
            If an argument is invalid, or the model does not log the metric.

        Examples
        --------
        >>> import torch
        >>> import bigdl.nano.automl.hpo as hpo
        >>> from bigdl.nano.automl.hpo import space
        >>> from bigdl.nano.pytorch import Trainer
        >>> from bigdl.nano.pytorch.lightning import LightningModule
        >>> @hpo.plmodel()
        ... class Regression(LightningModule):
        ...     def __init__(self, lr):
        ...         net = torch.nn.Linear(2, 1)
        ...         optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        ...         super().__init__(net, torch.nn.MSELoss(), optimizer)
        ...         self.lr = lr
        >>> x = torch.rand(32, 2)
        >>> rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        >>> loader = torch.utils.data.DataLoader(rows, batch_size=8)
        >>> trainer = Trainer(use_hpo=True, max_epochs=2)
        >>> best = trainer.search(
        ...     Regression(lr=space.Categorical(1e-6, 0.1)), target_metric="val/loss",
        ...     sampler="grid", train_dataloaders=loader, val_dataloaders=loader,
        ... )
        >>> best.lr
        0.1
        """
        if self.hposearcher is None:
            warnings.warn(
                "This Trainer does not search; create it with use_hpo=True",
                stacklevel=user_stacklevel(),
            )
            return None
        return self.hposearcher.search(
            model, resume, target_metric, mode, n_parallels, acceleration, input_sample, **kwargs
        )

    def search_summary(self) -> optuna.Study | None:
        """Print the best trials of the last search and return its ``optuna.Study``."""
        return None if self.hposearcher is None else self.hposearcher.search_summary()

    def end_search(self, use_trial_id: int = -1) -> pl.LightningModule | None:
        """Return an untrained model with a trial's parameters, by default the best trial's."""
        return None if self.hposearcher is None else self.hposearcher.end_search(use_trial_id)

    @staticmethod
    def compile(
        model: torch.nn.Module,
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: object = None,
        metrics: Sequence[Any] | None = None,
    ) -> pl.LightningModule:
        """Wrap an ordinary module in a LightningModule.

        Parameters
        ----------
        model : Module
            A LightningModule is returned unchanged; the other arguments must then be omitted.
        loss, optimizer, scheduler, metrics
            See :class:`bigdl.nano.pytorch.lightning.LightningModule`.

        Returns
        -------
        LightningModule

        Raises
        ------
        UsageError
            If an argument is invalid or contradicts another.

        Notes
        -----
        For :meth:`search`, the model may be a lazy object
        (:class:`bigdl.nano.automl.hpo.space.AutoObject`) with search spaces. Optimizer and
        scheduler must then be lazy, too, without their parameters and their optimizer:
        ``AutoObject(torch.optim.Adam, lr=space.Real(1e-4, 1e-1, log=True))``.

        Examples
        --------
        >>> import torch
        >>> from torchmetrics import MeanAbsoluteError
        >>> from bigdl.nano.pytorch import Trainer
        >>> net = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> metrics = [MeanAbsoluteError()]
        >>> model = Trainer.compile(net, torch.nn.MSELoss(), optimizer, metrics=metrics)
        >>> rows = torch.utils.data.TensorDataset(torch.rand(8, 4), torch.zeros(8, 1))
        >>> trainer = Trainer(logger=False, enable_progress_bar=False)
        >>> results = trainer.validate(model, torch.utils.data.DataLoader(rows, 4), verbose=False)
        >>> list(results[0])
        ['val/loss', 'val/MeanAbsoluteError_0']
        """
        if any(isinstance(part, Lazy) for part in (model, loss, optimizer, scheduler, metrics)):
            from bigdl.nano.pytorch.search import lazily_compiled

            compiled: Any = lazily_compiled(
                Trainer.compile, model, loss, optimizer, scheduler, metrics
            )
            return compiled  # search builds modules from it
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"Model must be instance of nn.Module but got {type(model).__name__}",
                code="model-type",
            )
        if not isinstance(model, pl.LightningModule):
            return LightningModule(model, loss, optimizer, scheduler, metrics)
        parts = {"loss": loss, "optimizer": optimizer, "scheduler": scheduler, "metrics": metrics}
        extra = [name for name, value in parts.items() if value is not None]
        if extra:
            raise UsageError(
                f"The model is a LightningModule, which already defines {' and '.join(extra)}; "
                "leave the argument out",
                code="argument-conflict",
                argument=extra[0],
            )
        return model

    @staticmethod
    def trace(
        model: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> torch.nn.Module:  # args: of trace
        """Call :meth:`InferenceOptimizer.trace`; deprecated."""
        _warn_of_deprecation("trace")
        return InferenceOptimizer.trace(model, *args, **kwargs)

    @_OptionalTrainerMethod
    def quantize(
        model: torch.nn.Module,
        *args: Any,
        onnx: bool = False,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> torch.nn.Module:
        """Call :meth:`InferenceOptimizer.quantize`; deprecated unless `onnx` is True.

        Parameters
        ----------
        model : Module
            The original model; it is not changed.
        onnx : bool
            Quantize for ONNX Runtime, and return a model that starts in PyTorch and switches with
            ``eval_onnx`` and ``exit_onnx``.
        trainer : Trainer, optional
            Trainer whose last fit provides the calibration data by default. With
            ``trainer.quantize(model)`` it is that trainer.
        *args, **kwargs
            Arguments of :meth:`InferenceOptimizer.quantize`.

        Returns
        -------
        Module
        """
        arguments = _quantize_arguments(model, args, kwargs, trainer)
        if not onnx:
            _warn_of_deprecation("quantize")
            return InferenceOptimizer.quantize(**arguments)
        arguments.setdefault("accelerator", "onnxruntime")
        quantized: Any = InferenceOptimizer.quantize(**arguments)
        sample, named = map(arguments.get, ("input_sample", "example_kwarg_inputs"))
        source = TorchSource(model, sample, named, _data_of(arguments))
        return SwitchableModel(model, quantized, source)

    save = staticmethod(InferenceOptimizer.save)
    load = staticmethod(InferenceOptimizer.load)


def _with_steps(model: torch.nn.Module | None, trainer: Trainer) -> pl.LightningModule | None:
    """Wrap an accelerated model in a LightningModule for the Trainer; return others unchanged.

    It is a shallow copy of the original LightningModule in which ``self(x)`` calls the accelerated
    model. For a plain module, it is a copy of the LightningModule in which the trainer fitted it.
    """
    if not isinstance(model, AcceleratedModel):
        return cast("pl.LightningModule | None", model)  # Lightning refuses other modules
    source = model.nano_source
    last = getattr(trainer, "lightning_module", None)
    if source is not None and source is getattr(last, "model", None):
        source = last
    if not isinstance(source, pl.LightningModule):
        name = type(model if source is None else source).__name__
        raise UsageError(
            f"The accelerated model was not made from a LightningModule, but from a {name}, so "
            "the trainer knows no steps; wrap the original by Trainer.compile before it is "
            "accelerated, or pass it as model when it is loaded, or fit it by this trainer first",
            code="model-type",
        )
    steps = copy.copy(source)
    # targets after the inputs are omitted, as in the forward of LightningModule
    count = len(source.forward_args) or None if isinstance(source, LightningModule) else None
    vars(steps)["forward"] = lambda *args, **kwargs: model(*args[:count], **kwargs)
    return steps


def _warn_of_deprecation(name: str) -> None:
    warnings.warn(
        f"Trainer.{name} is deprecated; use InferenceOptimizer.{name} of bigdl.nano.pytorch",
        DeprecationWarning,
        stacklevel=user_stacklevel(),
    )


def _is_no_tip(record: logging.LogRecord) -> bool:
    return "Tip: For seamless" not in str(record.msg)


@contextmanager
def _without_tips() -> Iterator[None]:
    """Temporarily hide Lightning's tips about installable packages."""
    log = logging.getLogger(pl.utilities.rank_zero.__name__)
    log.addFilter(_is_no_tip)
    try:
        yield
    finally:
        log.removeFilter(_is_no_tip)


def _is_on_cpu(arguments: dict[str, Any]) -> bool:
    """Return True if Lightning would train on the CPU with its default strategy."""
    if arguments.get("strategy", "auto") != "auto" or arguments.get("num_nodes", 1) != 1:
        return False
    accelerator = arguments.get("accelerator", "auto")
    if accelerator == "auto":
        backends = (torch.cuda, torch.backends.mps)
        return not any(backend.is_available() for backend in backends)
    return accelerator == "cpu"


def gpu_of(arguments: dict[str, Any]) -> torch.device | None:
    """Return the single GPU on which Lightning would train, or None."""
    if arguments.get("strategy", "auto") != "auto" or arguments.get("num_nodes", 1) != 1:
        return None
    accelerator = arguments.get("accelerator", "auto")
    if accelerator not in ("auto", "gpu", "cuda") or not torch.cuda.is_available():
        return None
    devices = arguments.get("devices", "auto")
    if devices == "auto":
        devices = torch.cuda.device_count()
    if devices in (1, "1"):
        return torch.device("cuda", 0)
    if isinstance(devices, list | tuple) and len(devices) == 1 and isinstance(devices[0], int):
        return torch.device("cuda", devices[0])
    return None


def fitted_loader(trainer: pl.Trainer) -> DataLoader | None:
    """Return the loader of a trainer's last fit, or None if there was not exactly one loader."""
    source: Any = getattr(trainer, "_fitted_on", None)
    if hasattr(source, "train_dataloader"):  # a LightningModule or a LightningDataModule
        # A module set up in other processes may have no loader here.
        with suppress(Exception):
            source = source.train_dataloader()
    return source if isinstance(source, DataLoader) else None


def _quantize_arguments(
    model: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any], trainer: Trainer | None = None
) -> dict[str, Any]:
    """Return the arguments of ``InferenceOptimizer.quantize`` by name.

    Parameters
    ----------
    model, args, kwargs
        Arguments of the call.
    trainer : Trainer, optional
        Trainer whose last fit provides the calibration data for int8 by default.
    """
    bound = inspect.signature(InferenceOptimizer.quantize).bind(model, *args, **kwargs)
    arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    arguments.pop("kwargs", None)
    is_int8 = arguments.get("precision", INT8) == INT8
    if trainer is not None and is_int8 and _data_of(arguments) is None:
        arguments["calib_data"] = fitted_loader(trainer)
    return arguments


def _data_of(arguments: Mapping[str, Any]) -> object:
    data = arguments.get("calib_data")
    return arguments.get("calib_dataloader") if data is None else data
