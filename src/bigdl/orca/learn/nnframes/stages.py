"""NNEstimator and NNModel: a PyTorch model as a stage of a Spark ML pipeline."""

from __future__ import annotations

import logging
import re
from typing import Any

from pyspark.ml import Estimator, Model
from pyspark.ml.util import MLReadable, MLWritable

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.nnframes.optimizers import IterationDecay, optimizer_of
from bigdl.orca.learn.nnframes.params import ModelParams, TrainingParams
from bigdl.orca.learn.nnframes.preprocessing import ScalarToTensor, as_preprocessing
from bigdl.orca.learn.nnframes.storage import StageReader, StageWriter
from bigdl.orca.learn.nnframes.training import TrainingOptions
from bigdl.training.position import MaxEpoch, MaxIteration

__all__ = ["NNEstimator", "NNModel"]

logger = logging.getLogger("bigdl.orca")

_FOREVER = 1_000_000  # epochs, for a training that a trigger ends
_UNSAVED = {
    "validation": "setValidation",
    "train_summary": "setTrainSummary",
    "validation_summary": "setValidationSummary",
}


class _Storable(MLWritable, MLReadable):
    """A stage that is saved with its pickled model."""

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
    model : torch.nn.Module or callable
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
        import torch

        return self._model if isinstance(self._model, torch.nn.Module) else self._model({})

    def _transform(self, dataset):
        from pyspark.sql import functions as F

        names = self._output_columns()
        frame = self._estimator(dataset).predict(
            dataset,
            batch_size=self.getBatchSize(),
            feature_cols=[self.getFeaturesCol()],
            output_cols=names,
        )
        number = frame.schema[names[-1]].dataType
        if number.typeName() != "float":
            return frame
        return frame.withColumn(names[-1], F.col(_quoted(names[-1])).cast("double"))

    def _output_columns(self) -> list[str]:
        return [self.getPredictionCol()]

    def _head(self, module):
        """The module whose outputs are the columns."""
        return module

    def _estimator(self, dataset):
        """An Estimator for these rows, the same as long as nothing changes."""
        from bigdl.orca.learn.pytorch import Estimator as TorchEstimator

        preprocessing = preprocessing_for(self._preprocessing, dataset, self.getFeaturesCol())
        wanted = (preprocessing, *self._head_key())
        if self._predictor is None or self._predictor[0] != wanted:
            module = self._head(prepared(self.getModel(), preprocessing))
            self._predictor = (wanted, TorchEstimator.from_torch(model=module))
        return self._predictor[1]

    def _head_key(self) -> tuple:
        return ()

    # -- files ---------------------------------------------------------------------------------

    def _files(self) -> dict[str, bytes]:
        from bigdl.training.state import dumps

        model = self.getModel()
        parts = {"preprocessing": self._preprocessing, "model": _with_empty_weights(model, "meta")}
        return {"model.pt": dumps(model.state_dict()), "parts.pkl": _pickled(parts)}

    @classmethod
    def _from_files(cls, files, unpickled):
        from bigdl.training.state import loads

        parts = unpickled(files["parts.pkl"])
        model = _with_empty_weights(parts["model"], "cpu")
        model.load_state_dict(loads(files["model.pt"]))
        return cls(model, parts["preprocessing"])


class NNEstimator(Estimator, TrainingParams, TrainingOptions, _Storable):
    """An Estimator that trains a PyTorch model on the columns of a DataFrame.

    Parameters
    ----------
    model : torch.nn.Module or callable
        A module, of which a copy is trained, or ``model(config)`` that returns one.
    criterion : torch.nn.Module or callable
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
        self._clear_seed()
        self._model = as_module(model)
        self._criterion = as_loss(criterion)
        self._preprocessing = as_preprocessing(feature_preprocessing)
        self._label_preprocessing = as_preprocessing(label_preprocessing)
        self._options: dict[str, Any] = {}
        self.train_stats: list[dict] = []

    def _clear_seed(self):
        # pyspark's default is a hash of the class name, which would make all trainings alike
        self._defaultParamMap.pop(self.seed, None)

    def _fit(self, dataset) -> NNModel:
        import torch

        preprocessing = preprocessing_for(self._preprocessing, dataset, self.getFeaturesCol())
        estimator = self._new_estimator(preprocessing)
        options = self._options
        clip, norm = options.get("clip"), options.get("clip_norm")
        if clip:
            estimator.set_constant_gradient_clipping(*clip)
        if norm:
            estimator.set_l2_norm_gradient_clipping(norm)
        summaries = [options.get("train_summary"), options.get("validation_summary")]
        for summary in filter(None, summaries):
            estimator.set_tensorboard(summary.log_dir, summary.app_name)
            summary._take(estimator)
        arguments: dict[str, Any] = self._goal()
        callbacks = arguments.pop("callbacks", [])
        if self._label_preprocessing is not None:
            from bigdl.orca.learn.nnframes.modules import PreparedLabels

            callbacks.append(PreparedLabels(self._label_preprocessing))
        if self.isDefined(self.seed):
            arguments["seed"] = self.getSeed()
        if (validation := self.getValidation()) is not None:
            arguments["validation_data"] = self._labelled(validation[1])
        if (checkpoint := self.getCheckpoint()) is not None:
            arguments["checkpoint_trigger"] = checkpoint[1]
        try:
            self.train_stats = estimator.fit(
                self._labelled(dataset),
                batch_size=self.getBatchSize(),
                feature_cols=[self.getFeaturesCol()],
                label_cols=[self.getLabelCol()],
                callbacks=callbacks,
                **arguments,
            )
        except WorkerError as error:
            raise self._explained(error) from error
        module = estimator.get_model()
        if preprocessing is not None:
            module = module.model
        assert isinstance(module, torch.nn.Module)
        return self._copyValues(self._new_model(module))

    def _new_estimator(self, preprocessing):
        from bigdl.orca.learn.pytorch import Estimator as TorchEstimator

        method = self.getOptimMethod()
        scheduler, frequency = None, None
        if hasattr(method, "scheduler_creator"):  # a TorchOptim
            scheduler, frequency = method.scheduler_creator, method.step_frequency
            method = method.optimizer
        if self.getLearningRateDecay() and scheduler is None:
            scheduler, frequency = IterationDecay(self.getLearningRateDecay()), "batch"
        validation, checkpoint = self.getValidation(), self.getCheckpoint()
        return TorchEstimator.from_torch(
            model=prepared(self._model, preprocessing),
            optimizer=optimizer_of(method, self.getLearningRate()),
            loss=self._criterion,
            metrics=validation[2] if validation else None,
            workers_per_node=self.getWorkersPerNode(),
            scheduler_creator=scheduler,
            model_dir=checkpoint[0] if checkpoint else None,
            **({} if frequency is None else {"scheduler_step_freq": frequency}),
        )

    def _goal(self) -> dict[str, Any]:
        """How long ``fit`` is to train."""
        trigger = self.getEndWhen()
        if trigger is None:
            return {"epochs": self.getMaxEpoch()}
        if type(trigger) is MaxEpoch:
            return {"epochs": trigger.max_epoch}
        if type(trigger) is MaxIteration:
            return {"max_steps": trigger.max_iteration}
        limit = self.getMaxEpoch() if self.isSet(self.maxEpoch) else _FOREVER
        return {"epochs": limit, "end_trigger": trigger}

    def _labelled(self, dataset):
        """The frame with labels as the loss counts them."""
        return dataset

    def _explained(self, error: WorkerError) -> Exception:
        return error

    def _new_model(self, module) -> NNModel:
        return NNModel(module, self._preprocessing)

    # -- files ---------------------------------------------------------------------------------

    def _files(self) -> dict[str, bytes]:
        options = {k: v for k, v in self._options.items() if k not in _UNSAVED}
        lost = [setter for k, setter in _UNSAVED.items() if self._options.get(k) is not None]
        if lost:
            logger.warning(
                "What was given to %s is not saved with the stage, since it belongs to this "
                "session; give it to the loaded stage again",
                " and ".join(lost),
            )
        parts = {
            "model": self._model,
            "criterion": self._criterion,
            "preprocessing": self._preprocessing,
            "label_preprocessing": self._label_preprocessing,
            "options": options,
        }
        return {"parts.pkl": _pickled(parts)}

    @classmethod
    def _from_files(cls, files, unpickled):
        parts = unpickled(files["parts.pkl"])
        stage = cls(
            parts["model"],
            parts["criterion"],
            parts["preprocessing"],
            parts["label_preprocessing"],
        )
        stage._options = parts["options"]
        return stage


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
    import torch

    from bigdl.orca.learn.nnframes.modules import Prepared, PreparedCreator

    if preprocessing is None:
        return model
    wrap = Prepared if isinstance(model, torch.nn.Module) else PreparedCreator
    return wrap(model, preprocessing)


def preprocessing_for(given: Any, dataset, column: str) -> Any:
    """What becomes of the features of a frame: what the user said, or what their type asks for."""
    fields = {f.name: f.dataType.typeName() for f in dataset.schema.fields}
    if given is None and fields.get(column) in ("float", "double", "decimal"):
        return _ONE
    return given


_ONE = ScalarToTensor()


def _with_empty_weights(module, device: str):
    """A copy of a module in which the tensors of its state dict are empty ones on a device.

    On ``"meta"`` that is the module's code and settings alone.
    """
    import copy

    import torch

    copies: dict = {}
    for tensor in module.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor):  # an extra state can be anything
            empty = torch.empty_like(tensor, device=device, requires_grad=False)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
            copies[id(tensor)] = empty
    return copy.deepcopy(module, copies)


def _pickled(parts) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(parts)
    except Exception as error:
        raise UsageError(
            "The stage cannot be saved, since it refers to something that cannot be pickled "
            f"({error}); create such objects inside a model creator instead"
        ) from error


def _quoted(name: str) -> str:
    return "`" + re.sub("`", "``", name) + "`"
