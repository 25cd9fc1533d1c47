"""Estimators for PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bigdl.common.errors import UsageError, require
from bigdl.orca.learn.checkpoint import CheckpointDirectory
from bigdl.orca.learn.estimator import check_positive
from bigdl.orca.learn.pytorch.pytorch_estimator import PyTorchEstimator

__all__ = ["Estimator", "PyTorchEstimator"]

logger = logging.getLogger("bigdl.orca")

_BACKENDS = ("spark",)


class Estimator:
    """Makes Estimators; see :meth:`from_torch`."""

    @staticmethod
    def from_torch(
        *,
        model=None,
        optimizer=None,
        loss=None,
        metrics=None,
        backend: str = "spark",
        config: dict | None = None,
        workers_per_node: int = 1,
        scheduler_creator: Callable | None = None,
        use_tqdm: bool = False,
        model_dir: str | None = None,
        sync_stats: bool = False,
        log_level: int = logging.INFO,
        log_to_driver: bool = True,
    ) -> PyTorchEstimator:
        """An Estimator that trains a PyTorch model on a cluster (API of BigDL 2.x).

        Parameters
        ----------
        model : callable or torch.nn.Module
            ``model(config)`` returning a module, or a module (a LightningModule brings its own
            loss and optimizer). An instance is copied, never changed. May be None when
            :meth:`PyTorchEstimator.load` follows.
        optimizer : callable or torch.optim.Optimizer, optional
            ``optimizer(model, config)``, or an optimizer of the model instance.
        loss : torch.nn.Module or callable, optional
            A loss instance, ``loss(config)``, or a function of (output, target). N workers make
            the update of one process if it is a mean or a sum over the rows; class weights and
            ignored labels of ``CrossEntropyLoss`` and ``NLLLoss`` are taken into account.
        metrics : Metric, callable, str or list of these, optional
            See :mod:`bigdl.orca.learn.metrics`; merged exactly over the workers.
        backend : str
            ``"spark"``: workers are the tasks of one Spark barrier stage.
        config : dict, optional
            Passed to every creator. ``dtype`` ("float32", "float64"), ``shuffle`` (True) and
            ``drop_last`` (False) apply to the input; ``batch_size`` is refused.
        workers_per_node : int
            Workers on every node; each gets its share of the node's cores as threads.
        scheduler_creator : callable, optional
            ``scheduler(optimizer, config)``; stepped once per epoch.
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

        Returns
        -------
        PyTorchEstimator

        Raises
        ------
        UsageError
            For an argument that cannot work.
        """
        if backend not in _BACKENDS:
            known = ("horovod", "ray", "torch_distributed", "bigdl")
            later = " (planned for a later release)" if backend in known else ""
            raise UsageError(
                "Only the spark backend is supported for now, got backend: "
                f"{backend!r}{later}; use backend='spark'"
            )
        if config is not None and not isinstance(config, dict):
            raise UsageError(f"config must be a dict, got {type(config).__name__}")
        require("torch", "orca")
        from bigdl.orca.learn.pytorch.parts import ModelParts

        parts = ModelParts(model, optimizer, loss, scheduler_creator, dict(config or {}))
        parts.check()
        logger.setLevel(log_level)
        return PyTorchEstimator(
            parts,
            metrics=metrics,
            workers_per_node=check_positive("workers_per_node", workers_per_node),
            use_tqdm=use_tqdm,
            model_dir=model_dir,
            log_to_driver=log_to_driver,
        )

    @staticmethod
    def latest_checkpoint(checkpoint_dir: str) -> str:
        """The newest complete checkpoint below a ``model_dir``.

        Returns
        -------
        str
            A folder that :meth:`PyTorchEstimator.load_checkpoint` and ``fit(resume=)`` take.

        Raises
        ------
        UsageError
            If there is none.
        """
        run = CheckpointDirectory.latest_run(checkpoint_dir)
        if run is None:
            raise UsageError(f"Latest checkpoint at {checkpoint_dir} not found.")
        return f"{run.url}/{run.newest()}"
