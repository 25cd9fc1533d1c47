"""Lightning's Trainer with the machine's best settings, several processes, and inference."""

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

from bigdl.common.errors import UsageError, require
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


class _OfClassOrTrainer(staticmethod):
    """A static method that gets the trainer it is called on, if any, as its keyword `trainer`."""

    def __get__(self, trainer: object, owner: type | None = None) -> Callable[..., torch.nn.Module]:
        function = super().__get__(trainer, owner)
        if trainer is None:
            return function
        return functools.update_wrapper(functools.partial(function, trainer=trainer), function)


class Trainer(pl.Trainer):
    """``pytorch_lightning.Trainer``, all of whose arguments it takes, with faster steps.

    The class is a Trainer so that a program only changes its import (Dai et al., BigDL 2.0,
    CVPR 2022, Fig. 2). What it does by default is said in one line when a fit starts, and each of
    these settings has a switch. They apply on the CPU, and on one GPU of CUDA but for the frozen
    prefix; with several GPUs, another `accelerator` or a `strategy` of the user's own, training is
    Lightning's.

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
        the same measurement finds it faster, and the model bears it.
    auto_lr : bool or dict
        With several processes, multiply learning rates by their number, after a warm-up over the
        first tenth of the training, or over ``{"warmup_epochs": n}`` epochs. A model that has
        schedulers of its own gets no warm-up.
    precision : optional
        As Lightning's. By default float32, or bfloat16 in the layers of training steps where a
        measurement on this processor finds it faster, which fits of many steps make; everything
        else, and all evaluation, is float32. 32 means float32 throughout.
    fused_optimizers : bool
        Whether Adam, AdamW, SGD and Adagrad use their fused implementations.
    tune_process : bool
        Whether the allocator and the thread count are those of :func:`bigdl.nano.runtime.tune`
        during a fit; what it frees is kept for a minute, for a fit that may follow.
    inductor : bool or "auto"
        Whether TorchInductor compiles the model's layers, which takes a minute or so: it pays where
        a training is long and its layers are not mostly convolutions or products. ``"auto"`` finds
        out: after twenty steps the layers are compiled if the steps that are left may repay it, and
        after twenty more the faster way goes on.
    bucket_cap_mb : float
        Megabytes of gradients that travel together between processes.
    frozen_prefix : bool, optional
        Whether the part of the model that no gradient reaches runs in training steps as inference
        does, in a faster runtime. By default it does where that is safe and the steps that are
        left repay building it, beside the training; True builds it after the second step in any
        case. Evaluation is always as written.
    algorithms : list of Callback, optional
        Algorithms such as :class:`~bigdl.nano.pytorch.algorithms.SelectiveBackprop`.
    **kwargs
        Of ``pytorch_lightning.Trainer``.

    Raises
    ------
    UsageError
        If an argument is wrong, or contradicts another.

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
        algorithms: Sequence[Any] | None = None,
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
        own = {"auto_lr": auto_lr, "algorithms": algorithms, **kwargs}
        self.hpo_arguments: dict[str, object] = dataclasses.asdict(options) | own
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
        # Of several processes each tunes itself, and this one waits.
        self._is_tuned_here = options.count == 1 and _is_on_cpu(kwargs)
        self._options = options
        self._fitted_on: Any = None  # what the batches of the last fit came from
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
        """The class that trains the models of a search."""
        return Trainer

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the last fit, as its report says; empty before."""
        return getattr(self.strategy, "settings", ())

    @property
    def rates(self) -> StepRates:
        """Rates of the last fit's steps, before and after parts of the model were accelerated.

        Printed, it is a table; ``rates.rows()`` returns the figures. A fit of which a part was
        accelerated ends with a line of the log that says what it gained.

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
        """As Lightning's; with several processes, model and trainer are afterwards as rank 0's."""
        if holds_lazy([model, train_dataloaders, val_dataloaders, datamodule]):
            raise UsageError(
                "The model, or the data, has search spaces; call search first, and fit what it "
                "returns",
                code="state",
            )
        sources = (train_dataloaders, datamodule, model)
        self._fitted_on = next((source for source in sources if source is not None), None)
        with self._options.tuning_context() if self._is_tuned_here else nullcontext([]) as report:
            cast("Any", self.strategy).process_report = report
            with preserve_start_method():  # Lightning asks for it
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
        """As Lightning's; the model may be an accelerated LightningModule."""
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
        """As Lightning's; the model may be an accelerated LightningModule."""
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
        """As Lightning's; the model may be an accelerated LightningModule."""
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
            warnings.warn("This Trainer does not search; make it with use_hpo=True", stacklevel=2)
            return None
        return self.hposearcher.search(
            model, resume, target_metric, mode, n_parallels, acceleration, input_sample, **kwargs
        )

    def search_summary(self) -> optuna.Study | None:
        """Print the best trials of the last search; returns its ``optuna.Study``."""
        return None if self.hposearcher is None else self.hposearcher.search_summary()

    def end_search(self, use_trial_id: int = -1) -> pl.LightningModule | None:
        """A model with the parameters of trial `use_trial_id`, by default the best, not trained."""
        return None if self.hposearcher is None else self.hposearcher.end_search(use_trial_id)

    @staticmethod
    def compile(
        model: torch.nn.Module,
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: object = None,
        metrics: Sequence[Any] | None = None,
    ) -> pl.LightningModule:
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
        >>> figures = trainer.validate(model, torch.utils.data.DataLoader(rows, 4), verbose=False)
        >>> list(figures[0])
        ['val/loss', 'val/MeanAbsoluteError_0']
        """
        if any(isinstance(part, Lazy) for part in (model, loss, optimizer, scheduler, metrics)):
            from bigdl.nano.pytorch.search import lazily_compiled

            compiled: Any = lazily_compiled(
                Trainer.compile, model, loss, optimizer, scheduler, metrics
            )
            return compiled  # search makes modules of it
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
                f"The model is a LightningModule, which has its own {' and '.join(extra)}; "
                "leave the argument out",
                code="argument-conflict",
                argument=extra[0],
            )
        return model

    @staticmethod
    def trace(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """As :meth:`InferenceOptimizer.trace`, which has taken its place."""
        _warn_of_deprecation("trace")
        return InferenceOptimizer.trace(model, *args, **kwargs)

    @_OfClassOrTrainer
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


def _with_steps(model: torch.nn.Module | None, trainer: Trainer) -> Any:
    """Return the LightningModule whose steps an accelerated model takes, or the model itself.

    It is a shallow copy: ``self(x)`` in its steps calls the accelerated model. Of a plain module
    it is the LightningModule that the trainer has had around the module.
    """
    if not isinstance(model, AcceleratedModel):
        return model
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
    # as in the forward of what compile returns, targets after the inputs are left out
    count = len(source.forward_args) or None if isinstance(source, LightningModule) else None
    vars(steps)["forward"] = lambda *args, **kwargs: model(*args[:count], **kwargs)
    return steps


def _warn_of_deprecation(name: str) -> None:
    warnings.warn(
        f"Trainer.{name} is deprecated; use InferenceOptimizer.{name} of bigdl.nano.pytorch",
        DeprecationWarning,
        stacklevel=3,
    )


def _is_no_tip(record: logging.LogRecord) -> bool:
    return "Tip: For seamless" not in str(record.msg)


@contextmanager
def _without_tips() -> Iterator[None]:
    """Leave out what Lightning says of packages that could be installed, too."""
    log = logging.getLogger(pl.utilities.rank_zero.__name__)
    log.addFilter(_is_no_tip)
    try:
        yield
    finally:
        log.removeFilter(_is_no_tip)


def _is_on_cpu(arguments: dict[str, Any]) -> bool:
    """Return True if Lightning would train on the CPU, by a strategy of its own choice."""
    if arguments.get("strategy", "auto") != "auto" or arguments.get("num_nodes", 1) != 1:
        return False
    accelerator = arguments.get("accelerator", "auto")
    if accelerator == "auto":
        backends = (torch.cuda, torch.backends.mps)
        return not any(backend.is_available() for backend in backends)
    return accelerator == "cpu"


def gpu_of(arguments: dict[str, Any]) -> torch.device | None:
    """Return the only GPU on which Lightning would train; None if there is none, or several."""
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
    """Return the loader of a trainer's last fit; None if it had none, or several."""
    source: Any = getattr(trainer, "_fitted_on", None)
    if hasattr(source, "train_dataloader"):  # a LightningModule or a LightningDataModule
        # One that was set up in other processes may have none here.
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
        As they were given.
    trainer : Trainer, optional
        The loader of its last fit is the calibration data, where some are of use and none are
        given.
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
