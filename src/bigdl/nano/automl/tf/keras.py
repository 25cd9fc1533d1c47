"""Keras models whose hyper-parameters are searched before training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from bigdl.common.errors import UsageError
from bigdl.common.placeholders import ModelPlaceholder
from bigdl.nano.automl.tf.objective import KerasObjective, Target, compiled
from bigdl.nano.searchable import AutoObject, spaces_in, with_config
from bigdl.nano.searching import Searcher, split_arguments
from bigdl.nano.tf.keras import models
from bigdl.tuning.spaces import Lazy, holds_lazy

if TYPE_CHECKING:
    from typing import SupportsIndex

    from bigdl.common.types import Tensors

__all__ = ["Model", "Searchable", "SearchableClass", "Sequential"]


class _ModelProxy(ModelPlaceholder):
    """Proxy that becomes an instance of a model's class once the model is built."""

    _model: Any = None

    __class__ = property(lambda self: type(self) if self._model is None else type(self._model))


class Searchable(_ModelProxy, Searcher):
    """A Keras model with search spaces that delegates to the real model once the model is built.

    Arguments of layers, of :meth:`compile` and of :meth:`fit` may be spaces of
    :mod:`bigdl.nano.automl.hpo.space`. :meth:`search` tries values for them; :meth:`end_search`
    builds the best model, or :meth:`fit` builds and trains it. From then on the object is an
    instance of the model's class and delegates ``predict``, ``evaluate``, ``save`` and all other
    public attributes to it. BigDL functions that take a Keras model accept this object at any time,
    and build the model if necessary.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.automl.hpo import space
    >>> from bigdl.nano.automl.tf.keras import Searchable, Sequential
    >>> from keras.layers import Dense
    >>> model = Sequential([Dense(1)])
    >>> isinstance(model, Searchable)
    True
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> x, y = np.ones((8, 2)), np.ones((8, 1))
    >>> model.search(n_trials=2, target_metric="loss", x=x, y=y, verbose=0,
    ...              batch_size=space.Categorical(4, 8))
    >>> history = model.fit(x, y, verbose=0)  # with the best batch size
    >>> model.predict(x, verbose=0).shape
    (8, 1)
    """

    def __init__(self, recipe: Callable[[], AutoObject]):
        self._recipe = recipe
        self._compiled_with: dict[str, Any] = {}
        self._fit_spaces: dict[str, Any] = {}
        self._fit_chosen: dict[str, Any] = {}

    def compile(self, *args: object, **kwargs: object) -> None:
        """Record the arguments of ``compile`` for each trial.

        Parameters
        ----------
        *args, **kwargs
            Arguments of ``keras.Model.compile``. Values may be spaces, and an optimizer may be
            lazy.
        """
        bound = inspect.signature(keras.Model.compile).bind(None, *args, **kwargs).arguments
        self._compiled_with = {name: value for name, value in bound.items() if name != "self"}
        self._model = None

    def search(
        self,
        resume: bool = False,
        target_metric: str | None = None,
        n_parallels: int = 1,
        target_metric_mode: str = "last",
        **kwargs: Any,
    ) -> None:
        """Search hyper-parameters with Optuna by training a model per trial.

        Parameters
        ----------
        resume : bool
            Resume the study ``study_name`` of the storage, or without a storage the last search of
            this model. Finished trials are kept; trials interrupted by a killed search run again.
        target_metric : str, optional
            A key of the training's history. Default: the first metric of :meth:`compile`, or the
            loss; with a validation, its validation metric.
        n_parallels : int
            Number of concurrent trials: in processes with a storage, in threads without one.
        target_metric_mode : {"last", "max", "min", "auto"}
            Value to use: that of the last epoch, or the largest or smallest one. ``"auto"`` uses
            the best one for the direction.
        **kwargs
            Arguments of ``fit``, whose values may be spaces. Arguments of the study: ``storage``,
            ``study_name``, ``load_if_exists``, ``direction``, ``sampler`` and ``pruner`` (a name
            from :mod:`bigdl.nano.automl.hpo.backend` or an Optuna object), ``sampler_kwargs``,
            ``pruner_kwargs``. Arguments of its run: ``n_trials``, ``timeout`` (seconds), ``n_jobs``
            (threads), ``catch``, ``tune_callbacks``, ``gc_after_trial``, ``show_progress_bar``;
            ``backend``, which runs trials on ``"spark"`` or ``"ray"``, `n_parallels` at the same
            time, or as many as the cluster can if that is 1.

        Raises
        ------
        UsageError
            If an argument is invalid, or there are no search spaces.

        Examples
        --------
        >>> import keras
        >>> import numpy as np
        >>> from bigdl.nano.automl.hpo import space
        >>> from bigdl.nano.automl.tf.keras import Sequential
        >>> model = Sequential([
        ...     keras.Input((2,)),
        ...     space.AutoObject(keras.layers.Dense, units=space.Categorical(4, 8)),
        ...     keras.layers.Dense(1),
        ... ])
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> x = np.random.rand(32, 2)
        >>> model.search(n_trials=2, sampler="grid", target_metric="loss", verbose=0,
        ...              x=x, y=x.sum(axis=1))
        >>> sorted(trial.params["units"] for trial in model.study.trials)
        [4, 8]
        >>> model.end_search().layers[0].units in (4, 8)  # the best
        True
        """
        of_fit = inspect.signature(models.Model.fit).parameters
        options, fit = split_arguments(kwargs, of_fit.keys() - {"self"})
        target = Target.of(target_metric, target_metric_mode, options, self._compiled_with, fit)
        is_shared = options.get("storage") is not None or options.get("backend") is not None
        if n_parallels > 1 and not is_shared:
            options["n_jobs"], n_parallels = n_parallels, 1
        subject = self._subject(fit)
        directions = {target.name: target.direction}
        self._run(KerasObjective(subject, target), directions, options, resume, n_parallels)
        self._fit_spaces = {name: value for name, value in fit.items() if holds_lazy(value)}
        self._model = None

    def end_search(self, use_trial_id: int = -1) -> keras.Model:
        made = with_config(self._subject(self._fit_spaces), self._trial(use_trial_id).params)
        self._fit_chosen = made["fit"]
        self._model = compiled(made)
        return self._model

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Train the best model, or the model itself if it has no search spaces.

        Parameters
        ----------
        *args, **kwargs
            Arguments of ``keras.Model.fit``. Arguments that were spaces in :meth:`search` default
            to the values of the best trial.

        Returns
        -------
        keras.callbacks.History

        Raises
        ------
        UsageError
            If there are spaces and nothing was searched.
        """
        model = self._resolve()
        bound = inspect.signature(type(model).fit).bind_partial(model, *args, **kwargs)
        arguments = bound.arguments
        arguments.pop("self")
        arguments |= arguments.pop("kwargs", {})
        lazy_names = [name for name, value in arguments.items() if holds_lazy(value)]
        for name in lazy_names:
            if name not in self._fit_chosen:
                raise UsageError(
                    f"fit has search spaces that no search has chosen: {name}; pass it to search, "
                    "or pass a value",
                    code="search-space",
                    argument=name,
                )
            del arguments[name]
        return model.fit(**self._fit_chosen | arguments)

    def to_yaml(self, **kwargs: object) -> str:
        """Raise a UsageError that recommends ``to_json``, since Keras 3 has no YAML."""
        raise UsageError(
            "Keras 3 writes no YAML; use to_json(), which keras.models reads", code="unsupported"
        )

    def save_spec(self, dynamic_batch: bool = True) -> tuple[list, dict] | None:
        """Return the specification of the inputs, as in Keras 2.

        Parameters
        ----------
        dynamic_batch : bool
            True if the batch dimension is dynamic.

        Returns
        -------
        tuple of list and dict, or None
            ``tf.TensorSpec`` of the arguments by position and by name; None for a model whose
            inputs are not known.
        """
        inputs = getattr(self, "inputs", None)
        if not inputs:
            return None

        def spec(tensor: tf.Tensor) -> tf.TensorSpec:
            rows = None if dynamic_batch else tensor.shape[0]
            return tf.TensorSpec((rows, *tensor.shape[1:]), tensor.dtype, name=tensor.name)

        specs = keras.tree.map_structure(spec, inputs)
        single = isinstance(specs, list) and len(specs) == 1
        return ([specs[0] if single else specs], {})

    def __getattr__(self, name: str) -> Any:
        # Python may look up names before `__init__`, e.g. while unpickling.
        made = vars(self).get("_model")
        is_hidden = name.startswith("__" if made is not None else "_")
        if made is not None and not is_hidden:
            return getattr(made, name)
        is_initialized = "_recipe" in vars(self)
        if is_hidden or not is_initialized or not hasattr(keras.Sequential, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._has_spaces():
            raise UsageError(
                f"Model is not actually built yet, so it has no {name}; call search and then "
                "end_search or fit first",
                code="model-unbuilt",
            )
        return getattr(self._resolve(), name)

    def __setattr__(self, name: str, value: object) -> None:
        is_local = name.startswith("_") or self._model is None or hasattr(type(self), name)
        if is_local:
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # Once built, copies and pickles are those of the real model.
        if self._model is None:
            return super().__reduce_ex__(protocol)
        return self._model.__reduce_ex__(protocol)

    def __call__(self, *args: object, **kwargs: object) -> Any:  # outputs of the user's model
        return self._resolve()(*args, **kwargs)

    def _resolve(self) -> keras.Model:
        if self._model is not None:
            return self._model
        if self.study is not None:
            self.end_search()
        elif self._has_spaces():
            raise UsageError(
                "The model has search spaces; call search before fit, or pass values instead",
                code="state",
            )
        else:
            subject = self._subject({})
            self._model = compiled(with_config(subject, {}))
        return self._model

    def _has_spaces(self) -> bool:
        return bool(spaces_in(self._subject({})))

    def _subject(self, fit: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self._recipe(),
            "compile": AutoObject(dict, **self._compiled_with),
            "fit": AutoObject(dict, **fit),
        }


class Sequential(Searchable):
    """A stack of layers whose arguments can be search spaces.

    Parameters
    ----------
    layers : list, optional
        Keras layers or lazy layers.
    name : str, optional

    Examples
    --------
    >>> import keras
    >>> from bigdl.nano.automl.hpo import space
    >>> from bigdl.nano.automl.tf.keras import Sequential
    >>> model = Sequential([keras.Input((4,))])
    >>> model.add(space.AutoObject(keras.layers.Dense, units=space.Categorical(8, 16)))
    >>> model.add(keras.layers.Dense(2, activation="softmax"))
    >>> model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    >>> model.summary()
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: Model is not actually built yet, so it has no summary; ...
    """

    def __init__(self, layers: list[Any] | None = None, name: str | None = None):
        self._stack = list(layers or [])

        def recipe() -> AutoObject:
            layers, cloned = self._stack, _holds_layers(self._stack)
            if holds_lazy(layers):
                layers = [
                    AutoObject(_unbuilt, each) if isinstance(each, keras.layers.Layer) else each
                    for each in layers
                ]
            return AutoObject(_made, "Sequential", layers=layers, name=name, cloned=cloned)

        super().__init__(recipe)

    def add(self, layer: keras.Layer | Lazy) -> None:
        """Add a layer on top of the stack."""
        if not (isinstance(layer, Lazy) or _is_layer(layer)):
            raise UsageError(
                f"layer must be a Keras layer, not {layer!r}",
                code="argument-type",
                argument="layer",
            )
        self._stack.append(layer)
        self._model = None

    def pop(self) -> keras.Layer | Lazy:
        """Remove the last layer and return it."""
        if not self._stack:
            raise UsageError("There are no layers in the model", code="state")
        self._model = None
        return self._stack.pop()


class Model(Searchable):
    """A graph of layers, which can include lazy layers that are created for each trial.

    Parameters
    ----------
    inputs : KerasTensor, or a nested structure of them
        Results of ``Input``.
    outputs : AutoObject or KerasTensor, or a nested structure of them
        Results of layers.
    name : str, optional

    Examples
    --------
    >>> from bigdl.nano.automl import hpo_config
    >>> hpo_config.enable_hpo_tf()
    >>> from bigdl.nano.automl.hpo import space
    >>> from bigdl.nano.tf.keras import Input, Model, layers
    >>> inputs = Input(shape=(4,))
    >>> hidden = layers.Dense(units=space.Int(8, 64), activation="relu")(inputs)
    >>> model = Model(inputs=inputs, outputs=layers.Dense(2)(hidden))
    >>> model.compile(optimizer="adam", loss="mse")  # then model.search(...) and model.fit(...)
    >>> hpo_config.disable_hpo_tf()
    """

    def __init__(
        self, inputs: Tensors | None = None, outputs: Tensors | None = None, name: str | None = None
    ):
        if inputs is None or outputs is None:
            raise UsageError(
                "Model needs inputs and outputs; to search a subclass of keras.Model, decorate it "
                "with @hpo.tfmodel()",
                code="argument-missing",
                argument="inputs",
            )
        cloned = _holds_layers(outputs)
        recipe = AutoObject(
            _made, "Model", inputs=inputs, outputs=outputs, name=name, cloned=cloned
        )
        super().__init__(lambda: recipe)


class SearchableClass(Searchable):
    """An instance of a ``keras.Model`` subclass whose arguments can be search spaces.

    Parameters
    ----------
    cls : type
    *args, **kwargs
        Arguments of the class.

    Examples
    --------
    >>> import keras
    >>> from bigdl.nano.automl.hpo import space
    >>> from bigdl.nano.automl.tf.keras import SearchableClass
    >>> class Scores(keras.Model):
    ...     def __init__(self, classes):
    ...         super().__init__()
    ...         self.layer = keras.layers.Dense(classes)
    >>> model = SearchableClass(Scores, classes=space.Categorical(2, 3))
    >>> model.summary()
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: Model is not actually built yet, so it has no summary; ...
    """

    def __init__(self, cls: type, /, *args: object, **kwargs: object):
        recipe = AutoObject(cls, *args, **kwargs)
        super().__init__(lambda: recipe)


def _is_layer(value: object) -> bool:
    """Return True if a value is a Keras layer or a symbolic tensor."""
    return isinstance(value, (keras.layers.Layer, keras.KerasTensor))


def _holds_layers(value: object) -> bool:
    """Return True if a value holds existing layers, which trials must not share."""
    seen: set[int] = set()

    def holds(part: object) -> bool:
        if id(part) in seen:
            return False
        seen.add(id(part))
        if isinstance(part, AutoObject):
            return any(map(holds, keras.tree.flatten([part.args, part.kwargs])))
        if isinstance(part, keras.KerasTensor):
            history = getattr(part, "_keras_history", None)
            return history is not None and type(history.operation).__name__ != "InputLayer"
        return isinstance(part, keras.layers.Layer)

    return any(map(holds, keras.tree.flatten(value)))


def _unbuilt(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Return the layer if it is built, else a copy, so that trials do not share built layers."""
    return layer if layer.built else type(layer).from_config(layer.get_config())


def _made(name: str, /, *, cloned: bool, **arguments: object) -> keras.Model:
    """Build a Keras model; with `cloned`, return a clone with the same weights."""
    model = getattr(models, name)(**arguments)
    if not cloned:
        return model
    clone = keras.models.clone_model(model)
    if model.built:
        clone.set_weights(model.get_weights())
    return clone
