"""The stages: estimators of Spark ML whose models predict rows, for values and for classes."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import logging
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pyarrow as pa
import torch
from pyspark.ml import Estimator, Model
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql import functions as F
from torch import nn

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.data.xshards.frames import quoted
from bigdl.orca.learn.nnframes.params import (
    ClassifierParams,
    ModelParams,
    TrainingOptions,
    TrainingParams,
    optimizer_of,
)
from bigdl.orca.learn.nnframes.preprocessing import ScalarToTensor, as_preprocessing
from bigdl.orca.learn.optimizers.schedule import Default
from bigdl.orca.learn.prediction.shipping import digest_of
from bigdl.orca.learn.pytorch import Estimator as TorchEstimator
from bigdl.orca.learn.pytorch.callbacks.base import Callback
from bigdl.training.position import MaxEpoch, MaxIteration


class Prepared(nn.Module):
    """A model that takes the features column as it is.

    Parameters
    ----------
    model : nn.Module
    preprocessing : Preprocessing
    """

    def __init__(self, model: nn.Module, preprocessing):
        super().__init__()
        self.model = model
        self.preprocessing = preprocessing

    def forward(self, rows):
        made = self.preprocessing.batch(rows)
        return self.model(*made) if isinstance(made, tuple) else self.model(made)


class PreparedCreator:
    """A creator of :class:`Prepared` from a creator of the model."""

    def __init__(self, creator, preprocessing):
        self.creator, self.preprocessing = creator, preprocessing

    def __call__(self, config):
        model = self.creator(config)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"The model creator must return an nn.Module, it returned {type(model).__name__}"
            )
        return Prepared(model, self.preprocessing)


class PreparedLabels(Callback):
    """Labels go through their preprocessing before the loss and the metrics see them."""

    def __init__(self, preprocessing):
        self.preprocessing = preprocessing

    def before_iter(self, runner):
        if runner.batch is not None:
            *features, target = runner.batch
            runner.batch = [*features, self.preprocessing.batch(target)]


class ClassHead(nn.Module):
    """The class that a classifier's outputs stand for.

    One output is the probability of the second class (or its logit), several are scores.

    Parameters
    ----------
    model : nn.Module
    threshold : float
        Probability above which a single output means the second class.
    logits : bool
        Whether a single output is a logit.
    first : int
        Number of the first class of several.
    raw : bool
        Give the scores of the classes too, before the class.
    """

    def __init__(self, model: nn.Module, threshold: float, logits: bool, first: int, raw: bool):
        super().__init__()
        self.model = model
        self.threshold, self.logits, self.first, self.raw = threshold, logits, first, raw

    def forward(self, *inputs):
        scores = self.model(*inputs)
        if not isinstance(scores, torch.Tensor):
            raise UsageError(
                "A classifier must return one tensor of scores, it returned "
                f"{type(scores).__name__}"
            )
        scores = scores.reshape(len(scores), -1)
        if scores.shape[1] == 1:
            score = scores[:, 0]
            probability = torch.sigmoid(score) if self.logits else score
            chosen = (probability > self.threshold).float()
            scores = torch.stack([-score if self.logits else 1 - score, score], dim=1)
        else:
            chosen = (scores.argmax(dim=1) + self.first).float()
        return (scores, chosen) if self.raw else chosen


_PIECE = 16 << 20
_written: set[str] = set()  # digests of the pickles that this process wrote
_trusts = contextvars.ContextVar("trusts", default=False)


@contextlib.contextmanager
def trusted_loading() -> Iterator[None]:
    """A context in which saved stages load whoever wrote them.

    For ``PipelineModel.load`` and its like, which have no ``trust=``: loading a model that somebody
    saved runs that person's code.
    """
    token = _trusts.set(True)
    try:
        yield
    finally:
        _trusts.reset(token)


class StageWriter(MLWriter):
    """Writes the parameters of a stage as Spark does, and the rest as a pickle in pieces."""

    def __init__(self, stage: Any):
        super().__init__()
        self._stage = stage

    def saveImpl(self, path: str) -> None:
        try:
            data = cloudpickle.dumps(self._stage._saved())
        except Exception as error:
            raise UsageError(
                "The stage cannot be saved, since it refers to something that cannot be pickled "
                f"({error}); create such objects inside a model creator instead"
            ) from error
        DefaultParamsWriter.saveMetadata(self._stage, path, self.sparkSession)
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        table = pa.table({"number": pa.array(range(len(pieces)), pa.int32()), "piece": pieces})
        self.sparkSession.createDataFrame(table).coalesce(1).write.parquet(f"{path}/torch")
        _written.add(digest_of(data))


class StageReader(MLReader):
    """Reads a stage that a :class:`StageWriter` wrote."""

    def __init__(self, cls: Any, trust: bool = False):
        super().__init__()
        self._cls, self._trust = cls, trust

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        expected = f"{self._cls.__module__}.{self._cls.__name__}"
        if metadata["class"] != expected:
            raise UsageError(
                f"{path!r} holds a {metadata['class']}, not a {self._cls.__name__}; load it with "
                "its own class"
            )
        arguments, attributes = self._unpickled(path)
        stage = self._cls(*arguments)
        vars(stage).update(attributes)
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage

    def _unpickled(self, path: str) -> Any:
        """Return what the pickle of the folder holds, if it may be read."""
        rows = self.sparkSession.read.parquet(f"{path}/torch").orderBy("number").collect()
        data = b"".join(row["piece"] for row in rows)
        if not (self._trust or _trusts.get() or digest_of(data) in _written):
            raise UsageError(
                f"{path!r} holds a pickled model, and loading it can run any code; if you know "
                "where it comes from, pass trust=True, or load a pipeline inside "
                "`with trusted_loading():`"
            )
        try:
            return cloudpickle.loads(data)
        except Exception as error:  # whatever the code in it raises
            raise UsageError(f"The model in {path!r} cannot be loaded: {error}") from error


logger = logging.getLogger("bigdl.orca")

_FOREVER = 1_000_000  # epochs, for a training that a trigger ends
_UNSAVED = {
    "validation": "setValidation",
    "train_summary": "setTrainSummary",
    "validation_summary": "setValidationSummary",
}


class _Storable(MLWritable, MLReadable):
    """A stage that is saved with its pickled model."""

    @abstractmethod
    def _saved(self) -> tuple[tuple, dict[str, Any]]:
        """Return the constructor's arguments, and attributes that are set after it."""

    def write(self):
        return StageWriter(self)

    @classmethod
    def read(cls):
        return StageReader(cls)

    @classmethod
    def load(cls, path: str, *, trust: bool = False):
        """Read a saved stage.

        Parameters
        ----------
        path : str
        trust : bool
            The model is Python code in a pickle, which can run anything: it is read only if this
            process wrote it, with ``trust=True``, or inside :func:`trusted_loading`.
        """
        return StageReader(cls, trust).load(path)


class NNModel(Model, ModelParams, _Storable):
    """A Transformer that adds the predictions of a PyTorch model.

    Parameters
    ----------
    model : nn.Module or callable
        A module, or ``model(config)`` that returns one.
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
        What becomes of a row's features; see :mod:`bigdl.orca.learn.nnframes.preprocessing`.
        By default vectors and arrays stay as they are, and a float becomes a row of one.

    Notes
    -----
    ``transform`` is lazy and keeps all rows, their order and columns. The prediction is a double
    for one number per row, a dense vector for several.
    """

    def __init__(self, model: Any, feature_preprocessing: Any = None):
        super().__init__()
        self._setDefault(batchSize=32)
        self._model = as_module(model)
        self._preprocessing = as_preprocessing(feature_preprocessing)
        self._predictor: tuple | None = None  # (what it was made for, an Estimator)

    @property
    def model(self):
        """The PyTorch model."""
        return self._model

    def getModel(self):
        """The PyTorch model, as a module."""
        return self._model if isinstance(self._model, nn.Module) else self._model({})

    def _transform(self, dataset):
        names = self._output_columns()
        frame = self._estimator(dataset).predict(
            dataset,
            batch_size=self.getOrDefault("batchSize"),
            feature_cols=[self.getFeaturesCol()],
            output_cols=names,
        )
        number = frame.schema[names[-1]].dataType
        if number.typeName() != "float":
            return frame
        return frame.withColumn(names[-1], F.col(quoted(names[-1])).cast("double"))

    def _output_columns(self) -> list[str]:
        return [self.getPredictionCol()]

    def _head(self, module):
        """The module whose outputs are the columns."""
        return module

    def _estimator(self, dataset):
        """An Estimator for these rows, the same as long as nothing changes."""
        preprocessing = preprocessing_for(self._preprocessing, dataset, self.getFeaturesCol())
        wanted = (preprocessing, *self._head_key())
        if self._predictor is None or self._predictor[0] != wanted:
            module = self._head(prepared(self.getModel(), preprocessing))
            self._predictor = (wanted, TorchEstimator.from_torch(model=module))
        return self._predictor[1]

    def _head_key(self) -> tuple:
        return ()

    def _saved(self):
        module = copy.deepcopy(self.getModel()).cpu()  # where it is read there may be no GPU
        return (module, self._preprocessing), {}


class NNEstimator(Estimator, TrainingParams, TrainingOptions, _Storable):
    """An Estimator that trains a PyTorch model on the columns of a DataFrame.

    Parameters
    ----------
    model : nn.Module or callable
        A module, of which a copy is trained, or ``model(config)`` that returns one.
    criterion : nn.Module or callable
        A loss, as in ``Estimator.from_torch``.
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
        What becomes of a row's features; see :mod:`bigdl.orca.learn.nnframes.preprocessing`.
        By default vectors and arrays stay as they are, and a float becomes a row of one.
    label_preprocessing : Preprocessing, callable or list of int, optional
        The same for the label; by default it takes the shape that the loss needs.
    """

    def __init__(
        self,
        model: Any,
        criterion: Any,
        feature_preprocessing: Any = None,
        label_preprocessing: Any = None,
    ):
        super().__init__()
        self._setDefault(
            batchSize=1,
            maxEpoch=50,
            learningRate=1e-3,
            learningRateDecay=0.0,
            workersPerNode=1,
            cachingSample=True,
            dataCacheLevel=["DRAM", None],
        )
        # pyspark's default is a hash of the class name, which would make all trainings alike
        self._defaultParamMap.pop(self.seed, None)
        self._model = as_module(model)
        self._criterion = as_loss(criterion)
        self._preprocessing = as_preprocessing(feature_preprocessing)
        self._label_preprocessing = as_preprocessing(label_preprocessing)
        self._options: dict[str, Any] = {}
        self.train_stats: list[dict] = []

    def _fit(self, dataset) -> NNModel:
        preprocessing = preprocessing_for(self._preprocessing, dataset, self.getFeaturesCol())
        estimator = self._new_estimator(preprocessing)
        options = self._options
        if clip := options.get("clip"):
            estimator.set_constant_gradient_clipping(*clip)
        if norm := options.get("clip_norm"):
            estimator.set_l2_norm_gradient_clipping(norm)
        for summary in filter(None, (self.getTrainSummary(), self.getValidationSummary())):
            estimator.set_tensorboard(summary.log_dir, summary.app_name)
            summary._estimator = estimator
        validation, checkpoint = self.getValidation(), self.getCheckpoint()
        labels = self._label_preprocessing
        try:
            self.train_stats = estimator.fit(
                self._labelled(dataset),
                batch_size=self.getOrDefault("batchSize"),
                feature_cols=[self.getFeaturesCol()],
                label_cols=[self.getLabelCol()],
                validation_data=validation and self._labelled(validation[1]),
                callbacks=labels and [PreparedLabels(labels)],
                seed=self.getSeed() if self.isDefined(self.seed) else None,
                checkpoint_trigger=checkpoint and checkpoint[1],
                **self._goal(),
            )
        except WorkerError as error:
            raise self._explained(error) from error
        module = estimator.get_model()
        if preprocessing is not None:
            module = module.model
        assert isinstance(module, nn.Module)
        return self._copyValues(self._new_model(module))

    def _new_estimator(self, preprocessing):
        method = self.getOptimMethod()
        scheduler, frequency = None, None
        if hasattr(method, "scheduler_creator"):  # a TorchOptim
            scheduler, frequency = method.scheduler_creator, method.step_frequency
            method = method.optimizer
        decay = self.getOrDefault("learningRateDecay")
        if decay and scheduler is None:
            scheduler = Default(decay)
        validation, checkpoint = self.getValidation(), self.getCheckpoint()
        return TorchEstimator.from_torch(
            model=prepared(self._model, preprocessing),
            optimizer=optimizer_of(method, self.getOrDefault("learningRate")),
            loss=self._criterion,
            metrics=validation and validation[2],
            workers_per_node=self.getOrDefault("workersPerNode"),
            scheduler_creator=scheduler,
            model_dir=checkpoint and checkpoint[0],
            scheduler_step_freq=frequency,
        )

    def _goal(self) -> dict[str, Any]:
        """How long ``fit`` is to train."""
        trigger = self.getEndWhen()
        if trigger is None:
            return {"epochs": self.getOrDefault("maxEpoch")}
        if type(trigger) is MaxEpoch:
            return {"epochs": trigger.max_epoch}
        if type(trigger) is MaxIteration:
            return {"max_steps": trigger.max_iteration}
        limit = self.getOrDefault("maxEpoch") if self.isSet("maxEpoch") else _FOREVER
        return {"epochs": limit, "end_trigger": trigger}

    def _labelled(self, dataset):
        """The frame with labels as the loss counts them."""
        return dataset

    def _explained(self, error: WorkerError) -> Exception:
        return error

    def _new_model(self, module) -> NNModel:
        return NNModel(module, self._preprocessing)

    def _saved(self):
        options = {k: v for k, v in self._options.items() if k not in _UNSAVED}
        left_out = [setter for k, setter in _UNSAVED.items() if self._options.get(k) is not None]
        if left_out:
            logger.warning(
                "What was given to %s is not saved with the stage, since it belongs to this "
                "session; give it to the loaded stage again",
                " and ".join(left_out),
            )
        return (self._model, self._criterion, self._preprocessing), {
            "_label_preprocessing": self._label_preprocessing,
            "_options": options,
        }


def as_module(model: Any) -> Any:
    """A module or its creator, also out of a ``TorchModel``."""
    model = model.to_pytorch() if hasattr(model, "to_pytorch") else model
    if isinstance(model, type) or not callable(model):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise UsageError(
            "model must be an nn.Module or a function model(config) that returns one, got "
            f"{'the class ' if isinstance(model, type) else ''}{name}"
        )
    return model


def as_loss(criterion: Any) -> Any:
    """A loss, also out of a ``TorchLoss``."""
    criterion = criterion.to_pytorch() if hasattr(criterion, "to_pytorch") else criterion
    if isinstance(criterion, type) or not callable(criterion):
        raise UsageError(f"criterion must be a loss such as torch.nn.MSELoss(), got {criterion!r}")
    return criterion


def prepared(model: Any, preprocessing: Any) -> Any:
    """A model, or its creator, behind a preprocessing of its inputs."""
    if preprocessing is None:
        return model
    wrap = Prepared if isinstance(model, nn.Module) else PreparedCreator
    return wrap(model, preprocessing)


def preprocessing_for(given: Any, dataset, column: str) -> Any:
    """What becomes of the features of a frame: what the user said, or what their type asks for."""
    fields = {f.name: f.dataType.typeName() for f in dataset.schema.fields}
    if given is None and fields.get(column) in ("float", "double", "decimal"):
        return _ONE
    return given


_ONE = ScalarToTensor()


class NNClassifierModel(NNModel, ClassifierParams):
    """A Transformer that adds the class that a PyTorch model chooses, as a double.

    A model of one output gives the probability of class 1 and is compared to ``threshold``; of
    several outputs the greatest one is the class, counted from 0 (or from 1, see
    :meth:`setZeroBasedLabel`).

    Parameters
    ----------
    model : nn.Module or callable
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
    logits : bool
        Whether a single output is a logit, as ``BCEWithLogitsLoss`` trains it, rather than a
        probability.
    """

    def __init__(self, model: Any, feature_preprocessing: Any = None, *, logits: bool = False):
        super().__init__(model, feature_preprocessing)
        self._setDefault(threshold=0.5, zeroBasedLabel=True)
        self._logits = logits

    def _output_columns(self):
        raw = self.getRawPredictionCol()
        return [*([raw] if raw else []), self.getPredictionCol()]

    def _head_key(self):
        first = 0 if self.getOrDefault("zeroBasedLabel") else 1
        return self.getThreshold(), self._logits, first, bool(self.getRawPredictionCol())

    def _head(self, module):
        return ClassHead(module, *self._head_key())

    def _saved(self):
        arguments, _ = super()._saved()
        return arguments, {"_logits": self._logits}


class NNClassifier(NNEstimator, ClassifierParams):
    """An Estimator that trains a PyTorch model to choose a class.

    Labels are numbers from 0 to k - 1, as Spark ML's StringIndexer makes them; programs for BigDL
    2.x whose labels start at 1 call ``setZeroBasedLabel(False)``.

    Parameters
    ----------
    model : nn.Module or callable
    criterion : nn.Module or callable
        ``CrossEntropyLoss`` or ``NLLLoss`` for a model of k outputs, ``BCELoss`` or
        ``BCEWithLogitsLoss`` for one output.
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
    zero_based_label : bool
        Whether the first of several classes is 0 or 1.
    """

    def __init__(
        self,
        model: Any,
        criterion: Any,
        feature_preprocessing: Any = None,
        *,
        zero_based_label: bool = True,
    ):
        super().__init__(model, criterion, feature_preprocessing)
        self._setDefault(threshold=0.5, zeroBasedLabel=True)
        if not zero_based_label:
            self._set(zeroBasedLabel=False)

    def _labelled(self, dataset):
        name = self.getLabelCol()
        if self.getOrDefault("zeroBasedLabel") or name not in dataset.columns or self._is_binary:
            return dataset
        return dataset.withColumn(name, F.col(quoted(name)) - 1)

    @property
    def _is_binary(self) -> bool:
        """Whether the loss takes one output, whose classes are 0 and 1 in any counting."""
        return isinstance(self._criterion, nn.BCELoss | nn.BCEWithLogitsLoss)

    def _explained(self, error: WorkerError) -> Exception:
        if "out of bounds" not in error.traceback or "Target" not in error.traceback:
            return error
        first = 0 if self.getOrDefault("zeroBasedLabel") else 1
        advice = "if they start at 1, call setZeroBasedLabel(False)"
        if first:
            advice = "if they start at 0, call setZeroBasedLabel(True)"
        return UsageError(
            f"A label in column '{self.getLabelCol()}' is no class of the model, which counts "
            f"them from {first} to its number of outputs{' - 1' if not first else ''}; {advice}"
        )

    def _new_model(self, module):
        logits = isinstance(self._criterion, nn.BCEWithLogitsLoss)
        return NNClassifierModel(module, self._preprocessing, logits=logits)
