"""Estimators for Keras."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, require
from bigdl.orca.learn.arguments import config_of, location_of
from bigdl.orca.learn.backends import backend_of
from bigdl.orca.learn.old_keywords import take_old, warn_once
from bigdl.orca.learn.tf2.keras_estimator import KerasEstimator
from bigdl.orca.learn.tf2.runtime import check_backend
from bigdl.training.checkpoint import CheckpointDirectory

__all__ = ["Estimator", "KerasEstimator"]


class Estimator:
    """Makes Estimators; see :meth:`from_keras`."""

    @staticmethod
    def from_keras(
        *,
        model_creator: Callable | None = None,
        config: dict | None = None,
        verbose: bool = False,
        workers_per_node: int = 1,
        compile_args_creator: Callable | None = None,
        backend: str | None = None,
        cpu_binding: bool = False,
        log_to_driver: bool = True,
        model_dir: str | None = None,
        keras_model=None,
        model=None,
        custom_objects: dict | None = None,
        num_to_keep: int = 2,
        **old,
    ) -> KerasEstimator:
        """An Estimator that trains a Keras model on a cluster (API of BigDL 2.x).

        The workers compute with the backend of Keras that the driver has: TensorFlow, torch or JAX.

        Parameters
        ----------
        model_creator : callable, optional
            ``model_creator(config)`` returns a compiled ``keras.Model``, or one that is not
            compiled with `compile_args_creator`. May be left out when :meth:`KerasEstimator.load`
            follows.
        config : dict, optional
            Passed to every creator. ``intra_op_parallelism`` (default: the worker's threads) and
            ``inter_op_parallelism`` (2) are TensorFlow's; ``dtype`` ("float32", "float64"),
            ``shuffle`` (True) and ``drop_last`` (False) apply to the input; ``batch_size`` is
            refused.
        verbose : bool
            Accepted for compatibility; ``fit`` has an argument of this name.
        workers_per_node : int
            Workers on every node; each gets its share of the node's cores as threads.
        compile_args_creator : callable, optional
            ``compile_args_creator(config)`` returns the arguments of ``model.compile`` as a dict.
        backend : str, optional
            ``"spark"``: workers are the tasks of one Spark barrier stage. ``"ray"`` (also
            ``"tf2"``): actors of Ray, which live from one call to the next. ``"horovod"``:
            gradients meet by Horovod. ``"bigdl"``: synchronous SGD on ordinary Spark jobs
            (:mod:`bigdl.orca.parameter_layer`), for the optimizers SGD, Adam, AdamW, Adagrad
            and RMSprop. ``"local"``: processes of this machine, without Spark or Ray, for inputs
            that need neither. Results are the same. Default: Ray if that is what
            ``init_orca_context(runtime="ray")`` has started, else Spark.
        cpu_binding : bool
            Accepted for compatibility: workers get threads of their own, not cores.
        log_to_driver : bool
            Show what workers print.
        model_dir : str, optional
            Folder for checkpoints that the driver and all workers share; a path or fsspec URL.
        keras_model, model : keras.Model, optional
            A compiled model instead of `model_creator`. It is copied, never changed.
        custom_objects : dict, optional
            Classes and functions of a model's that its file names, where they are not found.
        num_to_keep : int
            How many of the newest checkpoints stay in `model_dir`.

        Returns
        -------
        KerasEstimator

        Raises
        ------
        UsageError
            For an argument that cannot work.
        """
        take_old("from_keras", old, known=_ARGUMENTS)
        check_backend(backend)
        if backend is None:
            backend = "spark" if _has_spark() else "ray"
        backend = backend_of(backend, {"tf2": "ray"})
        config, model_dir = config_of(config), location_of(model_dir)
        if cpu_binding and backend == "spark":
            raise UsageError("cpu_binding should not be True when using spark backend")
        if backend == "horovod" and model_creator is not None and compile_args_creator is None:
            raise UsageError(
                "compile_args_creator should not be None, when backend is set to horovod"
            )
        instances = [each for each in (model, keras_model) if each is not None]
        if len(instances) + (model_creator is not None) > 1:
            raise UsageError("Pass only one of model_creator, model and keras_model")
        if cpu_binding:
            warn_once("from_keras(cpu_binding=True) has no effect: workers are not bound to cores")
        require("torch", "orca")
        require("keras", "tf")
        from bigdl.orca.learn.tf2.parts import KerasParts

        parts = KerasParts(model_creator, compile_args_creator, config)
        parts.check()
        if instances:
            parts = parts.with_instance(instances[0], custom_objects)
        return KerasEstimator(
            parts,
            workers_per_node=check_positive("workers_per_node", workers_per_node),
            log_to_driver=log_to_driver,
            model_dir=model_dir,
            num_to_keep=check_positive("num_to_keep", num_to_keep),
            backend=backend,
        )

    @staticmethod
    def latest_checkpoint(checkpoint_dir: str) -> str:
        """The newest complete checkpoint below a ``model_dir``, or the newest file of Keras there.

        Returns
        -------
        str
            A folder that :meth:`KerasEstimator.load_checkpoint` and ``fit(resume=)`` take, or a
            file that a ModelCheckpoint wrote.

        Raises
        ------
        UsageError
            If there is none.
        """
        run = CheckpointDirectory.latest_run(checkpoint_dir)
        if run is not None:
            return f"{run.url}/{run.newest()}"
        fsspec = require("fsspec", "orca")
        fs, root = fsspec.core.url_to_fs(os.fspath(checkpoint_dir))
        found = []
        if fs.exists(root):
            for info in fs.ls(root, detail=True):
                if info["type"] == "file" and info["name"].endswith((".keras", ".h5")):
                    found.append(
                        (str(info.get("mtime", info.get("LastModified", ""))), info["name"])
                    )
        if not found:
            raise UsageError(f"There is no checkpoint in {checkpoint_dir!r}; pass a model_dir")
        return fs.unstrip_protocol(max(found)[1]) if "://" in checkpoint_dir else max(found)[1]


def _has_spark() -> bool:
    """Whether there is a Spark, or no Ray either."""
    from bigdl.orca.cluster.ray import is_connected

    pyspark = sys.modules.get("pyspark")
    is_there = pyspark is not None and pyspark.SparkContext._active_spark_context is not None
    return is_there or not is_connected()


_ARGUMENTS = tuple(inspect.signature(Estimator.from_keras).parameters)
