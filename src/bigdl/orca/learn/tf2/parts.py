"""What the user hands to the Estimator, checked on the driver and built in the worker.

A model comes as a *creator* (a function of ``config``) or as a compiled instance, of which a copy
travels.  Everything that may refer to Keras travels inside a pickle of its own, so that a worker
can choose the backend before it unpacks it.
"""

from __future__ import annotations

import inspect
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.common.stand_ins import actual
from bigdl.orca.learn.tf2.runtime import backend_of_program, use_backend
from bigdl.training.state import isolated_rng

__all__ = ["KerasParts", "Packed", "fit_divisor"]

_NO_MODEL = "Must provide callable function for model_creator or load a saved model."


@dataclass(frozen=True)
class Packed:
    """Objects on their way to a process where Keras may not have been imported.

    Attributes
    ----------
    backend : str
        Of Keras, in the driver.
    payload : bytes
    """

    backend: str
    payload: bytes

    @classmethod
    def of(cls, *objects) -> Packed:
        """Pickle objects by value, so that lambdas and classes of a notebook work."""
        import cloudpickle

        try:
            return cls(backend_of_program(), cloudpickle.dumps(objects))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                "The model or a callback cannot be shipped to the workers, since it refers to "
                f"something that cannot be pickled ({error}); create such objects inside the model "
                "creator instead"
            ) from error

    def unpack(self, config: dict | None = None, threads: int | None = None) -> tuple:
        """The objects, in a process that computes with the same backend."""
        import cloudpickle

        use_backend(self.backend, config, threads)
        return cloudpickle.loads(self.payload)


@dataclass
class KerasParts:
    """The arguments of ``Estimator.from_keras`` that make up a model.

    Attributes
    ----------
    creator : callable or None
        ``model_creator(config)``.
    compile_args : callable or None
        ``compile_args_creator(config)``.
    archive : bytes or None
        A copy of an instance instead of a creator.
    custom_objects : dict
        Classes and functions of the user's that the archive refers to.
    """

    creator: Callable | None = None
    compile_args: Callable | None = None
    config: dict = field(default_factory=dict)
    archive: bytes | None = None
    custom_objects: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse on the driver what cannot work in a worker."""
        if "batch_size" in self.config:
            raise UsageError(
                "Please do not specify batch_size in config. Input batch_size in the fit/evaluate "
                "function of the estimator instead."
            )
        if self.creator is not None and (
            not callable(self.creator) or isinstance(self.creator, type)
        ):
            raise UsageError(
                "model_creator must be a function model_creator(config) that returns a Keras "
                f"model, got {type(self.creator).__name__}; pass an instance as model="
            )
        if self.compile_args is not None and not callable(self.compile_args):
            raise UsageError(
                "compile_args_creator must be a function of config that returns the arguments of "
                f"model.compile as a dict, got {type(self.compile_args).__name__}"
            )

    @property
    def is_known(self) -> bool:
        """Whether there is a model."""
        return self.creator is not None or self.archive is not None

    def need(self) -> None:
        """Refuse to go on without a model."""
        if not self.is_known:
            raise UsageError(_NO_MODEL)

    def with_instance(self, model, custom_objects: dict | None = None) -> KerasParts:
        """The same with a copy of a model instead of a creator."""
        import keras

        model = actual(model)
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"model must be a keras.Model, got {type(model).__module__}."
                f"{type(model).__qualname__}"
            )
        own = {**_custom_objects(model), **(custom_objects or {})}
        try:
            archive = pickle.dumps(model)
        except Exception as error:
            raise UsageError(
                f"The model cannot be copied ({error}); pass a function model_creator(config) that "
                "makes it instead"
            ) from error
        return KerasParts(None, self.compile_args, self.config, archive, own)

    # -- in the process that computes ------------------------------------------------------------

    def build(self, *, training: bool = False):
        """The model, compiled unless it is for prediction alone.

        Raises
        ------
        UsageError
            For training without an optimizer and a loss.
        """
        import keras

        self.need()
        if self.archive is not None:
            with (
                keras.saving.custom_object_scope(self.custom_objects),
                warnings.catch_warnings(),
            ):
                # of a model that has not been trained yet
                warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
                model = pickle.loads(self.archive)
        else:
            model = actual(self.creator(self.config))
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"The model creator must return a keras.Model, it returned {type(model).__name__}"
            )
        if self.compile_args is not None:
            arguments = self.compile_args(self.config)
            if not isinstance(arguments, dict):
                raise UsageError(
                    "The compile_args_creator must return the arguments of model.compile as a "
                    f"dict, it returned {type(arguments).__name__}"
                )
            model.compile(**arguments)
        if training and not model.compiled:
            raise UsageError(
                "fit and evaluate need a compiled model; call model.compile in the model creator, "
                "or pass compile_args_creator= to Estimator.from_keras"
            )
        return model

    def build_on_driver(self, seed: int, *, training: bool = False):
        """The model as workers build it under this seed; the driver's generators stay as they are.

        Keras takes the seeds of its initializers from the module random.
        """
        backend_of_program()
        state = random.getstate()
        with isolated_rng(seed):
            model = self.build(training=training)
        random.setstate(state)
        return model


def fit_divisor(model) -> str:
    """What the loss of a batch is divided by: ``"rows"``, ``"weights"`` or, for sums, ``"none"``.

    Raises
    ------
    UsageError
        For losses that are divided by different things, or left undivided in rows.
    """
    import keras

    found = set()
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction == "none" or reduction is None:
            raise UsageError(
                "A loss has reduction='none'; training needs one number, use "
                "'sum_over_batch_size' or 'sum'"
            )
        found.add({"sum": "none", "mean_with_sample_weight": "weights"}.get(reduction, "rows"))
    if len(found) > 1:
        raise UsageError(
            "The losses of the outputs have different reductions, which workers cannot weight "
            "exactly; give all of them the same"
        )
    return found.pop() if found else "rows"


def _custom_objects(model) -> dict[str, Any]:
    """What is not part of Keras and named in the archive of a model."""
    import keras

    found = dict(keras.saving.get_custom_objects())
    seen: set[int] = set()

    def visit(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict | list | tuple):
            for each in value.values() if isinstance(value, dict) else value:
                visit(each)
        elif _is_named(value):
            thing = value if inspect.isfunction(value) else type(value)
            if not thing.__module__.startswith("keras."):
                found.setdefault(thing.__name__, thing)
            if not inspect.isfunction(value):
                visit([each for each in vars(value).values() if _may_hold(each)])
                visit(getattr(value, "layers", None))

    visit(model)
    if model.compiled:
        visit([model.optimizer, model.loss, model._compile_config.config])
    return found


def _is_named(value) -> bool:
    """Whether an archive refers to a value by a name."""
    return inspect.isfunction(value) or hasattr(type(value), "get_config")


def _may_hold(value) -> bool:
    return isinstance(value, dict | list | tuple) or _is_named(value)
