"""Components of a Keras Estimator's model, and its snapshots in prediction tasks.

A model is given as a *creator* (a function of ``config``) or as a compiled instance, of which a
copy is shipped. Everything that may refer to Keras is pickled separately, so that a worker can
choose the Keras backend before it unpickles it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.common.placeholders import resolve_placeholder
from bigdl.orca.learn.prediction.classes import ScoreForm, Scores, unknown_scores
from bigdl.runtime.keras_objects import KerasArchive
from bigdl.training.embedding_tables.keras_model import ModelTables, optimizers_cut
from bigdl.training.embedding_tables.placement import NO_ROWS, current_placement, table_placement
from bigdl.training.keras.backends import Packed, backend_of_program, steps_of
from bigdl.training.keras.data import BatchArguments
from bigdl.training.keras.state import put_weights
from bigdl.training.slices import SavedSlices
from bigdl.training.state import isolated_rng

if TYPE_CHECKING:
    import keras

    from bigdl.common.types import Tensors
else:
    keras = LazyModule("keras", "tf")

_NO_MODEL = "Must provide callable function for model_creator or load a saved model."


@dataclass
class KerasParts:
    """Arguments of ``Estimator.from_keras`` that define a model.

    Attributes
    ----------
    creator : callable or None
        ``model_creator(config)``.
    compile_args : callable or None
        ``compile_args_creator(config)``.
    archive : KerasArchive or None
        Copy of a model instance, instead of a creator.
    """

    creator: Callable | None = None
    compile_args: Callable | None = None
    config: dict = field(default_factory=dict)
    archive: KerasArchive | None = None

    def check(self) -> None:
        """Raise an error on the driver for arguments that would fail in a worker."""
        if "batch_size" in self.config:
            raise UsageError(
                "Please do not specify batch_size in config. Input batch_size in the fit/evaluate "
                "function of the estimator instead.",
                code="argument-conflict",
                argument="batch_size",
            )
        if self.creator is not None and (
            not callable(self.creator) or isinstance(self.creator, type)
        ):
            raise UsageError(
                "model_creator must be a function model_creator(config) that returns a Keras "
                f"model, got {type(self.creator).__name__}; pass an instance as model=",
                code="argument-type",
                argument="model_creator",
            )
        if self.compile_args is not None and not callable(self.compile_args):
            raise UsageError(
                "compile_args_creator must be a function of config that returns the arguments of "
                f"model.compile as a dict, got {type(self.compile_args).__name__}",
                code="argument-type",
                argument="compile_args_creator",
            )

    def require_model(self) -> None:
        """Raise an error if there is no model."""
        if self.creator is None and self.archive is None:
            raise UsageError(_NO_MODEL, code="not-fitted")

    def with_instance(self, model: keras.Model, custom_objects: dict | None = None) -> KerasParts:
        """Return a copy with a model instance instead of a creator."""
        model = resolve_placeholder(model)
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"model must be a keras.Model, got {type(model).__module__}."
                f"{type(model).__qualname__}",
                code="model-type",
                argument="model",
            )
        try:
            archive = KerasArchive.of(model, custom_objects)
        except Exception as error:
            raise UsageError(
                f"The model cannot be copied ({error}); pass a function model_creator(config) that "
                "creates it instead",
                code="model-copy",
            ) from error
        return KerasParts(None, self.compile_args, self.config, archive)

    # -- in the process that computes ------------------------------------------------------------

    def build(self, *, training: bool = False) -> keras.Model:
        """Build the model, and compile it if compile arguments are set.

        Raises
        ------
        UsageError
            If `training` is True and the model is not compiled.
        """
        self.require_model()
        if self.archive is not None:
            with contextlib.nullcontext() if current_placement() is None else optimizers_cut():
                model = self.archive.made()
        else:
            creator = cast("Callable", self.creator)
            model = resolve_placeholder(creator(self.config))
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"The model creator must return a keras.Model, got {type(model).__name__}",
                code="model-type",
                argument="model_creator",
            )
        if self.compile_args is not None:
            arguments = self.compile_args(self.config)
            if not isinstance(arguments, dict):
                raise UsageError(
                    "The compile_args_creator must return the arguments of model.compile as a "
                    f"dict, got {type(arguments).__name__}",
                    code="function-result",
                    argument="compile_args_creator",
                )
            model.compile(**arguments)
        if training and not model.compiled:
            raise UsageError(
                "fit and evaluate need a compiled model; call model.compile in the model creator, "
                "or pass compile_args_creator= to Estimator.from_keras",
                code="argument-missing",
                argument="compile_args_creator",
            )
        return model

    def build_on_driver(self, seed: int, *, training: bool = False) -> keras.Model:
        """Build the model on the driver as workers do with this seed.

        The driver's random generators are left unchanged, including that of the module ``random``,
        which seeds the initializers of Keras.
        """
        backend_of_program()
        with isolated_rng(seed):
            return self.build(training=training)


# -- prediction ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class KerasSnapshot:
    """Keras model as broadcast by :class:`~bigdl.orca.inference.shipping.ShippedModel`.

    Attributes
    ----------
    packed : Packed
        The pickled :class:`KerasParts`.
    weights : bytes
    names : sequence of str
        Names of the feature columns.
    config : dict
    threads : int
        Number of threads per task.
    slices : dict or None
        Arguments of :class:`~bigdl.training.slices.SavedSlices`, whose files the tasks read rows of
        sharded embeddings from.
    """

    packed: Packed
    weights: bytes
    names: Sequence[str]
    config: dict
    threads: int
    slices: dict | None = None

    def load_on(self, device: object) -> _LoadedKerasModel:
        """Load the model in this process; Keras chooses the device."""
        (parts,) = self.packed.unpack(self.config, self.threads)
        with table_placement(NO_ROWS if self.slices else None):
            model = parts.build()
        assembly = BatchArguments.of(model, self.names)
        return _LoadedKerasModel(model, assembly, self.weights, self.slices)


class _LoadedKerasModel:
    """Keras model loaded in a task; its outputs keep trailing dimensions of size 1.

    Parameters
    ----------
    model : keras.Model
    assembly : BatchArguments
    weights : bytes
        Weights, loaded at the first batch, from which the model may infer its shapes.
    slices : dict or None
        See :class:`KerasSnapshot`.
    """

    squeezes: ClassVar[bool] = False

    def __init__(
        self,
        model: keras.Model,
        assembly: BatchArguments,
        weights: bytes,
        slices: dict | None = None,
    ):
        self.model, self._assembly, self._weights = model, assembly, weights
        self._slices = slices
        self._steps = steps_of(model)
        self._is_loaded = False
        if model.built:
            self._load()

    @property
    def widths(self) -> list[int]:
        """Known sizes of the last dimension of the model's inputs."""
        inputs = keras.tree.flatten(getattr(self.model, "inputs", None) or [])
        known = [each.shape[-1] for each in inputs if len(each.shape) > 1]
        return list(dict.fromkeys(size for size in known if size))

    def __call__(self, batch: list) -> Tensors:
        """Return the model's outputs for a batch of numpy columns, as arrays."""
        inputs = self._assembly.inputs(batch)
        _check_integer_inputs(self.model, inputs)
        if not self._is_loaded:
            call_on(self.model, inputs)
            self._load()
        return self._steps.predict(inputs)

    def _load(self):
        put_weights(self.model, self._weights)
        if self._slices is not None:
            ModelTables(self.model).read_from(SavedSlices(**self._slices))
        self._is_loaded = True


def _check_integer_inputs(model: keras.Model, inputs: object) -> None:
    """Raise an error for float values that an integer input would truncate or round."""
    try:
        takes = model.inputs or []
    except (AttributeError, ValueError):  # not built yet
        return
    leaves = keras.tree.flatten(inputs)
    if len(takes) != len(leaves):
        return
    for tensor, value in zip(takes, leaves, strict=True):
        if "int" in str(tensor.dtype) and value.dtype.kind == "f":
            # integers from here on are not exact in a float dtype
            largest = 2 ** (np.finfo(value.dtype).nmant + 1)
            lossy = value[(value != np.trunc(value)) | (abs(value) >= largest)]
            if len(lossy):
                raise UsageError(
                    f"The model's input '{tensor.name}' takes {tensor.dtype}, but the data has "
                    f"{lossy.flat[0]} in {value.dtype}; cast the column, or fill missing values",
                    code="data-value",
                    column=tensor.name,
                )


def call_on(model: keras.Model, inputs: object) -> None:
    """Create a model's variables by calling it on the first row of its inputs."""

    def first(value):
        return keras.ops.convert_to_tensor(value[:1])

    model(keras.tree.map_structure(first, inputs))


_EXCLUSIVE = ("categorical_crossentropy", "sparse_categorical_crossentropy")


def keras_scores(model: keras.Model, output: str) -> Scores:
    """Infer from a compiled Keras model's loss whether its outputs are logits or probabilities.

    Parameters
    ----------
    model : keras.Model
    output : str
        Requested form of the predictions, for the error message.

    Raises
    ------
    UsageError
        If the loss does not determine it.
    """
    import keras

    loss = getattr(model, "loss", None)
    if isinstance(loss, list | tuple) and len(loss) == 1:
        (loss,) = loss
    try:
        loss_function = keras.losses.get(loss)
    except (ValueError, TypeError):
        loss_function = None
    settings = loss_function.get_config() if isinstance(loss_function, keras.losses.Loss) else {}
    name = getattr(loss_function, "__name__", settings.get("name"))
    form: ScoreForm = "logits" if settings.get("from_logits") else "probabilities"
    if name in _EXCLUSIVE:
        return Scores(form, True, settings.get("axis", -1))
    if name == "binary_crossentropy":
        return Scores(form, False)
    raise unknown_scores(output, repr(loss) if isinstance(loss, str) else type(loss).__name__)
