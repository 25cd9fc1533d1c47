"""Search spaces, used as arguments instead of values.

``Dense(units=space.Int(8, 64))`` lets a search choose the units. A trial reports the parameter
under the name of the argument, here ``units``. A second argument with the same name is ``units_2``;
with ``prefix="dense_1"`` it is ``dense_1:units``.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError
from bigdl.nano.lazy_names import public_names
from bigdl.nano.searchable import SPLITTER, AutoObject, SearchableValue
from bigdl.tuning.spaces import (
    Assignment,
    Domain,
    Naming,
    Number,
    distributions,
    resolve,
    visit,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_REPORTABLE = (str, int, float, bool, type(None))


class Space(SearchableValue):
    """Base class of search spaces: sets of values from which a search chooses one.

    Attributes
    ----------
    prefix : str or None
        Prefix of the names of its parameters.

    Examples
    --------
    >>> from bigdl.nano.automl.hpo import space
    >>> isinstance(space.Int(8, 64), space.Space), isinstance(space.List(1, 2), space.Space)
    (True, True)
    >>> space.Int(8, 64, prefix="dense_1").prefix  # its parameter is dense_1:units, for example
    'dense_1'
    """

    prefix: str | None = None


class SimpleSpace(Space, Domain):
    """Base class of search spaces that consist of a single parameter of a trial.

    Examples
    --------
    >>> from bigdl.nano.automl.hpo import space
    >>> units = space.Int(8, 64, default=16)
    >>> units.default, units.sample()
    (16, 16)
    >>> units.cs
    IntDistribution(high=64, log=False, low=8, step=1)
    >>> 8 <= units.rand <= 64
    True
    """

    @property
    def cs(self) -> BaseDistribution:
        """The Optuna distribution."""
        return self.distribution

    @property
    @abc.abstractmethod
    def default_parameter(self) -> float | str:
        """Default value in the format in which a trial reports it."""

    @property
    @abc.abstractmethod
    def grid(self) -> list[Any]:
        """All values of the space in the format in which trials report them."""


class Categorical(SimpleSpace):
    """A choice among several values; the first value is the default.

    Parameters
    ----------
    *choices
        Numbers, strings, other objects or spaces; a chosen space is searched, too. A single list is
        the list of choices.
    prefix : str, optional

    Notes
    -----
    Trials report numbers, strings, bools and None as they are, and other choices as their
    ``repr``.

    Examples
    --------
    >>> from bigdl.nano.automl.hpo import space
    >>> activation = space.Categorical("relu", "tanh")
    >>> activation.default, activation.grid
    ('relu', ['relu', 'tanh'])
    >>> nested = space.Categorical(0, space.Int(8, 64))  # no hidden layer, or one of 8 to 64 units
    >>> space.AutoObject(dict, hidden=nested).kwspaces
    {'hidden': Categorical(0, Int(8, 64)), 'hidden▁1': Int(8, 64)}
    """

    def __init__(self, *choices: object, prefix: str | None = None):
        if len(choices) == 1 and isinstance(choices[0], (list, tuple)):
            choices = tuple(choices[0])
        if not choices:
            raise UsageError(
                "Categorical needs choices, for example Categorical(16, 32)", code="search-space"
            )
        self.choices = list(choices)
        self.prefix = prefix
        self.labels = _labels(self.choices)

    @property
    def distribution(self) -> BaseDistribution:
        return distributions.CategoricalDistribution(self.labels)

    @property
    def default_parameter(self) -> float | str:
        return self.labels[0]

    @property
    def grid(self) -> list[Any]:
        return list(self.labels)

    def value(self, parameter: object) -> object:
        for label, choice in zip(self.labels, self.choices, strict=True):
            # Accept equal values of other types, as 1 for 1.0, and the choice instead of its label.
            if label == parameter or choice is parameter:
                return choice
        raise UsageError(
            f"{parameter!r} is not one of the choices {self.labels}",
            code="search-space",
            allowed=list(self.labels),
        )

    def visit(self, naming: Naming, name: str) -> None:
        super().visit(naming, name)
        naming.visit_categories(self, self.choices, name)

    def resolve(self, assignment: Assignment) -> Any:  # one of the choices
        return resolve(super().resolve(assignment), assignment)

    def __repr__(self) -> str:
        return f"Categorical({', '.join(map(repr, self.choices))})"


class Real(SimpleSpace, Number):
    """A floating-point number between two bounds.

    Parameters
    ----------
    lower, upper : float
        Bounds of the number.
    default : float, optional
        Default value. Default: the lower bound.
    log : bool
        Sample the logarithm uniformly; use it for values such as learning rates.
    prefix : str, optional

    Examples
    --------
    >>> from bigdl.nano.automl.hpo import space
    >>> rate = space.Real(1e-4, 1e-1, default=1e-3, log=True)
    >>> rate.default
    0.001
    >>> rate.cs
    FloatDistribution(high=0.1, log=True, low=0.0001, step=None)
    """

    def __init__(
        self,
        lower: float,
        upper: float,
        default: float | None = None,
        log: bool = False,
        prefix: str | None = None,
    ):
        Number.__init__(self, lower, upper, log=log, whole=isinstance(self, Int))
        if default is not None:
            check_number(f"The default of {self!r}", default, lower, upper)
        self.lower, self.upper = self.value(lower), self.value(upper)
        self.prefix = prefix
        self._default = self.lower if default is None else self.value(default)

    @property
    def default_parameter(self) -> float:
        return self._default

    @property
    def grid(self) -> list[Any]:
        instead = f"; write Categorical(*range({self.lower}, {self.upper + 1}))"
        raise UsageError(
            f"Only `space.Categorical` is supported for `SamplerType.Grid` sampler, not {self!r}"
            f"{instead if self.whole else ''}",
            code="search-space",
        )

    def __repr__(self) -> str:
        log = ", log=True" if self.log else ""
        return f"{type(self).__name__}({self.lower}, {self.upper}{log})"


class Int(Real):
    """An integer between two bounds, both included.

    Parameters
    ----------
    lower, upper : int
        Bounds of the number.
    default : int, optional
        Default value. Default: the lower bound.
    prefix : str, optional
    log : bool
        Sample the logarithm uniformly.

    Examples
    --------
    >>> from bigdl.nano.automl.hpo import space
    >>> units = space.Int(8, 64, default=16)
    >>> units.default
    16
    >>> 8 <= units.rand <= 64
    True
    """

    def __init__(
        self,
        lower: int,
        upper: int,
        default: int | None = None,
        prefix: str | None = None,
        log: bool = False,
    ):
        super().__init__(lower, upper, default, log, prefix)


class Bool(Categorical):
    """A choice between True and False.

    Parameters
    ----------
    default : bool, optional
        Default value. Default: False.
    prefix : str, optional

    Examples
    --------
    >>> from bigdl.nano.automl.hpo import space
    >>> bias = space.Bool(default=True)
    >>> bias.default, bias.grid
    (True, [False, True])
    """

    def __init__(self, default: bool | None = None, prefix: str | None = None):
        super().__init__(False, True, prefix=prefix)
        self._default = bool(default)

    @property
    def default_parameter(self) -> bool:
        return self._default

    def __repr__(self) -> str:
        return "Bool()"


class NestedSpace(Space):
    """Base class of containers whose elements can be search spaces.

    Attributes
    ----------
    data : list or dict
        Elements: spaces or other values.

    Examples
    --------
    >>> from bigdl.nano.automl.hpo import space
    >>> layers = space.List(space.Int(8, 64), space.Int(8, 64), 10)
    >>> len(layers), layers[0]
    (3, Int(8, 64))
    >>> layers.default
    [8, 8, 10]
    """

    data: Any

    def visit(self, naming: Naming, name: str) -> None:
        if self.prefix:
            name = f"{self.prefix}:{name}" if name else self.prefix
        visit(self.data, naming, name)

    def resolve(self, assignment: Assignment) -> Any:  # the user's container
        return resolve(self.data, assignment)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: int | str) -> Any:  # a part of the user's container
        return self.data[part]


class List(NestedSpace):
    """A list whose elements can be search spaces.

    Parameters
    ----------
    *spaces
        Spaces or other values. The parameter name of an element ends in its index: ``units▁0``.
    prefix : str, optional

    Examples
    --------
    >>> from bigdl.nano.automl.hpo import space
    >>> kernel = space.List(space.Int(1, 3), space.Int(1, 5), 1)
    >>> model = space.AutoObject(dict, kernel=kernel)
    >>> model.kwspaces
    {'kernel▁0': Int(1, 3), 'kernel▁1': Int(1, 5)}
    >>> model.sample(**{"kernel▁1": 4})
    {'kernel': [1, 4, 1]}
    """

    def __init__(self, *spaces: object, prefix: str | None = None):
        self.data = list(spaces)
        self.prefix = prefix

    def __repr__(self) -> str:
        return f"List({', '.join(map(repr, self.data))})"


class Dict(NestedSpace):
    """A dict whose values can be search spaces.

    Parameters
    ----------
    **spaces
        Spaces or other values. The parameter name of a value ends in its key: ``options▁depth``.

    Examples
    --------
    >>> from bigdl.nano.automl.hpo import space
    >>> options = space.Dict(depth=space.Int(2, 6), rounds=100)
    >>> space.AutoObject(dict, options=options).kwspaces
    {'options▁depth': Int(2, 6)}
    >>> options.default
    {'depth': 2, 'rounds': 100}
    """

    def __init__(self, **spaces: object):
        self.data = dict(spaces)

    def __repr__(self) -> str:
        return f"Dict({', '.join(f'{key}={inner!r}' for key, inner in self.data.items())})"


def _labels(choices: Sequence[Any]) -> list[Any]:
    """Return a unique label for each choice; trials report the label instead of the choice."""
    labels: list[Any] = []
    for each in choices:
        label = each if type(each) in _REPORTABLE and each not in labels else _name(each)
        free, number = label, 1
        while free in labels:
            number += 1
            free = f"{label} ({number})"
        labels.append(free)
    return labels


def _name(value: object) -> str:
    named = isinstance(value, type) or callable(value)
    return getattr(value, "__qualname__", repr(value)) if named else repr(value)


__all__ = ["SPLITTER", "AutoObject", *public_names(__name__)]
