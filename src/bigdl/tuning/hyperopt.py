"""Search spaces of hyperopt as suggestions of Optuna trials.

A space of hyperopt is a graph of nodes, which is read by the attributes of the nodes, so hyperopt
itself is not needed. Each labelled distribution becomes one parameter of the trial with the label
as its name, and the values have the same distribution as in hyperopt:

* the bounds of ``loguniform`` and ``qloguniform`` are logarithms;
* a ``q`` rounds the drawn value to a multiple of ``q``, which may be outside of the bounds;
* ``randint`` excludes its upper bound;
* the parameter of ``choice`` and ``pchoice`` is an index, and only the chosen option is drawn.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

_PARAMETER = "hyperopt_param"
_ARGUMENTS = {  # of each distribution, in order
    "uniform": ("low", "high"),
    "quniform": ("low", "high", "q"),
    "uniformint": ("low", "high", "q"),
    "loguniform": ("low", "high"),
    "qloguniform": ("low", "high", "q"),
    "normal": ("mu", "sigma"),
    "qnormal": ("mu", "sigma", "q"),
    "lognormal": ("mu", "sigma"),
    "qlognormal": ("mu", "sigma", "q"),
    "randint": ("low", "high"),
    "categorical": ("p",),
}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "abs": abs,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "max": max,
    "min": min,
    "len": len,
    "getitem": operator.getitem,
    "pos_args": lambda *values: list(values),
    "dict": dict,
}
_SMALLEST = 2.0**-53  # bounds of probabilities, whose quantiles are finite
_NORMAL = NormalDist()


class _Node(Protocol):
    """A node of hyperopt's graphs; a literal also has ``obj``."""

    name: str
    pos_args: list[Any]
    named_args: list[Any]
    obj: Any


@dataclass(frozen=True)
class _Distribution:
    """A labelled distribution of hyperopt.

    Attributes
    ----------
    label : str
    name : str
        Name of the distribution, a key of the table of arguments.
    arguments : dict of str to float or list
    """

    label: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def _is_log(self) -> bool:
        return "log" in self.name

    def suggest(self, trial: BaseTrial) -> object:
        """Suggest the parameter of this distribution."""
        get, label = self.arguments.get, self.label
        if self.name == "randint":
            return trial.suggest_int(label, get("low", 0), get("high", 0) - 1)
        if self.name == "choice":
            return trial.suggest_categorical(label, list(range(get("count", 0))))
        if self.name == "categorical":
            return trial.suggest_float(label, 0.0, 1.0)
        if "normal" in self.name:
            return trial.suggest_float(label, _SMALLEST, 1 - _SMALLEST)
        low, high = get("low", 0.0), get("high", 0.0)
        if self._is_log:
            return trial.suggest_float(label, math.exp(low), math.exp(high), log=True)
        return trial.suggest_float(label, low, high)

    def value(self, parameter: object) -> object:
        """Return the value in hyperopt for a parameter of a trial."""
        if self.name in ("randint", "choice"):
            return parameter
        if self.name == "categorical":
            totals = list(accumulate(self.arguments["p"]))
            return min(bisect_right(totals, parameter), len(totals) - 1)
        value = float(cast("float", parameter))
        if "normal" in self.name:
            quantile = _NORMAL.inv_cdf(value)
            value = self.arguments["mu"] + self.arguments["sigma"] * quantile
            value = math.exp(value) if self._is_log else value
        q = self.arguments.get("q")
        if q is not None:
            value = round(value / q) * q
        return int(value) if self.name == "uniformint" else value

    def parameter(self, value: object) -> object:
        """Return a parameter of a trial for a value in hyperopt."""
        if self.name in ("randint", "choice"):
            return int(cast("int", value))
        if self.name == "categorical":
            index = int(cast("int", value))
            return sum(self.arguments["p"][:index]) + self.arguments["p"][index] / 2
        value = float(cast("float", value))
        if "normal" in self.name:
            value = math.log(max(value, _SMALLEST)) if self._is_log else value
            normal = NormalDist(self.arguments["mu"], self.arguments["sigma"])
            return min(max(normal.cdf(value), _SMALLEST), 1 - _SMALLEST)
        low, high = self.arguments["low"], self.arguments["high"]
        if self._is_log:
            low, high = math.exp(low), math.exp(high)
        return min(max(value, low), high)  # rounding may leave the bounds


class HyperoptSpace:
    """A search space of hyperopt for the trials of Optuna, created by :func:`from_hyperopt`.

    Parameters
    ----------
    space : object
        A node of hyperopt, or dicts, lists and tuples that contain nodes.

    Attributes
    ----------
    labels : list of str
        Names of the parameters.

    Examples
    --------
    >>> from bigdl.tuning import from_hyperopt
    >>> space = from_hyperopt({"epochs": 3})  # without nodes such as hp.uniform("lr", 0, 1)
    >>> space.labels, space.suggest(None)
    ([], {'epochs': 3})
    """

    def __init__(self, space: object):
        self._space = space
        self._distributions: dict[str, _Distribution] = {}
        self._nodes: dict[str, Any] = {}
        self._read(space)
        self.labels = list(self._distributions)

    def suggest(self, trial: BaseTrial) -> object:
        """Draw the space for a trial, as ``fmin`` passes it to its function.

        Parameters
        ----------
        trial : optuna.trial.Trial

        Returns
        -------
        object
            The space with a value for each node. Options that are not chosen are not drawn.
        """
        return self._evaluated(self._space, lambda each: each.value(each.suggest(trial)))

    def values(self, params: Mapping[str, Any]) -> object:
        """Return the space for the parameters of a trial, such as ``study.best_params``.

        It replaces ``hyperopt.space_eval``.

        Raises
        ------
        UsageError
            If a parameter is missing.
        """

        def value(each: _Distribution) -> object:
            if each.label not in params:
                raise UsageError(
                    f"The parameters {sorted(params)} lack {each.label!r} of the space; pass the "
                    "params of a trial of this space",
                    code="argument-value",
                    argument="params",
                )
            return each.value(params[each.label])

        return self._evaluated(self._space, value)

    def params(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters for values of hyperopt, for ``study.enqueue_trial``.

        Parameters
        ----------
        point : dict of str to object
            Values by label, with choices as indices, as in ``points_to_evaluate`` and in the result
            of ``fmin``.

        Raises
        ------
        UsageError
            If the space has no such label.
        """
        unknown = sorted(set(point) - set(self._distributions))
        if unknown:
            raise UsageError(
                f"The space has no label {unknown[0]!r}; it has {self.labels}",
                code="argument-unknown",
                argument=unknown[0],
                allowed=self.labels,
            )
        return {label: self._distributions[label].parameter(v) for label, v in point.items()}

    # Graphs -------------------------------------------------------------------------------------

    def _read(self, node: object) -> None:
        """Register the distributions below a node, and check that all nodes are known."""
        if isinstance(node, Mapping):
            node = list(node.values())
        if isinstance(node, list | tuple):
            for each in node:
                self._read(each)
            return
        if not _is_node(node) or _is_literal(node):
            return
        if node.name == "switch":
            index, *options = node.pos_args
            self._read_parameter(index, options)
            self._read(options)
            return
        if node.name == _PARAMETER:
            self._read_parameter(node)
            return
        if node.name not in _OPERATIONS:
            raise UsageError(
                f"The space has a node {node.name!r}, which cannot be converted; apply it to the "
                "value in the objective instead",
                code="search-space",
                node=node.name,
            )
        self._read(_inputs(node))

    def _read_parameter(self, node: object, options: Sequence[Any] | None = None) -> None:
        if not _is_node(node) or node.name != _PARAMETER:
            raise UsageError(
                "The space has a switch whose index is not labelled; use hp.choice or hp.pchoice",
                code="search-space",
                node="switch",
            )
        label, drawn = str(_literal(node.pos_args[0])), node.pos_args[1]
        known = self._nodes.setdefault(label, node)
        if known is not node:
            raise UsageError(
                f"The label {label!r} is used for two distributions of the space; rename one",
                code="search-space",
                node=label,
            )
        self._distributions[label] = _distribution_of(label, drawn, options)

    def _evaluated(self, node: object, draw: Callable[[_Distribution], object]) -> object:
        if isinstance(node, Mapping):
            return {key: self._evaluated(each, draw) for key, each in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(self._evaluated(each, draw) for each in node)
        if not _is_node(node):
            return node
        if _is_literal(node):
            return node.obj
        if node.name == _PARAMETER:
            return draw(self._distributions[str(_literal(node.pos_args[0]))])
        if node.name == "switch":
            index, *options = node.pos_args
            return self._evaluated(options[int(cast("int", self._evaluated(index, draw)))], draw)
        values = [self._evaluated(each, draw) for each in node.pos_args]
        named = {name: self._evaluated(each, draw) for name, each in node.named_args}
        return _OPERATIONS[node.name](*values, **named)


def from_hyperopt(space: object) -> HyperoptSpace:
    """Convert a search space of hyperopt for Optuna's trials.

    Parameters
    ----------
    space : object
        The space that was passed to ``hyperopt.fmin``: distributions of ``hyperopt.hp``, in nested
        dicts, lists, tuples and choices, also in arithmetic expressions.

    Returns
    -------
    HyperoptSpace
        Its ``suggest(trial)`` returns what ``fmin`` passes to its function.

    Raises
    ------
    UsageError
        If the space has a function that cannot be converted, or a label is used twice.

    Examples
    --------
    >>> from hyperopt import hp  # doctest: +SKIP
    >>> from bigdl.tuning import from_hyperopt
    >>> space = from_hyperopt({"lr": hp.loguniform("lr", -7, 0)})  # doctest: +SKIP
    >>> study.optimize(lambda trial: loss(space.suggest(trial)), n_trials=50)  # doctest: +SKIP
    >>> space.values(study.best_params)  # doctest: +SKIP
    {'lr': 0.0123}
    >>> from_hyperopt({"epochs": 3}).suggest(None)  # fixed values stay
    {'epochs': 3}
    """
    return HyperoptSpace(space)


def _is_node(value: object) -> TypeGuard[_Node]:
    return all(hasattr(value, name) for name in ("name", "pos_args", "named_args"))


def _is_literal(node: _Node) -> bool:
    return node.name == "literal" and hasattr(node, "obj")


def _inputs(node: _Node) -> list[Any]:
    return [*node.pos_args, *(each for _, each in node.named_args)]


def _literal(node: object) -> object:
    """Return the constant of a node, or a list of them."""
    if not _is_node(node):
        return node
    if _is_literal(node):
        return node.obj
    if node.name == "pos_args":
        return [_literal(each) for each in node.pos_args]
    raise UsageError(
        f"A bound in the space is a node {node.name!r}; bounds must be numbers",
        code="search-space",
        node=node.name,
    )


def _distribution_of(label: str, node: _Node, options: Sequence[Any] | None) -> _Distribution:
    name = node.name.removesuffix("_via_categorical")
    if name not in _ARGUMENTS:
        raise UsageError(
            f"The distribution {node.name!r} of the label {label!r} is not supported",
            code="search-space",
            node=label,
        )
    names = _ARGUMENTS[name]
    arguments: dict[str, Any] = dict(
        zip(names, (_literal(each) for each in node.pos_args), strict=False)
    )
    arguments |= {key: _literal(each) for key, each in node.named_args if key in names}
    if name == "randint":
        if arguments.get("high") is None:
            arguments = {"low": 0, "high": arguments["low"]}
        if options is not None:
            return _Distribution(label, "choice", {"count": len(options)})
    if name == "uniformint":
        arguments.setdefault("q", 1.0)
    if name == "categorical" and len(arguments["p"]) != len(options or arguments["p"]):
        raise UsageError(
            f"The choice {label!r} has {len(options or ())} options and {len(arguments['p'])} "
            "probabilities",
            code="search-space",
            node=label,
        )
    return _Distribution(label, name, arguments)
