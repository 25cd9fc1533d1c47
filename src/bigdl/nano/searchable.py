"""Deferred calls, executed once a search has chosen their arguments, and their decorators.

A class decorated with ``@hpo.obj()`` stays the same class. Constructed with a search space among
its arguments, it returns an :class:`AutoObject`, from which each trial makes an object.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.tuning.spaces import (
    Assignment,
    Domain,
    Lazy,
    Naming,
    holds_lazy,
    random_parameters,
    resolve,
    visit,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

SPLITTER = "▁"
"""Separator in parameter names between a nested space and its component."""

_PLAIN = object()


def spaces_in(value: object) -> dict[str, Domain]:
    """Return the search spaces inside a value, which may be nested, by parameter name."""
    return Naming(value, SPLITTER).domains


def suggested(value: object, trial: Trial) -> Any:  # the value without search spaces
    """Replace the search spaces in a value with the suggestions of an Optuna trial."""
    return resolve(value, Assignment(Naming(value, SPLITTER), trial))


def with_config(value: object, config: Mapping[str, Any]) -> Any:  # the value without search spaces
    """Replace the search spaces in a value with `config`, or with their defaults.

    Raises
    ------
    UsageError
        If a name in `config` is no search space.
    """
    naming = Naming(value, SPLITTER)
    unknown = sorted(set(config) - set(naming.domains))
    if unknown:
        raise UsageError(
            f"There is no search space called {', '.join(map(repr, unknown))}; the search spaces "
            f"are {', '.join(map(repr, naming.domains)) or 'none'}",
            code="search-space",
            argument=unknown[0],
            allowed=list(naming.domains),
        )
    spaces: dict[str, Any] = naming.domains
    defaults = {name: space.default_parameter for name, space in spaces.items()}
    return resolve(value, Assignment(naming, {**defaults, **config}))


class SearchableValue(Lazy):
    """Base class of lazy objects whose spaces, defaults and samples a user can inspect."""

    @property
    def kwspaces(self) -> dict[str, Domain]:
        """The simple spaces in this object, by parameter name."""
        return spaces_in(self)

    @property
    def cs(self) -> dict[str, BaseDistribution] | BaseDistribution:
        """Optuna distributions by parameter name; a simple space has a single distribution."""
        return {name: space.distribution for name, space in self.kwspaces.items()}

    @property
    def default(self) -> Any:  # what the user's call returns
        """The value with the defaults of all spaces."""
        return self.sample()

    @property
    def rand(self) -> Any:  # what the user's call returns
        """The value with a random choice for each space, drawn with Python's ``random``."""
        distributions = {name: space.distribution for name, space in self.kwspaces.items()}
        rng = np.random.default_rng(random.getrandbits(64))
        return with_config(self, random_parameters(distributions, rng))

    def sample(self, **config: Any) -> Any:  # what the user's call returns
        """Return the value with the given parameters, and with the defaults of all others.

        Parameters
        ----------
        **config
            Values of the parameters in :attr:`kwspaces`. Other parameters have their defaults.
        """
        return with_config(self, config)


class AutoObject(SearchableValue):
    """Deferred call of a class or function, executed once its search spaces have values.

    Parameters
    ----------
    target : callable
        A class or a function.
    *args, **kwargs
        Values, spaces, or containers and objects that hold spaces.

    Examples
    --------
    >>> from collections import Counter
    >>> from bigdl.nano.automl.hpo import space
    >>> counter = space.AutoObject(Counter, apples=space.Int(1, 5), pears=3)
    >>> counter.kwspaces
    {'apples': Int(1, 5)}
    >>> counter.sample(apples=4)
    Counter({'apples': 4, 'pears': 3})
    """

    def __init__(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any):
        self.target = target
        self.args = args
        self.kwargs = kwargs

    def visit(self, naming: Naming, name: str) -> None:
        if not naming.is_new(self):
            return
        # Parameters are named by the object's arguments, independent of where it is nested.
        for argument, value in _named(self.target, self.args, self.kwargs).items():
            visit(value, naming, argument)

    def resolve(self, assignment: Assignment) -> Any:  # what `target` returns
        def built() -> object:
            args, kwargs = resolve([list(self.args), self.kwargs], assignment)
            return self.target(*args, **kwargs)

        return assignment.once(self, built)

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.kwargs.items()]
        name = getattr(self.target, "__name__", repr(self.target))
        return f"{name}({', '.join([*map(repr, self.args), *named])})"


def called(target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # or an AutoObject
    """Call `target`, or return an :class:`AutoObject` if an argument contains search spaces."""
    if holds_lazy([args, kwargs]):
        return AutoObject(target, *args, **kwargs)
    return target(*args, **kwargs)


def obj(**defaults: Any) -> Callable[[type], type]:
    """Decorate a class so that its arguments can be search spaces.

    Parameters
    ----------
    **defaults
        Default arguments: values or spaces.

    Returns
    -------
    callable
        Decorator that returns the class. Constructed with spaces, the class returns an
        :class:`AutoObject`.

    Examples
    --------
    >>> import bigdl.nano.automl.hpo as hpo
    >>> from bigdl.nano.automl.hpo import space
    >>> @hpo.obj()
    ... class Optimizer:
    ...     def __init__(self, rate, momentum=0.9):
    ...         self.rate, self.momentum = rate, momentum
    >>> lazy = Optimizer(rate=space.Real(0.001, 0.1, log=True))
    >>> lazy.sample(rate=0.01).rate
    0.01
    >>> Optimizer(0.5).rate  # without a space, an ordinary object
    0.5
    """
    return class_decorator(
        "hpo.obj decorates a class (hpo.func a function)", object, defaults, AutoObject
    )


def func(**defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function so that its arguments can be search spaces.

    Parameters
    ----------
    **defaults
        Default arguments: values or spaces.

    Returns
    -------
    callable
        Decorator of the function. Called with spaces, the function returns an :class:`AutoObject`,
        whose ``sample`` calls it; called without spaces, it runs at once.

    Examples
    --------
    >>> import bigdl.nano.automl.hpo as hpo
    >>> from bigdl.nano.automl.hpo import space
    >>> @hpo.func()
    ... def area(width, height):
    ...     return width * height
    >>> area(2, 3)
    6
    >>> lazy = area(width=space.Int(1, 10), height=3)
    >>> lazy.sample(width=4)
    12
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, type) or not callable(function):
            raise UsageError(
                f"hpo.func decorates a function, not {function!r}", code="argument-type"
            )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> object:
            return called(function, *args, **_with_defaults(function, args, kwargs, defaults))

        return call

    return decorate


def args(default: Mapping[str, Any] | None = None, **kwvars: Any) -> Callable[..., Any]:
    """Decorate a function whose only argument holds all parameters of a search.

    Parameters
    ----------
    default : dict, optional
        Values that are not searched.
    **kwvars
        Spaces and values. The function receives them as the attributes and items of its first
        argument.

    Returns
    -------
    callable
        Decorator of the function. The decorated function takes other values by keyword and returns
        an :class:`AutoObject`.

    Examples
    --------
    >>> import bigdl.nano.automl.hpo as hpo
    >>> from bigdl.nano.automl.hpo import space
    >>> @hpo.args(rate=space.Real(0.01, 0.1), epochs=5)
    ... def plan(args):
    ...     return f"{args.epochs} epochs at {args.rate}"
    >>> plan().sample(rate=0.05)
    '5 epochs at 0.05'
    >>> plan(epochs=2).default
    '2 epochs at 0.01'
    """
    fixed = {**(default or {}), **kwvars}

    def decorate(function: Callable[..., Any]) -> Callable[..., AutoObject]:
        @functools.wraps(function)
        def call(*further: Any, **values: Any) -> AutoObject:
            return AutoObject(
                lambda **chosen: function(_AttributeDict(chosen), *further), **fixed | values
            )

        return call

    return decorate


class _AttributeDict(dict):
    """A dict whose items are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def class_decorator(
    usage: str, base: type, defaults: Mapping[str, Any], lazy: Callable[..., object]
) -> Callable[[type], type]:
    """Return a decorator that makes a class return lazy objects when constructed with spaces.

    Parameters
    ----------
    usage : str
        Begin of the error text for an object that it cannot decorate.
    base : type
        Required base class of a decorated class.
    defaults : mapping
        Default arguments of the class.
    lazy : callable
        Makes the lazy object from the class and the arguments.
    """

    def decorate(cls: type) -> type:
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise UsageError(f"{usage}, not {cls!r}", code="argument-type")
        # Change the class in place: pickle finds the classes of objects by name.
        changed: Any = cls
        make: Callable[..., Any] = cls.__new__

        def construct(target: type, /, *args: Any, **kwargs: Any) -> object:
            if args[:1] != (_PLAIN,):
                arguments = _with_defaults(target, args, kwargs, defaults)
                if len(arguments) > len(kwargs) or holds_lazy([args, arguments]):
                    return lazy(target, *args, **arguments)
            return make(target) if make is object.__new__ else make(target, *args, **kwargs)

        changed.__new__ = construct
        if defaults and not hasattr(cls, "__getnewargs_ex__"):
            # Copying and unpickling pass no arguments, and must not apply the defaults.
            changed.__getnewargs_ex__ = lambda self: ((_PLAIN,), {})
        return cls

    return decorate


def _with_defaults(
    target: Callable, args: tuple, kwargs: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    positional = _named(target, args, {}) if args and defaults else {}
    missing = {name: value for name, value in defaults.items() if name not in positional}
    return missing | dict(kwargs)


def _named(target: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    # Use __init__: the signature of a decorated class is that of the decorator's constructor.
    made: Any = target
    signed, bound = (made.__init__, (None,)) if isinstance(target, type) else (target, ())
    try:
        named = inspect.signature(signed).bind_partial(*bound, *args).arguments
    except (TypeError, ValueError):  # an unknown signature, or one that does not fit
        return {**{f"argument_{index}": value for index, value in enumerate(args)}, **kwargs}
    return {**dict(list(named.items())[len(bound) :]), **kwargs}


def plmodel(**defaults: Any) -> Callable[[type], type]:
    """Decorate a LightningModule or other PyTorch module class for use with ``Trainer.search``.

    Parameters
    ----------
    **defaults
        Default arguments of the model: values or spaces.

    Returns
    -------
    callable
        Decorator that returns the class. Constructed with spaces, the class returns an
        :class:`~bigdl.nano.automl.hpo.space.AutoObject`, from which ``Trainer.search`` makes the
        best model.

    Raises
    ------
    UsageError
        If the class is not a PyTorch module.

    Examples
    --------
    >>> import torch
    >>> import bigdl.nano.automl.hpo as hpo
    >>> from bigdl.nano.automl.hpo import space
    >>> @hpo.plmodel()
    ... class Classifier(torch.nn.Module):
    ...     def __init__(self, hidden, dropout=0.0):
    ...         super().__init__()
    ...         self.hidden = torch.nn.Linear(4, hidden)
    ...         self.dropout = torch.nn.Dropout(dropout)
    ...         self.scores = torch.nn.Linear(hidden, 2)
    >>> model = Classifier(hidden=space.Categorical(8, 16), dropout=space.Real(0.0, 0.5))
    >>> model.kwspaces
    {'hidden': Categorical(8, 16), 'dropout': Real(0.0, 0.5)}
    >>> model.sample(hidden=16).hidden
    Linear(in_features=4, out_features=16, bias=True)
    """
    module = require("torch", "nano").nn.Module
    usage = "hpo.plmodel decorates a LightningModule or nn.Module"
    return class_decorator(usage, module, defaults, AutoObject)
