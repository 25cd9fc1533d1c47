"""How the arguments of a call become the flat list of tensors that a network takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.structure import Structure, flatten

__all__ = ["ForwardInputs", "forward_parameters", "sample_arguments"]


def forward_parameters(model: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a model's forward.

    A model in another runtime has a forward that takes anything; its parameters are those of the
    module that it was made from.
    """
    inputs = getattr(model, "nano_inputs", None)
    if isinstance(inputs, ForwardInputs):
        return inputs.describe()
    return inspect.signature(model.forward).parameters


def sample_arguments(model: torch.nn.Module, sample: Any, extra: Mapping | None = None):
    """The arguments with which a sample is given to a model.

    Parameters
    ----------
    model : Module
    sample : Tensor, ndarray, tuple, list or dict
        A tuple or a list holds the positional arguments, a dict whose keys are names of parameters
        holds keywords. For a model of one parameter a tuple of several, or another dict, is the
        one argument itself.
    extra : mapping, optional
        Further keyword arguments.

    Returns
    -------
    args : tuple
    kwargs : dict
    """
    parameters = forward_parameters(model)
    names = list(parameters)
    if isinstance(sample, Mapping):
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if sample and (open_ended or all(key in parameters for key in sample)):
            return (), {**sample, **(extra or {})}
        return (dict(sample),), dict(extra or {})
    if isinstance(sample, (tuple, list)):
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        if len(sample) <= 1 or takes_any or len(sample) <= len(names) - len(extra or {}):
            return tuple(sample), dict(extra or {})
        if len(names) == 1:
            return (sample,), dict(extra or {})
        raise UsageError(
            f"The sample has {len(sample)} inputs, but forward of {type(model).__name__} takes "
            f"{len(names)}: {', '.join(names)}"
        )
    return (sample,), dict(extra or {})


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of a network and the parameters of ``forward`` that they come from.

    Values that are no tensors were fixed when the network was made: a call that gives another
    value is refused.

    Attributes
    ----------
    parameters : tuple of str
        Names of forward's named parameters, in order.
    keyword_only : frozenset of str
        Those that are given by name only.
    structures : dict of str to Structure
        What each argument looks like; ``*args`` is a tuple, ``**kwargs`` a dict.
    names : tuple of str
        Names of the network's inputs, in the order of the flat list.
    star, double_star : str or None
        Names of ``*args`` and ``**kwargs`` if forward has them.
    """

    parameters: tuple[str, ...]
    structures: dict[str, Structure]
    keyword_only: frozenset[str] = frozenset()
    star: str | None = None
    double_star: str | None = None
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self):
        names = [n for name, structure in self.structures.items() for n in structure.paths(name)]
        object.__setattr__(self, "names", tuple(names))
        # The most frequent call, tensors by position, needs no walk through structures.
        plain = [self.structures[name].kind == "tensor" for name in self.parameters]
        fixed = plain.index(False) if False in plain else len(plain)
        only_tensors = fixed == len(self.names) and not self.keyword_only
        object.__setattr__(self, "_fast", fixed if only_tensors else None)

    @classmethod
    def of(cls, model: torch.nn.Module, args: tuple, kwargs: Mapping) -> ForwardInputs:
        """From a model and the arguments of one call of it.

        Raises
        ------
        UsageError
            If the arguments do not fit forward, or hold no tensor.
        """
        signature = inspect.signature(model.forward)
        parameters = signature.parameters
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(
                f"The sample does not fit forward of {type(model).__name__}: {error}"
            ) from None
        bound.apply_defaults()
        star = next((n for n, p in parameters.items() if p.kind is p.VAR_POSITIONAL), None)
        double_star = next((n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
        named = tuple(n for n in parameters if n not in (star, double_star))
        structures = {name: flatten(value)[1] for name, value in bound.arguments.items()}
        inputs = cls(
            named,
            structures,
            frozenset(n for n in named if parameters[n].kind is inspect.Parameter.KEYWORD_ONLY),
            star,
            double_star,
        )
        if not inputs.names:
            raise UsageError(
                f"The sample of {type(model).__name__} holds no tensor; give one as input_sample"
            )
        return inputs

    def describe(self) -> dict[str, inspect.Parameter]:
        """The parameters by name; what was no tensor has its value as its default."""
        kinds = inspect.Parameter
        described = {}
        for name in self.parameters:
            structure = self.structures[name]
            described[name] = kinds(
                name if name.isidentifier() else "input",
                kinds.KEYWORD_ONLY if name in self.keyword_only else kinds.POSITIONAL_OR_KEYWORD,
                default=kinds.empty if structure.paths(name) else structure.rebuild(()),
            )
        for name, kind in (
            (self.star, kinds.VAR_POSITIONAL),
            (self.double_star, kinds.VAR_KEYWORD),
        ):
            if name is not None:
                described[name] = kinds(name, kind)
        return described

    def flatten(self, args: tuple, kwargs: Mapping) -> list:
        """The flat list of tensors of a call.

        Raises
        ------
        UsageError
            If an argument is given twice, is unknown, is missing, is nested in another way than in
            the sample, or is another value than the one that was fixed.
        """
        if (
            len(args) == self._fast
            and not kwargs
            and all(isinstance(value, (torch.Tensor, np.ndarray)) for value in args)
        ):
            return list(args)
        leaves: list = []
        for name, value in self._bind(args, kwargs).items():
            self.structures[name].take(value, name, leaves)
        return leaves

    @property
    def star_count(self) -> int:
        """Number of arguments that ``*args`` had in the sample."""
        return len(self.structures[self.star].children) if self.star is not None else 0

    def unflatten(self, leaves) -> tuple[tuple, dict]:
        """Arguments of a call of ``forward`` from the flat list."""
        leaves = iter(leaves)
        values = {name: s._rebuild(leaves) for name, s in self.structures.items()}
        args, kwargs = [], {}
        for name in self.parameters:
            if name in self.keyword_only:
                kwargs[name] = values[name]
            else:
                args.append(values[name])
        args += values.get(self.star, ())
        kwargs.update(values.get(self.double_star, {}))
        return tuple(args), kwargs

    def _bind(self, args, kwargs) -> dict:
        """Each parameter's value; what is left out keeps the value of the sample."""
        positional = [name for name in self.parameters if name not in self.keyword_only]
        if len(args) > len(positional) and self.star is None:
            raise UsageError(
                f"The model takes {len(positional)} positional arguments "
                f"({', '.join(positional)}), but {len(args)} were given"
            )
        given = dict(zip(positional, args, strict=False))
        rest = {}
        for name, value in kwargs.items():
            if name in given:
                # The spelling is the old interface's.
                raise UsageError(
                    f"You shouldn't pass arguement {name} as it has been passed as a positional "
                    "arguement."
                )
            if name in self.parameters:
                given[name] = value
            elif self.double_star is not None:
                rest[name] = value
            else:
                raise UsageError(
                    f"The model has no argument {name!r}; it takes {', '.join(self.parameters)}"
                )
        if self.star is not None:
            given[self.star] = tuple(args[len(positional) :])
        if self.double_star is not None:
            given[self.double_star] = rest
        values = {}
        for name, structure in self.structures.items():
            if name in given:
                values[name] = given[name]
            elif not structure.paths(name):
                values[name] = structure.rebuild(())
            else:
                raise UsageError(f"The model's argument {name!r} is missing; it was a tensor")
        return values

    def to_json(self) -> dict:
        """As JSON."""
        return {
            "parameters": list(self.parameters),
            "structures": {name: s.to_json() for name, s in self.structures.items()},
            "keyword_only": sorted(self.keyword_only),
            "star": self.star,
            "double_star": self.double_star,
        }

    @classmethod
    def from_json(cls, data: Mapping) -> ForwardInputs:
        """Read what :meth:`to_json` wrote."""
        return cls(
            tuple(data["parameters"]),
            {name: Structure.from_json(s) for name, s in data["structures"].items()},
            frozenset(data["keyword_only"]),
            data["star"],
            data["double_star"],
        )
