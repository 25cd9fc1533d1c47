"""The PyTorch Estimator."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import posixpath
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from bigdl.common.errors import UsageError, WorkerLost, require
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.learn.checkpoint import CheckpointDirectory, Snapshot, read_bytes, write_bytes
from bigdl.orca.learn.estimator import BaseEstimator, check_positive
from bigdl.orca.learn.failure import FailurePolicy
from bigdl.orca.learn.progress import ProgressBar, is_interactive
from bigdl.orca.learn.trigger import EveryEpoch, Trigger

__all__ = ["Estimator", "PyTorchEstimator"]

logger = logging.getLogger("bigdl.orca")

_BACKENDS = ("spark",)
_NO_MODEL = "Must provide callable function for model_creator or load a saved model."


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
            A loss instance, ``loss(config)``, or a function of (output, target).
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
        from bigdl.orca.learn.pytorch.parts import ModelParts

        logger.setLevel(log_level)
        if config is not None and not isinstance(config, dict):
            raise UsageError(f"config must be a dict, got {type(config).__name__}")
        parts = ModelParts(model, optimizer, loss, scheduler_creator, dict(config or {}))
        require("torch", "orca")
        parts.check()
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

        Raises
        ------
        UsageError
            If there is none.
        """
        run = CheckpointDirectory.latest_run(checkpoint_dir)
        if run is None:
            raise UsageError(f"Latest checkpoint at {checkpoint_dir} not found.")
        return f"{run.url}/{run.names()[-1]}"


class PyTorchEstimator(BaseEstimator):
    """A PyTorch model with the verbs of scikit-learn; made by :meth:`Estimator.from_torch`."""

    def __init__(
        self,
        parts,
        *,
        metrics=None,
        workers_per_node=1,
        use_tqdm=False,
        model_dir=None,
        log_to_driver=True,
    ):
        from bigdl.orca.learn.metrics import Metric
        from bigdl.orca.sync.torch_distributed import TorchDistributedSync

        if metrics is None:
            metrics = []
        elif not isinstance(metrics, list | tuple):
            metrics = [metrics]
        if metrics:
            Metric.convert_metrics_dict(list(metrics), backend="pytorch")  # refuse now, not later
        self._parts = parts
        self._metrics = list(metrics)
        self._workers_per_node = workers_per_node
        self._use_tqdm = use_tqdm
        self._model_dir = model_dir
        self._log_to_driver = log_to_driver
        self._sync = TorchDistributedSync
        self._snapshot: Snapshot | None = None
        self._run: CheckpointDirectory | None = None
        self._asked_epochs = 0
        self._seed: int | None = None
        self._saved: set[str] = set()

    # -- fit -----------------------------------------------------------------------------------

    def fit(
        self,
        data,
        epochs: int = 1,
        max_steps: int | None = None,
        batch_size: int = 32,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        validation_data=None,
        callbacks: Sequence[Any] | None = None,
        *,
        max_failures: int | FailurePolicy = 3,
        seed: int | None = None,
        resume: str | None = None,
        checkpoint_trigger: Trigger | str | None = None,
    ) -> list:
        """Train the model; another call goes on where this one ended.

        Parameters
        ----------
        data : pyspark.sql.DataFrame
        epochs : int
        max_steps : int, optional
            End after so many optimizer steps of this Estimator, if that comes first.
        batch_size : int
            Rows of a global batch, over all workers together.
        profile : bool
            Add the mean seconds per batch of fetching, forward and backward.
        reduce_results : bool
            False gives, per epoch, a list of the workers' own figures.
        feature_cols, label_cols : str or list of str
            Columns of the model's inputs and targets.
        validation_data : pyspark.sql.DataFrame, optional
            Evaluated after every epoch; of the same columns as `data`.
        callbacks : list of Callback, optional
        max_failures : int or FailurePolicy
            How many losses of workers are answered by going on from the latest checkpoint.
        seed : int, optional
            Seed of weights, shuffling and dropout; kept for later fits. Default: random.
        resume : str, optional
            ``"auto"`` goes on from the newest checkpoint below `model_dir` (and starts afresh
            without one): a program that was killed is just run again. A path of a checkpoint goes
            on from that.
        checkpoint_trigger : Trigger or str, optional
            When to write a checkpoint; default after every epoch.

        Returns
        -------
        list of dict
            Per epoch: ``epoch``, ``batch_count``, ``num_samples``, ``train_loss``,
            ``last_train_loss`` and, with validation, ``val_loss``, ``val_num_samples`` and
            ``val_<metric>`` (a tensor).

        Raises
        ------
        UsageError
            For arguments or rows that cannot work.
        WorkerError
            When the model or another creator raised in a worker.
        WorkerLost
            When workers were lost more often than `max_failures` allows.
        """
        self._need_model()
        settings = self._settings(
            epochs, max_steps, batch_size, profile, callbacks, seed, checkpoint_trigger
        )
        policy = FailurePolicy.of(max_failures)
        feed = self._training_feed(data, validation_data, feature_cols, label_cols)
        settings.feature_cols = feed.feeds["data"].feature_cols
        settings.label_cols = feed.feeds["data"].label_cols
        first_epoch = self._asked_epochs
        done = self._resume(resume, settings)
        settings.epochs = first_epoch + check_positive("epochs", epochs)
        self._seed = settings.seed
        if not done(settings.epochs):
            self._train(feed, settings, policy)
        self._asked_epochs = settings.epochs
        history = [e for e in self._snapshot.manifest["history"] if e["epoch"] > first_epoch]
        return [_entry(e, reduce_results) for e in history]

    def _settings(self, epochs, max_steps, batch_size, profile, callbacks, seed, trigger):
        from bigdl.orca.learn.pytorch.loop import FitSettings

        if max_steps is not None:
            check_positive("max_steps", max_steps)
        if callbacks is not None and not isinstance(callbacks, list | tuple):
            callbacks = [callbacks]
        if seed is not None:
            check_positive("seed", seed, minimum=0)
        elif self._seed is not None:
            seed = self._seed
        else:
            seed = secrets.randbits(31)
        return FitSettings(
            epochs=0,
            batch_size=check_positive("batch_size", batch_size),
            seed=int(seed),
            feature_cols=(),
            label_cols=(),
            shuffle=bool(self._parts.config.get("shuffle", True)),
            drop_last=bool(self._parts.config.get("drop_last", False)),
            max_steps=max_steps,
            trigger=EveryEpoch() if trigger is None else Trigger.convert_trigger(trigger),
            metrics=self._metrics,
            callbacks=list(callbacks or ()),
            profile=profile,
        )

    def _training_feed(self, data, validation_data, feature_cols, label_cols):
        from bigdl.orca.data.feeds.spark_dataframe import FeedGroup

        config = self._parts.config
        if not label_cols:
            raise UsageError(
                "label_cols is required to fit on a Spark DataFrame; pass the names of the target "
                "columns"
            )
        feeds = {"data": as_feed(data, feature_cols, label_cols, config)}
        if validation_data is not None:
            if type(validation_data) is not type(data):
                raise UsageError(
                    "validation_data should have the same type with train data, got "
                    f"{type(validation_data).__name__} and {type(data).__name__}"
                )
            feeds["validation"] = as_feed(validation_data, feature_cols, label_cols, config)
        return FeedGroup(feeds)

    def _resume(self, resume, settings):
        """Take over the checkpoint that `resume` names.

        Returns
        -------
        callable
            ``done(epochs)``: whether the state is already at the end of a fit to `epochs`.
        """
        if resume is not None:
            self._load_checkpoint(resume)
            if self._snapshot is not None:
                settings.seed = self._snapshot.manifest.get("seed", settings.seed)
        if self._model_dir is not None and self._run is None:
            self._run = CheckpointDirectory.create(self._model_dir)
        settings.run_url = None if self._run is None else self._run.url

        def done(epochs):
            if resume is None or self._snapshot is None:
                return False
            return self._snapshot.manifest["epoch"] >= epochs

        return done

    def _load_checkpoint(self, resume):
        if resume == "auto":
            if self._model_dir is None:
                raise UsageError('resume="auto" needs model_dir= in Estimator.from_torch')
            if self._run is not None:
                return  # this Estimator's own state is the newest
            run = CheckpointDirectory.latest_run(self._model_dir)
            found = run.latest() if run is not None else None
            if found is None:
                logger.info("No checkpoint below %s: the training starts afresh", self._model_dir)
                return
            self._run = run
            name, self._snapshot = found
            logger.info("The training goes on from %s/%s", run.url, name)
        elif isinstance(resume, str):
            parent, name = posixpath.split(resume.rstrip("/"))
            self._snapshot = CheckpointDirectory(parent).read(name)
        else:
            raise UsageError(f'resume should be "auto" or the path of a checkpoint, got {resume!r}')

    def _train(self, feed, settings, policy):
        from bigdl.orca.learn.pytorch.loop import FitProgram

        bar = ProgressBar(self._use_tqdm or is_interactive())
        latest = self._snapshot
        final: list[Snapshot] = []

        def on_event(kind, value):
            nonlocal latest
            if kind == "progress":
                bar.update(value)
            elif kind == "message":
                doc, blob = value
                snapshot = Snapshot.unpack(doc, blob)
                if doc["topic"] == "final":
                    final.append(snapshot)
                else:
                    latest = snapshot

        program = FitProgram(self._parts, settings, self._sync)
        try:
            with self._engine().open(program, feed) as job:
                while True:
                    options, state = {}, None
                    if latest is not None:
                        doc, state = latest.pack()
                        options = {"snapshot": doc}
                    try:
                        results = job.attempt(options, state, on_event)
                        break
                    except WorkerLost as error:
                        decision = policy.decide()
                        if not decision.retry:
                            raise WorkerLost(f"{error} ({decision.reason})") from None
                        if self._run is not None:
                            found = self._run.latest()
                            latest = found[1] if found else latest
                        where = "the start" if latest is None else _position(latest)
                        logger.warning("%s; going on from %s (%s)", error, where, decision.reason)
        finally:
            bar.close()
        name = results[0]["checkpoint"]
        self._snapshot = final[-1] if name is None else self._run.read(name)

    # -- evaluate ------------------------------------------------------------------------------

    def evaluate(
        self,
        data,
        batch_size: int = 32,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        callbacks: Sequence[Any] | None = None,
        *,
        max_failures: int | FailurePolicy = 3,
    ) -> dict:
        """Loss and metrics; the same figures for any number of workers.

        Parameters
        ----------
        data : pyspark.sql.DataFrame
        batch_size : int
            Rows of a batch over all workers together.
        num_steps : int, optional
            Batches per worker to look at; default all.
        profile, reduce_results, callbacks
            Accepted for compatibility; the figures are always those of all workers together.
        feature_cols, label_cols : str or list of str
        max_failures : int or FailurePolicy

        Returns
        -------
        dict
            ``num_samples``, ``val_loss`` (with a loss), and each metric under its name as a
            tensor. On a table without rows the figures are nan.
        """
        from bigdl.orca.engine.spark import NoRows
        from bigdl.orca.learn.pytorch.evaluation import EvaluateProgram

        self._need_model()
        check_positive("batch_size", batch_size)
        if num_steps is not None:
            check_positive("num_steps", num_steps)
        if not label_cols:
            raise UsageError("label_cols is required to evaluate on a Spark DataFrame")
        feed = as_feed(data, feature_cols, label_cols, self._parts.config)
        program = EvaluateProgram(
            self._model_parts(),
            self._metrics,
            feed.feature_cols,
            feed.label_cols,
            batch_size,
            num_steps,
            self._sync,
        )
        policy = FailurePolicy.of(max_failures)
        with self._engine().open(program, feed) as job:
            while True:
                try:
                    result = job.attempt(state=self._model_bytes())[0]
                    break
                except NoRows:
                    result = {"num_samples": 0, "val_loss": None}
                    result.update(dict.fromkeys(self._metric_names()))
                    break
                except WorkerLost:
                    if not policy.decide().retry:
                        raise
        return {key: _figure(key, value) for key, value in result.items()}

    def _metric_names(self):
        from bigdl.orca.learn.metrics import Metric

        if not self._metrics:
            return []
        return list(Metric.convert_metrics_dict(self._metrics, backend="pytorch"))

    # -- predict -------------------------------------------------------------------------------

    def predict(
        self,
        data,
        batch_size: int = 32,
        feature_cols: str | Sequence[str] | None = None,
        output_cols: str | Sequence[str] | None = None,
        profile: bool = False,
        callbacks: Sequence[Any] | None = None,
    ):
        """`data` with predictions, lazily: all its columns, rows and their order are kept.

        Parameters
        ----------
        data : pyspark.sql.DataFrame
        batch_size : int
            Rows of one forward pass.
        feature_cols : str or list of str
        output_cols : str or list of str, optional
            Names for the model's outputs, one each; default one column ``prediction``.
        profile, callbacks
            Accepted for compatibility.

        Returns
        -------
        pyspark.sql.DataFrame
            With ``prediction``: float for one number per row (trailing dimensions of size 1 are
            dropped), a dense vector for several, nested arrays for more dimensions.
        """
        from bigdl.orca.cluster.spark import SparkCluster
        from bigdl.orca.learn.pytorch.predict import predict_dataframe

        self._need_model()
        check_positive("batch_size", batch_size)
        if not (type(data).__module__.startswith("pyspark.sql") and hasattr(data, "mapInArrow")):
            raise UsageError(
                f"Only a Spark DataFrame is supported for predict, got {type(data).__name__}"
            )
        feature_cols = [feature_cols] if isinstance(feature_cols, str) else list(feature_cols or ())
        if isinstance(output_cols, str):
            output_cols = [output_cols]
        cluster = SparkCluster.from_active()
        parts, state = self._model_parts(), self._model_bytes()
        if hasattr(parts.model, "forward"):  # an instance carries its weights itself
            parts, state = dataclasses.replace(parts, model=self.get_model()), None
        parts = dataclasses.replace(parts, loss=None)
        inputs = None if self._snapshot is None else self._snapshot.manifest.get("inputs")
        return predict_dataframe(
            data, cluster, parts, state, feature_cols, batch_size, output_cols, inputs
        )

    # -- the model -----------------------------------------------------------------------------

    def get_model(self):
        """The trained model, a copy of its own on the driver.

        Returns
        -------
        torch.nn.Module
        """
        from bigdl.orca.learn.pytorch.state import loads

        self._need_model()
        model = self._parts.build_model()
        state = self._model_bytes()
        if state is not None:
            model.load_state_dict(loads(state))
        return model

    def get_state_dict(self) -> dict:
        """Epoch and the states of model, optimizer and scheduler, as BigDL 2.x gave them."""
        from bigdl.orca.learn.pytorch.state import loads

        files = {} if self._snapshot is None else self._snapshot.files
        state: dict[str, Any] = {
            "epoch": 0 if self._snapshot is None else self._snapshot.manifest["epoch"],
            "models": [self.get_model().state_dict()],
        }
        if "optimizer.pt" in files:
            state["optimizers"] = [loads(files["optimizer.pt"])]
        if "scheduler.pt" in files:
            state["schedulers"] = [loads(files["scheduler.pt"])]
        return state

    def save(self, path: str, entire: bool = False) -> str:
        """Write the model.

        Parameters
        ----------
        path : str
            A file; a local path or fsspec URL.
        entire : bool
            Pickle the whole module instead of its state dict.

        Returns
        -------
        str
            `path`.
        """
        from bigdl.orca.learn.pytorch.state import dumps

        model = self.get_model()
        data = dumps(model if entire else model.state_dict())
        write_bytes(path, data)
        self._saved.add(hashlib.sha256(data).hexdigest())
        return path

    def load(self, path: str, *, trust: bool = False) -> None:
        """Read what :meth:`save` wrote: a state dict, a full state, or an entire module.

        Parameters
        ----------
        path : str
        trust : bool
            An entire module is a pickle, which can run any code: it is read only if this Estimator
            wrote it or with ``trust=True``.

        Raises
        ------
        UsageError
            If the file cannot be read, does not fit the model, or is not trusted.
        """
        import io
        import pickle

        import torch

        from bigdl.orca.learn.pytorch.state import dumps

        data = read_bytes(path)
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if not (trust or hashlib.sha256(data).hexdigest() in self._saved):
                raise UsageError(
                    f"{path!r} holds more than weights (an entire module, perhaps); loading it can "
                    "run any code, so pass trust=True if you know where it comes from"
                ) from error
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        except (RuntimeError, EOFError) as error:
            raise UsageError(f"{path!r} is not a file that torch can load: {error}") from error
        if isinstance(found, torch.nn.Module):
            self._parts = dataclasses.replace(self._parts, model=found)
            found = found.state_dict()
        files = {}
        if isinstance(found, dict) and "models" in found:
            for key, file in (("optimizers", "optimizer.pt"), ("schedulers", "scheduler.pt")):
                if found.get(key):
                    files[file] = dumps(found[key][0])
            epoch, found = int(found.get("epoch", 0)), found["models"][0]
        else:
            epoch = 0
        self._need_model()
        try:
            self._parts.build_model().load_state_dict(found)
        except (RuntimeError, TypeError, AttributeError) as error:
            raise UsageError(f"The weights in {path!r} do not fit the model: {error}") from error
        files["model.pt"] = dumps(found)
        manifest = {"epoch": epoch, "step": 0, "global_step": 0, "history": []}
        self._snapshot = Snapshot(manifest, files)
        self._asked_epochs = epoch

    def save_checkpoint(self, path: str) -> None:
        """Write the full state: model, optimizer, scheduler and epoch."""
        from bigdl.orca.learn.pytorch.state import dumps

        write_bytes(path, dumps(self.get_state_dict()))

    def load_checkpoint(self, path: str) -> None:
        """Read what :meth:`save_checkpoint` wrote."""
        self.load(path)

    def shutdown(self, force: bool = False) -> None:
        """Free what the Estimator holds; frames that it predicted stay valid."""
        self._snapshot = None

    # -- helpers -------------------------------------------------------------------------------

    def _engine(self):
        from bigdl.orca.engine.spark import SparkEngine

        return SparkEngine(
            workers_per_node=self._workers_per_node, log_to_driver=self._log_to_driver
        )

    def _need_model(self):
        if self._parts.model is None:
            raise UsageError(_NO_MODEL)

    def _model_parts(self):
        return dataclasses.replace(self._parts, optimizer=None, scheduler_creator=None)

    def _model_bytes(self) -> bytes | None:
        return None if self._snapshot is None else self._snapshot.files["model.pt"]


def _position(snapshot) -> str:
    manifest = snapshot.manifest
    return f"epoch {manifest['epoch'] + 1}, step {manifest['step']}"


def _entry(entry: dict, reduce_results: bool):
    if not reduce_results:
        return [dict(w, epoch=entry["epoch"]) for w in entry["workers"]]
    return {k: _figure(k, v) for k, v in entry.items() if k != "workers"}


_PLAIN = ("epoch", "profile", "batch_count", "num_samples", "val_num_samples", "val_loss")


def _figure(key, value):
    """Losses and counts as Python numbers, metrics as tensors, as BigDL 2.x gave them."""
    import torch

    if key in _PLAIN or "train_loss" in key:
        return float("nan") if value is None else value
    return torch.tensor(float("nan") if value is None else value)
