"""A module with a sample of its input: its arguments, its results and its data as flat lists."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from bigdl.common.errors import UsageError, one_line
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.acceleration.structure import Structure, flatten

__all__ = [
    "Batch",
    "FlatModule",
    "ForwardInputs",
    "TorchSource",
    "batches_of",
    "evaluating",
    "forward_parameters",
    "rows_of",
    "sample_arguments",
    "split_batch",
]


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
    _fast: int | None = field(init=False, repr=False, compare=False)

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
        for rest, kind in (
            (self.star, kinds.VAR_POSITIONAL),
            (self.double_star, kinds.VAR_KEYWORD),
        ):
            if rest is not None:
                described[rest] = kinds(rest, kind)
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
        values: dict[str | None, Any] = {
            name: s._rebuild(leaves) for name, s in self.structures.items()
        }
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


class Batch(NamedTuple):
    """One batch.

    Attributes
    ----------
    args, kwargs
        The model's arguments.
    targets : tuple
        What came with them.
    """

    args: tuple
    kwargs: dict
    targets: tuple = ()


def batches_of(
    model: torch.nn.Module, data: Any, inputs: ForwardInputs | None = None
) -> Iterator[Batch]:
    """Batches of whatever a user gives as data.

    Parameters
    ----------
    model : Module
    data : DataLoader, iterable of batches, Tensor, ndarray, tuple or dict
        A tensor, a tuple and a dict are one batch. For the forms of a batch see
        :func:`split_batch`.
    inputs : ForwardInputs, optional
        What a sample of the model's input holds.

    Raises
    ------
    UsageError
        If it is none of these.
    """
    if isinstance(data, (torch.Tensor, np.ndarray, tuple, Mapping)):
        yield split_batch(model, data, inputs)
    elif isinstance(data, Iterable):
        for element in data:
            yield split_batch(model, element, inputs)
    else:
        raise UsageError(
            "Data must be a DataLoader, a tensor, a tuple or a dict of tensors, not a "
            f"{type(data).__name__}"
        )


def split_batch(model: torch.nn.Module, element: Any, inputs: ForwardInputs | None = None) -> Batch:
    """The arguments of a model in one element of a data loader.

    Parameters
    ----------
    model : Module
    element : Tensor, tuple, list or dict
        ``x``; ``(x,)``; ``(x, y)`` where `x` may be a tuple or a dict of several inputs;
        ``(x1, …, xk, y…)`` for a model of k inputs; or a dict of keyword arguments, of which those
        that forward does not take are targets.
    inputs : ForwardInputs, optional
        What a sample of the model's input holds: an argument with a default that was a tensor
        there is an input, else a target.
    """
    described = forward_parameters(model) if inputs is None else inputs.describe()
    parameters = described.values()
    if isinstance(element, Mapping):
        return _split_mapping(element, parameters)
    if not isinstance(element, (tuple, list)):
        return Batch((element,), {})
    first = element[0] if element else None
    if len(element) == 2 and isinstance(first, (tuple, list)) and _positional_count(parameters) > 1:
        return Batch(tuple(first), {}, (element[1],))
    if len(element) <= 2 and isinstance(first, Mapping):
        batch = _split_mapping(first, parameters)
        return batch._replace(targets=(*batch.targets, *element[1:]))
    wanted = _positional_count(parameters) + (0 if inputs is None else inputs.star_count)
    count = max(1, min(len(element), wanted))
    return Batch(tuple(element[:count]), {}, tuple(element[count:]))


def rows_of(batch: Batch) -> int:
    """Number of samples in a batch: the length of its first tensor, 1 if that is a scalar."""
    leaves, _ = flatten((batch.args, batch.kwargs))
    return len(leaves[0]) if leaves and leaves[0].ndim else 1


def _split_mapping(element, parameters) -> Batch:
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    known = {key: value for key, value in element.items() if key in names}
    if not known:  # the dict itself is what the model takes
        return Batch((dict(element),), {})
    return Batch((), known, tuple(v for key, v in element.items() if key not in names))


def _positional_count(parameters) -> int:
    """Arguments that have to be given by position."""
    return sum(
        p.default is inspect.Parameter.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model in evaluation mode and without gradients; each part is as before afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield model
    finally:
        for module, training in before:
            module.training = training


class FlatModule(torch.nn.Module):
    """A module that takes and gives flat lists of tensors: what is exported to other runtimes.

    Parameters
    ----------
    model : Module
    inputs : ForwardInputs
    """

    def __init__(self, model: torch.nn.Module, inputs: ForwardInputs):
        super().__init__()
        self.model = model
        self.inputs = inputs

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return self.inputs.names

    def forward(self, *tensors):
        args, kwargs = self.inputs.unflatten(tensors)
        return tuple(flatten(self.model(*args, **kwargs))[0])


def dynamic_dimensions(
    axes: bool | Mapping[str, Iterable[int]],
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    aliases: Sequence[str] | None = None,
) -> list[list[int]]:
    """Return the dimensions of each input that may change.

    Parameters
    ----------
    axes : bool or mapping
        True: the first of each input. A mapping names those of each input:
        ``{"x": {0: "batch", 2: "length"}}`` or ``{"x": [0, 2]}``; other names are outputs.
    names : sequence of str
    tensors : sequence of Tensor
        The sample.
    aliases : sequence of str, optional
        Other names of the inputs.

    Raises
    ------
    UsageError
        If no input is named, or a dimension does not exist.
    """
    if not isinstance(axes, bool | Mapping | type(None)):
        raise UsageError(f"dynamic_axes must be True, False or a dict, not {axes!r}")
    if not isinstance(axes, Mapping):
        return [[0] if axes and tensor.ndim else [] for tensor in tensors]
    if axes and not set(axes).intersection([*names, *(aliases or ())]):
        raise UsageError(
            f"dynamic_axes names {', '.join(map(repr, axes))}, but the inputs are "
            f"{', '.join(names)}"
        )
    dimensions = []
    for name, alias, tensor in zip(names, aliases or names, tensors, strict=True):
        wanted = list(axes.get(name, axes.get(alias, ())))
        if any(not isinstance(d, int) or not -tensor.ndim <= d < tensor.ndim for d in wanted):
            raise UsageError(
                f"dynamic_axes gives {wanted} for {name!r}, which has {tensor.ndim} dimensions"
            )
        dimensions.append(sorted({dimension % tensor.ndim for dimension in wanted}))
    return dimensions


class TorchSource:
    """A module and a sample, as methods see them.

    Parameters
    ----------
    model : Module
        Not changed.
    sample : Tensor, tuple, list or dict, optional
        By default the first batch of `data`, or the model's ``example_input_array``.
    example_kwargs : mapping, optional
        Further keyword arguments of the sample.
    data : optional
        Calibration data.

    Raises
    ------
    UsageError
        If something other than a module is given; later, where a sample is needed, if there is
        none or it does not fit the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Any = None,
        example_kwargs: Mapping | None = None,
        data: Any = None,
    ):
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"A torch.nn.Module is needed, but a {type(model).__name__} was given")
        self.model = model
        self._sample = sample
        self._example_kwargs = example_kwargs
        self._data = data

    @property
    def has_sample(self) -> bool:
        """True if there is anything that a sample can be taken from."""
        return (
            self._sample is not None
            or self._data is not None
            or getattr(self.model, "example_input_array", None) is not None
        )

    @cached_property
    def arguments(self) -> tuple[tuple, dict]:
        """``args, kwargs`` of the sample."""
        sample = self._sample
        if sample is None:
            sample = getattr(self.model, "example_input_array", None)
        if sample is None and self._data is not None:
            batch = next(batches_of(self.model, self._data), None)
            if batch is None:
                raise UsageError("The data hold no batch, so there is no sample of the input")
            return batch.args, {**batch.kwargs, **(self._example_kwargs or {})}
        if sample is None:
            raise UsageError(
                f"A sample of the input of {type(self.model).__name__} is needed; pass input_sample"
            )
        return sample_arguments(self.model, sample, self._example_kwargs)

    @cached_property
    def inputs(self) -> ForwardInputs:
        """The network's inputs."""
        known = getattr(self.model, "nano_inputs", None)
        if isinstance(known, ForwardInputs):  # a model in another runtime
            return known
        return ForwardInputs.of(self.model, *self.arguments)

    @cached_property
    def outputs(self) -> Structure:
        """Structure of the model's result; the model is run once on the sample.

        Raises
        ------
        UsageError
            If it does not run, or gives no tensor.
        """
        known = getattr(self.model, "nano_outputs", None)
        if isinstance(known, Structure):  # a model in another runtime
            return known
        args, kwargs = self.arguments
        kind = type(self.model).__name__
        try:
            with evaluating(self.model):
                leaves, structure = flatten(self.model(*args, **kwargs))
        except Exception as error:
            raise UsageError(
                f"{kind} fails on the sample of its input: {one_line(error)}; pass another "
                "input_sample"
            ) from error
        if not leaves:
            raise UsageError(f"{kind} returns no tensor for the sample, so it cannot be converted")
        return structure

    @cached_property
    def sample_tensors(self) -> list[torch.Tensor]:
        """The sample as a flat list of tensors."""
        leaves = self.inputs.flatten(*self.arguments)
        return [torch.as_tensor(leaf) for leaf in leaves]

    def sample_arrays(self) -> list[np.ndarray]:
        """The sample as a flat list of ndarrays."""
        return [tensor.detach().cpu().numpy() for tensor in self.sample_tensors]

    @contextmanager
    def flat_module(self) -> Iterator[FlatModule]:
        """The model with flat inputs and outputs, in evaluation mode inside the context."""
        with evaluating(self.model):
            yield FlatModule(self.model, self.inputs).eval()

    def calibration_tensors(self, options: BuildOptions) -> Iterator[list[torch.Tensor]]:
        """Flat lists of tensors of the calibration data, as many batches as hold its sample size.

        Raises
        ------
        UsageError
            If there are no calibration data.
        """
        calibration = options.calibration
        data = calibration.data if calibration.data is not None else self._data
        if data is None:
            raise UsageError(
                "Calibration data are needed to quantize to int8; pass calib_data, a DataLoader or "
                "a batch of the model's input"
            )
        rows = 0
        for batch in batches_of(self.model, data, self.inputs):
            yield [torch.as_tensor(x) for x in self.inputs.flatten(batch.args, batch.kwargs)]
            rows += rows_of(batch)
            if rows >= calibration.sample_size:
                break
        if not rows:
            raise UsageError("The calibration data hold no batch; give at least one")

    def calibration_arrays(self, options: BuildOptions) -> Iterator[list[np.ndarray]]:
        """:meth:`calibration_tensors` as ndarrays."""
        for tensors in self.calibration_tensors(options):
            yield [tensor.detach().cpu().numpy() for tensor in tensors]
