"""Estimator of MXNet models."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, hide_frames
from bigdl.common.storage import read_bytes, write_bytes
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.learn.backends import BACKENDS, resolve_backend
from bigdl.orca.learn.mxnet.environment import isolated_python
from bigdl.orca.learn.mxnet.worker import WEIGHTS, run
from bigdl.runtime.serialization import pickled_by_value

Creator = Callable[[dict], Any]


def create_config(
    optimizer: str = "sgd",
    optimizer_params: dict[str, Any] | None = None,
    log_interval: int = 10,
    seed: int | None = None,
    extra_config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a config for :meth:`Estimator.from_mxnet`.

    Parameters
    ----------
    optimizer : str, default "sgd"
        Name of an MXNet optimizer.
    optimizer_params : dict, optional
        Its arguments; default ``{"learning_rate": 0.01}``.
    log_interval : int, default 10
        Number of batches between log lines with the loss and metrics.
    seed : int, optional
        Seed of the workers' random generators.
    extra_config : dict, optional
        Further entries for the creators.

    Examples
    --------
    >>> from bigdl.orca.learn.mxnet import create_config
    >>> create_config("adam", {"learning_rate": 0.001}, seed=1)["optimizer"]
    'adam'
    """
    return {
        "optimizer": optimizer,
        "optimizer_params": optimizer_params or {"learning_rate": 0.01},
        "log_interval": log_interval,
        **({} if seed is None else {"seed": seed}),
        **(extra_config or {}),
    }


@hide_frames
class Estimator:
    """Factory of Estimators for MXNet models.

    Examples
    --------
    >>> from bigdl.orca.learn.mxnet import Estimator, create_config
    >>> def model(config):
    ...     import mxnet
    ...     net = mxnet.gluon.nn.Dense(1)
    ...     net.initialize()
    ...     return net
    >>> def loss(config):
    ...     import mxnet
    ...     return mxnet.gluon.loss.L2Loss()
    >>> est = Estimator.from_mxnet(config=create_config("adam"), model_creator=model,
    ...                            loss_creator=loss, num_workers=2, backend="local")
    >>> type(est).__name__  # est.fit((x, y), epochs=10, batch_size=32) creates the environment
    'MXNetEstimator'
    """

    @staticmethod
    def from_mxnet(
        *,
        config: dict[str, Any],
        model_creator: Creator,
        loss_creator: Creator | None = None,
        eval_metrics_creator: Creator | None = None,
        validation_metrics_creator: Creator | None = None,
        num_workers: int | None = None,
        num_servers: int | None = None,
        runner_cores: int | None = None,
        backend: str = "spark",
    ) -> MXNetEstimator:
        """Create an Estimator whose creator functions run in MXNet's isolated environment.

        Parameters
        ----------
        config : dict
            Result of :func:`create_config`; the creators get it with ``"batch_size"`` added.
        model_creator : callable
            ``model_creator(config)`` returns a gluon block or a symbol module.
        loss_creator : callable, optional
            Returns the loss; required for a gluon block.
        eval_metrics_creator, validation_metrics_creator : callable, optional
            Return one or several metrics or metric names, for the training and validation data.
        num_workers : int, optional
            Number of workers; default the number of cluster nodes.
        num_servers : int, optional
            Number of key-value servers; default the number of workers.
        runner_cores : int, optional
            Number of threads per worker; default its share of the node's cores.
        backend : str, default "spark"
            Backend that runs the workers: ``"spark"``, ``"ray"`` or ``"local"``.

        Raises
        ------
        UsageError
            If an argument is invalid.
        """
        if backend not in ("spark", "ray", "local"):
            raise UsageError(
                f"backend should be 'spark', 'ray' or 'local', got {backend!r}",
                code="name-unknown",
                argument="backend",
                allowed=["spark", "ray", "local"],
            )
        for name, number in (("num_workers", num_workers), ("num_servers", num_servers)):
            if number is not None:
                check_positive(name, number)
        creators = {
            "model_creator": model_creator,
            "loss_creator": loss_creator,
            "eval_metrics_creator": eval_metrics_creator,
            "validation_metrics_creator": validation_metrics_creator,
        }
        for name, creator in creators.items():
            if not callable(creator) and (creator is not None or name == "model_creator"):
                raise UsageError(
                    f"{name} should be a function of the config, got {creator!r}",
                    code="argument-type",
                    argument=name,
                )
        workers = num_workers, num_servers, runner_cores
        return MXNetEstimator(config, creators, workers, resolve_backend(backend, {}))


@hide_frames
class MXNetEstimator:
    """An Estimator that trains an MXNet model on a cluster.

    Examples
    --------
    >>> from bigdl.orca.learn.mxnet import Estimator, create_config
    >>> est = Estimator.from_mxnet(config=create_config(), model_creator=lambda config: None,
    ...                            backend="local")
    >>> est.save("weights.params")
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: There are no weights to save before the first fit
    """

    def __init__(self, config: dict, creators: dict, workers: tuple, backend: str):
        self._config = {**create_config(), **config}
        self._creators, self._backend = creators, backend
        self._num_workers, self._num_servers, self._threads = workers
        self._files: dict[str, bytes] = {}  # saved model and optimizer state

    def fit(
        self,
        data: object,
        epochs: int = 1,
        batch_size: int = 32,
        validation_data: object = None,
        train_resize_batch_num: int | None = None,
        *,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
    ) -> list[dict[str, float]]:
        """Train the model; a further call continues the training.

        Parameters
        ----------
        data : XShards, Spark DataFrame, arrays or callable
            Training data. A function ``data(config, kv)`` returns an MXNet iterator or loader for
            worker ``kv.rank`` of ``kv.num_workers``.
        epochs : int, default 1
        batch_size : int, default 32
            Number of rows per step and worker.
        validation_data : optional
            Validation data of the same type as `data`.
        train_resize_batch_num : int, optional
            Number of batches per worker and epoch, if a `data` function returns different numbers.
        feature_cols, label_cols : str or list of str, optional
            Feature and label columns of a DataFrame.

        Returns
        -------
        list of dict
            Per worker, the metrics of its rows in the last epoch: ``epoch_time`` in seconds,
            ``loss`` and the evaluation metrics.

        Raises
        ------
        UsageError
            If an argument is invalid, or if the MXNet environment cannot be created.
        WorkerError
            If a function raised an error in a worker.
        """
        check_positive("epochs", epochs)
        check_positive("batch_size", batch_size)
        if validation_data is not None and self._creators["validation_metrics_creator"] is None:
            raise UsageError(
                "validation_data needs metrics; pass validation_metrics_creator to from_mxnet",
                code="argument-missing",
                argument="validation_metrics_creator",
            )
        inputs = {"data": data, "validation": validation_data}
        inputs = {name: each for name, each in inputs.items() if each is not None}
        if len({callable(each) for each in inputs.values()}) > 1:
            raise UsageError(
                "data and validation_data should both be functions, or both hold rows",
                code="argument-conflict",
                argument="validation_data",
            )
        isolated_python()  # report problems with the environment before a job starts
        config = {**self._config, "batch_size": batch_size}
        feed = None
        columns: list | None = None
        functions = inputs
        if not callable(data):
            feed = FeedGroup({k: as_feed(v, feature_cols, label_cols) for k, v in inputs.items()})
            columns = [feed.feature_cols, feed.label_cols] if feed.feature_cols else None
            functions = {}
        creators = pickled_by_value(
            {"creators": self._creators, "config": config, "functions": functions},
            "The Estimator's functions cannot be shipped to the workers",
            "import mxnet inside the functions",
        )
        job = {
            "epochs": epochs,
            "columns": columns,
            "resize": train_resize_batch_num,
            "seed": config.get("seed", secrets.randbelow(1 << 31)),
        }
        files = {**self._files, "creators.pkl": creators}
        program = functools.partial(run, files, job, batch_size, self._num_servers)
        engine = BACKENDS[self._backend].engine(workers_per_node=1)
        with engine.open(program, feed, self._num_workers, threads=self._threads) as opened:
            return opened.attempt(on_event=self._on_event)

    def _on_event(self, event: str, value: Any) -> None:
        if event == "message":
            self._files[value[0]["topic"]] = value[1]

    def save(self, model_path: str) -> str:
        """Write the weights in the format of MXNet's ``save_parameters``.

        Parameters
        ----------
        model_path : str
            A local path or fsspec URL.

        Raises
        ------
        UsageError
            If the model has not been fitted.
        """
        if WEIGHTS not in self._files:
            raise UsageError("There are no weights to save before the first fit", code="not-fitted")
        write_bytes(model_path, self._files[WEIGHTS])
        return model_path

    def load(self, model_path: str) -> None:
        """Load weights that the next fit starts from, with a new optimizer.

        Parameters
        ----------
        model_path : str
            A local path or fsspec URL.
        """
        self._files = {WEIGHTS: read_bytes(model_path)}

    def shutdown(self) -> None:
        """Stop the idle workers, which are Ray actors or local processes."""
        BACKENDS[self._backend].end_workers()

    def predict(self, data: object, *args: object, **options: object) -> NoReturn:
        """Raise an error: not implemented, as in BigDL 2.x."""
        raise UsageError(
            "predict is not implemented for MXNet; save the weights and load them",
            code="unsupported",
            method="predict",
        )

    def evaluate(self, data: object, *args: object, **options: object) -> NoReturn:
        """Raise an error: not implemented, as in BigDL 2.x."""
        raise UsageError(
            "evaluate is not implemented for MXNet; pass validation_data to fit",
            code="unsupported",
            method="evaluate",
        )
