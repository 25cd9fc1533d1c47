"""The model of an Estimator: what it is made of, what is trained so far, and its copies in tasks.

A model comes as a *creator* (a function of ``config``) or as a compiled instance, of which a copy
is shipped.  Everything that may refer to Keras is inside a pickle of its own, so that a worker can
choose the backend before it unpacks it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.common.placeholders import resolve_placeholder
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
else:
    keras = LazyModule("keras", "tf")

_NO_MODEL = "Must provide callable function for model_creator or load a saved model."


@dataclass
class KerasParts:
    """The arguments of ``Estimator.from_keras`` that make up a model.

    Attributes
    ----------
    creator : callable or None
        ``model_creator(config)``.
    compile_args : callable or None
        ``compile_args_creator(config)``.
    archive : KerasArchive or None
        A copy of an instance instead of a creator.
    """

    creator: Callable | None = None
    compile_args: Callable | None = None
    config: dict = field(default_factory=dict)
    archive: KerasArchive | None = None

    def check(self) -> None:
        """Refuse on the driver what cannot work in a worker."""
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

    def need(self) -> None:
        """Refuse to go on without a model."""
        if self.creator is None and self.archive is None:
            raise UsageError(_NO_MODEL, code="not-fitted")

    def with_instance(self, model: keras.Model, custom_objects: dict | None = None) -> KerasParts:
        """Return the same with a copy of a model instead of a creator."""
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
                "makes it instead",
                code="model-copy",
            ) from error
        return KerasParts(None, self.compile_args, self.config, archive)

    # -- in the process that computes ------------------------------------------------------------

    def build(self, *, training: bool = False) -> keras.Model:
        """Return the model, compiled unless it is for prediction alone.

        Raises
        ------
        UsageError
            For training without an optimizer and a loss.
        """
        self.need()
        if self.archive is not None:
            with contextlib.nullcontext() if current_placement() is None else optimizers_cut():
                model = self.archive.made()
        else:
            creator = cast("Callable", self.creator)
            model = resolve_placeholder(creator(self.config))
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"The model creator must return a keras.Model, it returned {type(model).__name__}",
                code="model-type",
                argument="model_creator",
            )
        if self.compile_args is not None:
            arguments = self.compile_args(self.config)
            if not isinstance(arguments, dict):
                raise UsageError(
                    "The compile_args_creator must return the arguments of model.compile as a "
                    f"dict, it returned {type(arguments).__name__}",
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
        """Return the model as workers build it under this seed.

        Random generators of the driver stay as they are: also that of the module random, from
        which Keras takes the seeds of its initializers.
        """
        backend_of_program()
        with isolated_rng(seed):
            return self.build(training=training)


# -- prediction ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class KerasSnapshot:
    """A Keras model as :class:`~bigdl.orca.inference.shipping.ShippedModel` broadcasts it.

    Attributes
    ----------
    packed : Packed
        The parts of the model.
    weights : bytes
    names : sequence of str
        Of the feature columns.
    config : dict
    threads : int
        Of each task.
    slices : dict or None
        Of :class:`~bigdl.training.slices.SavedSlices`, from whose files the tasks read the rows of
        sharded embeddings.
    """

    packed: Packed
    weights: bytes
    names: Sequence[str]
    config: dict
    threads: int
    slices: dict | None = None

    def load_on(self, device: Any) -> _LoadedKerasModel:
        """Return the model, in a process; Keras chooses the device itself."""
        (parts,) = self.packed.unpack(self.config, self.threads)
        with table_placement(NO_ROWS if self.slices else None):
            model = parts.build()
        assembly = BatchArguments.of(model, self.names)
        return _LoadedKerasModel(model, assembly, self.weights, self.slices)


class _LoadedKerasModel:
    """A model in a task; its outputs keep the shapes that Keras gives them.

    Parameters
    ----------
    model : keras.Model
    assembly : BatchArguments
    weights : bytes
        Loaded before the first batch, which may tell the model its shapes.
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
        """Sizes of the last dimension of the model's inputs, where it tells them."""
        inputs = keras.tree.flatten(getattr(self.model, "inputs", None) or [])
        known = [each.shape[-1] for each in inputs if len(each.shape) > 1]
        return list(dict.fromkeys(size for size in known if size))

    def __call__(self, batch: list) -> Any:
        """Return what the model returns for a batch of numpy columns, as arrays."""
        inputs = self._assembly.inputs(batch)
        _check_whole(self.model, inputs)
        if not self._is_loaded:
            call_on(self.model, inputs)
            self._load()
        return self._steps.predict(inputs)

    def _load(self):
        put_weights(self.model, self._weights)
        if self._slices is not None:
            ModelTables(self.model).read_from(SavedSlices(**self._slices))
        self._is_loaded = True


def _check_whole(model: keras.Model, inputs: Any) -> None:
    """Refuse floats for an input of whole numbers that Keras would cut off, or that are rounded."""
    try:
        takes = model.inputs or []
    except (AttributeError, ValueError):  # not built yet
        return
    leaves = keras.tree.flatten(inputs)
    if len(takes) != len(leaves):
        return
    for place, value in zip(takes, leaves, strict=True):
        if "int" in str(place.dtype) and value.dtype.kind == "f":
            # from there on float32 does not tell whole numbers apart
            largest = 2 ** (np.finfo(value.dtype).nmant + 1)
            lossy = value[(value != np.trunc(value)) | (abs(value) >= largest)]
            if len(lossy):
                raise UsageError(
                    f"The model's input '{place.name}' takes {place.dtype}, but the data holds "
                    f"{lossy.flat[0]} in {value.dtype} for it; cast the column, or fill what is "
                    "missing",
                    code="data-value",
                    column=place.name,
                )


def call_on(model: keras.Model, inputs: Any) -> None:
    """Let a model make its variables by calling it on the first row of its inputs."""

    def first(value):
        return keras.ops.convert_to_tensor(value[:1])

    model(keras.tree.map_structure(first, inputs))
