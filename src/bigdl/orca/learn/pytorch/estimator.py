"""Estimators for PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError, require
from bigdl.orca.learn.arguments import config_of, take_old
from bigdl.orca.learn.backends import backend_of
from bigdl.orca.learn.estimator import EstimatorOptions
from bigdl.orca.learn.pytorch.callbacks import ModelCheckpoint
from bigdl.orca.learn.pytorch.pytorch_estimator import PyTorchEstimator
from bigdl.training.checkpoint import CheckpointDirectory
from bigdl.training.state import check_precision

if TYPE_CHECKING:
    import torch

__all__ = ["Estimator", "PyTorchEstimator", "TrainingOperator"]

logger = logging.getLogger("bigdl.orca")

_INTERVALS = {None: None, "batch": "step", "epoch": "epoch", "manual": "manual"}


class TrainingOperator:
    """The training step of BigDL 2.0; accepted as it is.

    A step of one's own is a :class:`~bigdl.orca.learn.pytorch.callbacks.MainCallback`:
    ``forward_batch`` became ``on_iter_forward``, ``train_batch`` that and ``on_iter_backward``, and
    ``predict_batch`` became ``on_pred_forward``.
    """


class Estimator:
    """Makes Estimators; see :meth:`from_torch`."""

    @staticmethod
    def from_torch(
        *,
        model: torch.nn.Module | Callable | None = None,
        optimizer: torch.optim.Optimizer | Callable | None = None,
        loss: Callable | None = None,
        metrics: Any = None,
        backend: str = "spark",
        config: dict | None = None,
        workers_per_node: int = 1,
        scheduler_creator: Callable | None = None,
        use_tqdm: bool = False,
        model_dir: str | None = None,
        sync_stats: bool = False,
        log_level: int = logging.INFO,
        log_to_driver: bool = True,
        scheduler_step_freq: str | None = None,
        precision: str = "fp32",
        num_to_keep: int = 2,
        training_operator_cls: Any = None,
        initialization_hook: Callable | None = None,
        **old,
    ) -> PyTorchEstimator:
        """An Estimator that trains a PyTorch model on a cluster (API of BigDL 2.x).

        Parameters
        ----------
        model : callable or torch.nn.Module
            ``model(config)`` returning a module, or a module (a LightningModule brings its own
            loss and optimizer). An instance is copied, never changed. May be None when
            :meth:`PyTorchEstimator.load` follows.
        optimizer : callable or torch.optim.Optimizer, optional
            ``optimizer(model, config)``, one of :mod:`bigdl.orca.learn.optimizers`, or an optimizer
            of the model instance.
        loss : torch.nn.Module or callable, optional
            A loss instance, ``loss(config)``, or a function of (output, target). N workers make
            the update of one process if it is a mean or a sum over the rows; class weights and
            ignored labels of ``CrossEntropyLoss`` and ``NLLLoss`` are taken into account.
        metrics : Metric, callable, str or list of these, optional
            See :mod:`bigdl.orca.learn.metrics`; merged exactly over the workers.
        backend : str
            ``"spark"``: workers are the tasks of one Spark barrier stage, gradients meet by
            ``torch.distributed``. ``"ray"`` (also ``"torch_distributed"``): the same by actors of
            Ray, which live from one call to the next. ``"horovod"``: gradients meet by Horovod, on
            the actors of the Ray that the program is connected to, else on Spark's tasks.
            ``"bigdl"``: weights, gradients and the optimizer's state are cut in slices that meet in
            ordinary Spark jobs (:mod:`bigdl.orca.parameter_layer`). ``"local"``: processes of this
            machine, without Spark or Ray, for inputs that need neither.
        config : dict, optional
            Passed to every creator. ``dtype`` ("float32", "float64"), ``shuffle`` (True) and
            ``drop_last`` (False) apply to the input; ``batch_size`` is refused.
        workers_per_node : int
            Workers on every node; each gets its share of the node's cores as threads.
        scheduler_creator : callable, optional
            ``scheduler(optimizer, config)``; also one of
            :mod:`bigdl.orca.learn.optimizers.schedule`.
        use_tqdm : bool
            Show a progress bar even where nobody seems to watch (no terminal, no notebook).
        model_dir : str, optional
            Folder for checkpoints that the driver and all workers share; a path or fsspec URL.
        sync_stats : bool
            Accepted for compatibility: statistics are always those of all workers.
        log_level : int
            Level of the logger ``bigdl.orca``.
        log_to_driver : bool
            Show what workers print.
        scheduler_step_freq : str, optional
            ``"epoch"``, ``"batch"`` (after every update) or ``"manual"``. Default: after updates
            for Orca's own schedules, else once per epoch.
        precision : str
            ``"bf16"`` computes the forward passes of training, evaluation and prediction in
            bfloat16 where torch's autocast does; weights and gradients stay as they are.
        num_to_keep : int
            How many of the newest checkpoints stay in `model_dir`.
        training_operator_cls : None
            Of BigDL 2.0; see :class:`~bigdl.orca.learn.pytorch.callbacks.MainCallback`.
        initialization_hook : callable, optional
            Called without arguments in every worker before the model is made.

        Returns
        -------
        PyTorchEstimator

        Raises
        ------
        UsageError
            For an argument that cannot work.
        """
        take_old(Estimator.from_torch, old)
        backend = backend_of(backend, {"torch_distributed": "ray"})
        _check_operator(training_operator_cls)
        if scheduler_step_freq not in _INTERVALS:
            raise UsageError(
                'scheduler_step_freq should be "batch", "epoch" or "manual", got '
                f"{scheduler_step_freq!r}"
            )
        if initialization_hook is not None and not callable(initialization_hook):
            raise UsageError("initialization_hook must be a function without arguments")
        options = EstimatorOptions(backend, workers_per_node, log_to_driver, model_dir, num_to_keep)
        require("torch", "orca")
        from bigdl.orca.learn.pytorch.parts import ModelParts

        parts = ModelParts(
            model,
            optimizer,
            loss,
            scheduler_creator,
            config_of(config),
            _INTERVALS[scheduler_step_freq],
            initialization_hook,
        )
        parts.check()
        logger.setLevel(log_level)
        return PyTorchEstimator(
            parts, options, metrics=metrics, use_tqdm=use_tqdm, precision=check_precision(precision)
        )

    @staticmethod
    def latest_checkpoint(checkpoint_dir: str) -> str:
        """The newest complete checkpoint below a ``model_dir``, or the file ``last.ckpt`` there.

        Returns
        -------
        str
            A folder that :meth:`PyTorchEstimator.load_checkpoint` and ``fit(resume=)`` take, or a
            file for the former.

        Raises
        ------
        UsageError
            If there is none.
        """
        run = CheckpointDirectory.latest_run(checkpoint_dir)
        if run is not None:
            return f"{run.url}/{run.newest()}"
        return ModelCheckpoint.get_latest_checkpoint(checkpoint_dir)


def _check_operator(operator) -> None:
    """Refuse an operator that does something of its own."""
    if operator is None or operator is TrainingOperator:
        return
    name = getattr(operator, "__name__", type(operator).__name__)
    raise UsageError(
        f"training_operator_cls={name} cannot be used; make its forward_batch the on_iter_forward "
        "of a MainCallback (its train_batch that and on_iter_backward) and pass it as callbacks=["
        "...] to fit and evaluate"
    )
