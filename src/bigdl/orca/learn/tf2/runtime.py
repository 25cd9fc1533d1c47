"""Keras in a process of its own: which backend it computes with, its threads and its seeds."""

from __future__ import annotations

import contextlib
import os
import sys

from bigdl.common.errors import UsageError, require
from bigdl.orca.learn.tf2.jax_steps import limit_threads

__all__ = ["backend_of_program", "check_backend", "seed_keras", "use_backend"]

_BACKENDS = ("tensorflow", "torch", "jax")


def backend_of_program() -> str:
    """The backend of Keras in the driver, which is that of the workers, too.

    Raises
    ------
    UsageError
        If the workers cannot train with it.
    """
    keras = require("keras", "tf")
    name = keras.backend.backend()
    if name not in _BACKENDS:
        raise UsageError(
            f"Keras computes with {name!r} here, which workers cannot train with; set "
            'KERAS_BACKEND to "tensorflow", "torch" or "jax" before Keras is imported'
        )
    return name


def check_backend(given: str | None) -> None:
    """Refuse a ``backend`` of an Estimator that cannot train with the backend of Keras.

    Raises
    ------
    UsageError
        For JAX.
    """
    if given in ("bigdl", "horovod") and backend_of_program() == "jax":
        raise UsageError(
            f"backend={given!r} does not train Keras models that compute with JAX; use "
            "backend='spark' or 'ray', whose updates are the same"
        )


def use_backend(name: str, config: dict | None = None, threads: int | None = None) -> None:
    """Import Keras with the driver's backend; in a worker, before anything else imports it.

    Parameters
    ----------
    name : str
    config : dict, optional
        ``intra_op_parallelism`` and ``inter_op_parallelism`` of TensorFlow.
    threads : int, optional
        Threads of this worker.

    Raises
    ------
    UsageError
        If this process has imported Keras with another backend.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name
    if name == "jax":
        require("jax", "jax")
        limit_threads(threads)
    keras = require("keras", "tf")
    own = keras.backend.backend()
    if own != name:
        raise UsageError(
            f"Keras computes with {own!r} in this worker and with {name!r} in the driver; set "
            f"KERAS_BACKEND={name} in the environment of the workers"
        )
    if name == "tensorflow":
        _set_threads(config or {}, threads)


def _set_threads(config, threads):
    import tensorflow as tf

    if threads is None:
        return
    # while one waits for the other workers another one can compute
    inter = int(config.get("inter_op_parallelism", 2))
    intra = int(config.get("intra_op_parallelism", threads))
    with contextlib.suppress(RuntimeError):  # a process that has computed already keeps its own
        tf.config.threading.set_inter_op_parallelism_threads(inter)
        tf.config.threading.set_intra_op_parallelism_threads(intra)


def seed_keras(seed: int, rank: int = 0) -> None:
    """Seed Keras, its backend, numpy and random; ranks draw different numbers."""
    import keras
    import numpy as np

    from bigdl.training.state import seed_everything

    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    keras.utils.set_random_seed(mixed)
    seed_everything(seed, rank)
