"""Model sources of PyTorch: a module with a sample of its input and calibration data."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from bigdl.common.errors import UsageError, as_usage_error, user_stacklevel
from bigdl.nano.acceleration.agreement import (
    PREPROCESSING,
    DisagreementError,
    Probe,
    difference,
)
from bigdl.nano.acceleration.method import BuildOptions, Method
from bigdl.nano.acceleration.precision import BF16, FP32
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.acceleration.structure import (
    CallSignature,
    ModelBatch,
    Structure,
    as_array,
    first_batches,
    flatten,
    read,
    refuse_objects,
)

ONE_BATCH = (torch.Tensor, np.ndarray, tuple, Mapping)
"""Types of data that are treated as one batch."""
CALIBRATION_DATA = "The calibration data"
# Parts of names of target arguments in transformers.
_LABELS = ("label", "target", "start_positions", "end_positions")
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def forward_parameters(model: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's forward by name.

    The forward of an accelerated model accepts anything; its parameters are those of the original
    module.
    """
    inputs = getattr(model, "nano_inputs", None)
    if isinstance(inputs, ForwardInputs):
        return inputs.describe()
    return forward_signature(model).parameters


def named_parameters(model: torch.nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of a model's forward except ``*args`` and ``**kwargs``, in order."""
    parameters = forward_parameters(model).values()
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def forward_signature(model: torch.nn.Module) -> inspect.Signature:
    """Return the signature of a model's forward.

    A wrapper whose forward accepts anything may have the attribute ``forward_signature``, for
    example the result of ``Trainer.compile``.
    """
    known = getattr(model, "forward_signature", None)
    return known if isinstance(known, inspect.Signature) else inspect.signature(model.forward)


def sample_arguments(model: torch.nn.Module, sample: object, extra: Mapping | None = None):
    """Convert a sample to the arguments of a call of the model.

    Parameters
    ----------
    model : Module
    sample : Tensor, ndarray, tuple, list or dict
        A tuple or list contains positional arguments. A dict whose keys are parameter names
        contains keyword arguments. For a model with one parameter, a longer tuple or any other
        dict is the argument itself.
    extra : mapping, optional
        Further keyword arguments.

    Returns
    -------
    args : tuple
    kwargs : dict
    """
    parameters = forward_parameters(model)
    names, named = list(parameters), dict(extra or {})
    kinds_used = {parameter.kind for parameter in parameters.values()}
    if isinstance(sample, Mapping):
        known = inspect.Parameter.VAR_KEYWORD in kinds_used or all(
            key in parameters for key in sample
        )
        return ((), {**sample, **named}) if sample and known else ((dict(sample),), named)
    if not isinstance(sample, (tuple, list)):
        return (sample,), named
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds_used
    if len(sample) <= 1 or takes_any or len(sample) <= len(names) - len(named):
        return tuple(sample), named
    if len(names) == 1:
        return (sample,), named
    raise UsageError(
        f"The sample has {len(sample)} inputs, but forward of {type(model).__name__} takes "
        f"{len(names)}: {', '.join(names)}",
        code="model-input",
    )


@dataclass(frozen=True)
class ForwardInputs(CallSignature):
    """Signature of ``forward``: maps its arguments to a flat list of network inputs."""

    tensor_types = (torch.Tensor, np.ndarray)

    @classmethod
    def of(cls, model: torch.nn.Module, args: tuple, kwargs: Mapping) -> ForwardInputs:
        """Build the signature from the arguments of one call of a model.

        Raises
        ------
        UsageError
            If the arguments do not match forward, or contain no tensor.
        """
        signature = forward_signature(model)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(
                f"The sample does not fit forward of {type(model).__name__}: {error}",
                code="model-input",
            ) from None
        bound.apply_defaults()
        names: dict[Any, list[str]] = defaultdict(list)  # by kind of parameter
        for name, parameter in signature.parameters.items():
            names[parameter.kind].append(name)
        variadic = [names.pop(parameter_kind, [None])[0] for parameter_kind in _VARIADIC]
        inputs = cls(
            tuple(name for each in names.values() for name in each),
            {name: flatten(value)[1] for name, value in bound.arguments.items()},
            frozenset(names[inspect.Parameter.KEYWORD_ONLY]),
            *variadic,
        )
        if not inputs.names:
            raise UsageError(
                f"The sample of {type(model).__name__} holds no tensor; give one as input_sample",
                code="model-input",
            )
        return inputs

    def describe(self) -> dict[str, inspect.Parameter]:
        """Return the parameters by name; constant arguments are the parameters' defaults."""
        make = inspect.Parameter
        described = {}
        for name in self.parameters:
            structure = self.structures[name]
            described[name] = make(
                name if name.isidentifier() else "input",
                make.KEYWORD_ONLY if name in self.keyword_only else make.POSITIONAL_OR_KEYWORD,
                default=make.empty if structure.paths(name) else structure.rebuild(()),
            )
        for rest, parameter_kind in zip((self.star, self.double_star), _VARIADIC, strict=True):
            if rest is not None:
                described[rest] = make(rest, parameter_kind)
        return described


def batches_of(
    model: torch.nn.Module,
    data: object,
    inputs: ForwardInputs | None = None,
    name: str = "The data",
) -> Iterator[ModelBatch]:
    """Yield the batches of the user's data, split into model arguments and targets.

    Parameters
    ----------
    model : Module
    data : DataLoader, iterable of batches, Tensor, ndarray, tuple or dict
        A tensor, a tuple or a dict is one batch. :func:`split_batch` lists the forms of a batch.
    inputs : ForwardInputs, optional
        Signature from a sample of the model's input.
    name : str
        Name of the data for messages, capitalized.

    Raises
    ------
    UsageError
        If the data have another type, or cannot be read.
    """
    if isinstance(data, ONE_BATCH):
        data = [data]
    if not isinstance(data, Iterable):
        raise UsageError(
            "Data must be a DataLoader, a tensor, a tuple or a dict of tensors, not a "
            f"{type(data).__name__}",
            code="data-type",
        )
    return (split_batch(model, element, inputs) for element in read(data, name))


def split_batch(
    model: torch.nn.Module, element: object, inputs: ForwardInputs | None = None
) -> ModelBatch:
    """Split an element of a data loader into model arguments and targets.

    Parameters
    ----------
    model : Module
    element : Tensor, tuple, list or dict
        ``x``; ``(x,)``; ``(x, y)`` where `x` may be a tuple or a dict of several inputs;
        ``(x1, …, xk, y…)`` for a model of k inputs, of which those with default None are optional;
        or a dict of keyword arguments. Keys that forward lacks are targets, and so are arguments
        named like ``labels`` with default None.
    inputs : ForwardInputs, optional
        Signature from a sample of the model's input. An argument with a default is an input if it
        was a tensor in the sample, else a target.
    """
    described = forward_parameters(model) if inputs is None else inputs.describe()
    parameters = described.values()
    if isinstance(element, Mapping):
        return _split_mapping(element, parameters, inputs)
    if not isinstance(element, (tuple, list)):
        return ModelBatch((element,), {})
    first = element[0] if element else None
    if len(element) == 2 and isinstance(first, (tuple, list)) and _positional_count(parameters) > 1:
        return ModelBatch(tuple(first), {}, (element[1],))
    if len(element) <= 2 and isinstance(first, Mapping):
        batch = _split_mapping(first, parameters, inputs)
        return batch._replace(targets=(*batch.targets, *element[1:]))
    count = _positional_count(parameters)
    if inputs is not None and inputs.star is not None:
        count += len(inputs.structures[inputs.star].children)
    elif inputs is None:  # the last element is the target
        count = min(count + _optional_count(parameters), max(count, len(element) - 1))
    count = max(1, count)
    return ModelBatch(tuple(element[:count]), {}, tuple(element[count:]))


def _is_label(parameter: inspect.Parameter, inputs: ForwardInputs | None) -> bool:
    """Return True if an optional parameter is for a target, such as ``labels``.

    It is an input if it was a tensor in the sample.
    """
    if parameter.default is inspect.Parameter.empty:
        return False
    if inputs is None and parameter.default is not None:
        return False
    name = parameter.name.lower()
    return any(word in name for word in _LABELS)


def _split_mapping(element, parameters, inputs: ForwardInputs | None = None) -> ModelBatch:
    names = {p.name for p in parameters if p.kind not in _VARIADIC and not _is_label(p, inputs)}
    known = {key: value for key, value in element.items() if key in names}
    if not known:  # the dict itself is the argument
        return ModelBatch((dict(element),), {})
    return ModelBatch((), known, tuple(v for key, v in element.items() if key not in names))


def _positional_count(parameters) -> int:
    """Return the number of required positional arguments."""
    return sum(
        p.default is inspect.Parameter.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def _optional_count(parameters) -> int:
    """Return the number of arguments with default None after the required ones."""
    count = 0
    for parameter in parameters:
        positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if not positional or (parameter.default is not None and count):
            break
        if parameter.default is inspect.Parameter.empty:
            continue
        if parameter.default is not None or _is_label(parameter, None):
            break
        count += 1
    return count


# Loaders of a trainer and of a LightningModule, in order of preference as source of a sample.
_OF_TRAINER = ("predict_dataloaders", "train_dataloader", "val_dataloaders", "test_dataloaders")
_OF_MODULE = ("predict_dataloader", "train_dataloader", "val_dataloader", "test_dataloader")


def trainer_loader(model: torch.nn.Module) -> DataLoader | None:
    """Return a data loader of the LightningModule's trainer, or None."""
    trainer = getattr(model, "_trainer", None)
    for name in _OF_TRAINER:
        loader = getattr(trainer, name, None)
        if isinstance(loader, DataLoader):
            return loader
    return None


def module_loader(model: torch.nn.Module) -> DataLoader:
    """Create a data loader with a method of the LightningModule.

    Raises
    ------
    UsageError
        If the module creates no data loader.
    """
    for name in _OF_MODULE:
        with suppress(Exception):
            loader = getattr(model, name)()
            if isinstance(loader, DataLoader):
                return loader
    raise UsageError(
        f"A sample of the input of {type(model).__name__} is needed; pass input_sample",
        code="argument-missing",
        argument="input_sample",
    )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Temporarily put a model in evaluation mode and disable gradients."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield model
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def fastpath_disabled() -> Iterator[None]:
    """Temporarily disable the fast path of PyTorch's transformer layers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class FlatModule(torch.nn.Module):
    """Module with flat lists of tensors as inputs and outputs, for export to other runtimes.

    Parameters
    ----------
    model : Module
    inputs : ForwardInputs
    """

    def __init__(self, model: torch.nn.Module, inputs: ForwardInputs):
        super().__init__()
        self.model = model
        self.inputs = inputs

    def forward(self, *tensors):
        args, kwargs = self.inputs.unflatten(tensors)
        return tuple(flatten(self.model(*args, **kwargs))[0])


def _add_noise(tensor: torch.Tensor, size: float) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach() * (1 + size * torch.randn(tensor.shape, dtype=tensor.dtype))


def _is_finite(result: object) -> bool:
    tensors = (each for each in flatten(result)[0] if torch.is_tensor(each))
    return all(bool(torch.isfinite(each).all()) for each in tensors if each.is_floating_point())


class TorchSource:
    """Model source of PyTorch: a module with a sample of its input.

    Parameters
    ----------
    model : Module
        The original module; it is not changed.
    sample : Tensor, tuple, list, dict or DataLoader, optional
        Sample of the input; for a loader its first batch without targets. The default is the
        model's ``example_input_array``, or else the first batch of `data`, of a loader of the
        LightningModule's trainer, or of a loader that the LightningModule creates.
    example_kwargs : mapping, optional
        Further keyword arguments for the sample.
    data : optional
        Calibration data.

    Attributes
    ----------
    exporter : str or None
        The exporter used last; exporters set it.
    conversion_warning : str or None
        Warning about what the last conversion may have lost; exporters set it.
    cache_key : str or None
        Key of the last network that was taken from the cache on disk: the quantized one, or the
        converted one of a method that does not quantize. None if it was made here.
    fingerprint : str or None
        Digest that the cache records, to estimate later whether it has the network.

    Raises
    ------
    UsageError
        If `model` is not a module; later, if a needed sample is missing or does not fit the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sample: object = None,
        example_kwargs: Mapping | None = None,
        data: object = None,
    ):
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"model should be a torch.nn.Module, but a {type(model).__name__} was given",
                code="model-type",
            )
        self.model = model
        self.data = data
        self._sample = getattr(model, "example_input_array", None) if sample is None else sample
        self._example_kwargs = dict(example_kwargs or {})
        self.exporter: str | None = None
        self.conversion_warning: str | None = None
        self.cache_key: str | None = None
        self.fingerprint: str | None = None
        self._calls = 0
        self._probes: dict[str, list[Probe]] = {}
        self._effects: tuple[set[str], bool] = (set(), False)  # of the last call
        self._side_effects: tuple[set[str], bool, bool] | None = None

    @property
    def has_sample(self) -> bool:
        """True if a sample can be found."""
        return self._sample is not None or self._loader is not None

    @cached_property
    def _loader(self) -> object:
        """Data from which a sample can be taken, or None."""
        if isinstance(self._sample, DataLoader):
            return self._sample
        return trainer_loader(self.model) if self.data is None else self.data

    @cached_property
    def arguments(self) -> tuple[tuple, dict]:
        """Positional and keyword arguments of a model call with the sample."""
        if self._sample is not None and not isinstance(self._sample, DataLoader):
            return sample_arguments(self.model, self._sample, self._example_kwargs)
        data = module_loader(self.model) if self._loader is None else self._loader
        name = CALIBRATION_DATA if data is self.data else "The data of the sample"
        with torch.random.fork_rng(devices=[]):  # a shuffling loader must not advance the state
            batch = next(batches_of(self.model, data, name=name), None)
        if batch is None:
            raise UsageError(
                "The data hold no batch, so there is no sample of the input", code="data-empty"
            )
        return batch.args, batch.kwargs | self._example_kwargs

    @cached_property
    def inputs(self) -> ForwardInputs:
        """Signature of the network's inputs."""
        known = getattr(self.model, "nano_inputs", None)
        if isinstance(known, ForwardInputs):  # an accelerated model
            return known
        return ForwardInputs.of(self.model, *self.arguments)

    @cached_property
    def outputs(self) -> Structure:
        """Structure of the model's result for the sample.

        Raises
        ------
        UsageError
            If the model does not run on the sample, or returns no tensor.
        """
        known = getattr(self.model, "nano_outputs", None)
        if isinstance(known, Structure):  # an accelerated model
            return known
        leaves, structure = flatten(self.result)
        name = type(self.model).__name__
        if not leaves:
            raise UsageError(
                f"{name} returns no tensor for the sample, so it cannot be converted",
                code="model-output",
            )
        refuse_objects(structure, f"{name} returns")
        return structure

    @cached_property
    def result(self) -> object:
        """The model's result for the sample.

        Raises
        ------
        UsageError
            If the model does not run on the sample.
        """
        sentence = f"{type(self.model).__name__} fails on the sample of its input"
        with as_usage_error(sentence, "; pass another input_sample", code="model-input"):
            return self._called(self.sample_tensors)

    def _called(self, inputs: Sequence[torch.Tensor], noise: float = 0.0, times: int = 1) -> object:
        """Call the model on copies of flat inputs; restore its attributes and buffers."""
        model = self.model
        self._calls += 1  # seed: no two calls use the same random numbers
        with evaluating(model), seeded(self._calls), state_restored(model) as changed:
            for _ in range(times):
                copies = [each.clone() for each in inputs]
                args, kwargs = self.inputs.unflatten(copies)
                if noise:
                    state = {key: _add_noise(each, noise) for key, each in model.named_parameters()}
                    result = torch.func.functional_call(model, state, args, kwargs)
                else:
                    result = model(*args, **kwargs)
        self._effects = changed, not all(map(torch.equal, inputs, copies))
        return result

    def probes(self, options: BuildOptions) -> list[Probe]:
        """Return the inputs for comparing accelerated models, with the original's results.

        The first is the sample. Inputs that the model rejects are omitted.
        """
        if not self.has_sample:
            return []
        if PREPROCESSING.intersection(options.conversion):  # results differ on purpose
            return [Probe("the sample", self.sample_tensors, None)]
        axes = self.dynamic_dimensions(options.dynamic_axes)
        key = str(axes)
        if key not in self._probes:
            self._probes[key] = self._make_probes(axes)
        return self._probes[key]

    def _make_probes(self, axes: list[list[int]]) -> list[Probe]:
        sample = self.sample_tensors
        vars(self).pop("result", None)  # call again here, to observe side effects
        probes = [Probe("the sample", sample, self.result)]
        if self._side_effects is None:
            self._side_effects = self._observe_side_effects(sample)
        finite = _is_finite(self.result)
        for derive in derived_inputs(sample, axes):
            derived = derive(probes[min(1, len(probes) - 1)].inputs)
            if derived is None:
                continue
            for inputs in derived.candidates:
                result = self.original(inputs)
                if result is not None and (_is_finite(result) or not finite):
                    probes.append(Probe(derived.description, inputs, result, derived.resized))
                    break
        return probes

    def _observe_side_effects(self, sample: list[torch.Tensor]) -> tuple[set[str], bool, bool]:
        """Return the attributes that a call changes, and if it changes later results or inputs."""
        attributes, changes_inputs = self._effects
        keeps_state = False
        if attributes:
            once, twice = (self._called(sample, times=count) for count in (1, 2))
            keeps_state = difference(once, twice, FP32.error_bound) is not None
        return attributes, keeps_state, changes_inputs

    def check_side_effects(self, model: torch.nn.Module, method: Method) -> None:
        """Raise if results depend on earlier calls; warn if calls change attributes or inputs.

        Raises
        ------
        DisagreementError
            If the original keeps state between calls, which an accelerated model would lose.
        """
        if self.runs_code(model) or self._side_effects is None:
            return
        name, (attributes, keeps_state, changes_inputs) = (
            type(self.model).__name__,
            self._side_effects,
        )
        listed = ", ".join(map(repr, sorted(attributes)))
        if keeps_state:
            raise DisagreementError(
                f"{name} keeps state between calls in {listed}, which method "
                f"{method.name!r} would lose; pass the state as an input and return it, or use "
                "precision='bf16' without an accelerator, which runs the original Python code"
            )
        if attributes:
            warnings.warn(
                f"{name} sets {listed} when it is called; a model of method {method.name!r} does "
                "not",
                stacklevel=user_stacklevel(),
            )
        if changes_inputs:
            warnings.warn(
                f"{name} changes its input in place; a model of method {method.name!r} does not",
                stacklevel=user_stacklevel(),
            )

    def original(self, inputs: Sequence[torch.Tensor], noise: float = 0.0) -> object:
        """Return the model's result for flat inputs, or None if the model fails.

        Parameters
        ----------
        inputs : sequence of Tensor
        noise : float
            Relative size of noise added to weights and inputs.
        """
        if noise:
            inputs = [_add_noise(each, noise) for each in inputs]
        try:
            with quiet():
                return self._called(inputs, noise)
        except Exception:
            return None

    def alternative(self, inputs: Sequence[torch.Tensor]) -> object:
        """Return the result without the transformer fast path, or None if there is no attention.

        The fast path returns zeros at padded positions; the ordinary path does not.
        """
        if not any(isinstance(part, torch.nn.MultiheadAttention) for part in self.model.modules()):
            return None
        with fastpath_disabled():
            return self.original(inputs)

    def refused_negatives(self) -> list[int]:
        """Return the positions of integer inputs for which the model rejects negative values."""
        return self._refused_negatives if self.has_sample else []

    @cached_property
    def _refused_negatives(self) -> list[int]:
        sample, refused = self.sample_tensors, []
        for position, tensor in enumerate(sample):
            if tensor.dtype not in _SIGNED or not tensor.numel():
                continue
            other = tensor.contiguous().clone()
            other.view(-1)[0] = -1
            if self.original([*sample[:position], other, *sample[position + 1 :]]) is None:
                refused.append(position)
        return refused

    def run(self, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> object:
        """Return an accelerated model's result for flat inputs; restore the model's state."""
        args, kwargs = self.inputs.unflatten([each.clone() for each in inputs])
        self._calls += 1
        with seeded(self._calls), state_restored(getattr(model, "nano_code", None)):
            return model(*args, **kwargs)

    def verified_sizes(
        self, graph: Callable[..., Sequence[torch.Tensor]]
    ) -> list[list[int | None]]:
        """Return the input sizes that a flat graph requires; None for sizes that may change.

        The number of rows is always free. Another size is free if the graph agrees with the model
        for a different value. Equal sizes are treated as one.
        """
        sample = self.sample_tensors
        sizes = {size for tensor in sample for size in tensor.shape[1:]}
        free = {size for size in sizes if self._takes_other(graph, sample, size)}
        return [
            [None if axis == 0 or size in free else size for axis, size in enumerate(each.shape)]
            for each in sample
        ]

    def _takes_other(self, graph, sample: list[torch.Tensor], size: int) -> bool:
        axes = [
            [axis for axis, each in enumerate(tensor.shape) if axis and each == size]
            for tensor in sample
        ]
        derived = other_sizes(sample, axes)
        for inputs in derived.candidates if derived else ():
            expected = self.original(inputs)
            if expected is None:
                continue
            try:
                with torch.no_grad():
                    actual = self.outputs.rebuild(graph(*(each.clone() for each in inputs)))
            except Exception:
                return False
            bound = (BF16 if torch.is_autocast_enabled("cpu") else FP32).error_bound
            return difference(expected, actual, bound) is None
        return False

    def runs_code(self, model: torch.nn.Module) -> bool:
        """Return True if an accelerated model runs the Python code of the original."""
        return getattr(model, "nano_code", None) is not None

    @cached_property
    def _sample_leaves(self) -> list[torch.Tensor]:
        return list(map(torch.as_tensor, self.inputs.flatten(*self.arguments)))

    @property
    def sample_tensors(self) -> list[torch.Tensor]:
        """Copy of the sample as a flat list of tensors, since a model may change its input."""
        return [each.clone() for each in self._sample_leaves]

    def sample_arrays(self) -> list[np.ndarray]:
        return list(map(as_array, self.sample_tensors))

    def dynamic_dimensions(self, axes: bool | Mapping[str, Iterable[int]]) -> list[list[int]]:
        """Return the dimensions of each input that may change.

        Parameters
        ----------
        axes : bool or mapping
            True: the first dimension of each input. A mapping lists dimensions by input name:
            ``{"x": {0: "batch", 2: "length"}}`` or ``{"x": [0, 2]}``. Other names are outputs.

        Raises
        ------
        UsageError
            If no input is named, or a dimension does not exist.
        """
        names, tensors = self.inputs.names, self.sample_tensors
        if not isinstance(axes, bool | Mapping | type(None)):
            raise UsageError(
                f"dynamic_axes must be True, False or a dict, not {axes!r}",
                code="argument-type",
                argument="dynamic_axes",
            )
        if not isinstance(axes, Mapping):
            return [[0] if axes and tensor.ndim else [] for tensor in tensors]
        if axes and not set(axes).intersection(names):
            raise UsageError(
                f"dynamic_axes names {', '.join(map(repr, axes))}, but the inputs are "
                f"{', '.join(names)}",
                code="argument-value",
                argument="dynamic_axes",
                allowed=list(names),
            )
        dimensions = []
        for name, tensor in zip(names, tensors, strict=True):
            wanted = list(axes.get(name, ()))
            if any(not isinstance(d, int) or not -tensor.ndim <= d < tensor.ndim for d in wanted):
                raise UsageError(
                    f"dynamic_axes gives {wanted} for {name!r}, which has {tensor.ndim} dimensions",
                    code="argument-value",
                    argument="dynamic_axes",
                )
            dimensions.append(sorted({dimension % tensor.ndim for dimension in wanted}))
        return dimensions

    def general_sample(self, axes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the sample with dimensions of size 1 repeated to 2, if the model accepts it.

        ``torch.export`` treats a size of 1 as a constant, because it broadcasts, and expects the
        sample's strides of all inputs.
        """
        sample = [tensor.contiguous() for tensor in self.sample_tensors]
        grown = list(sample)
        for position, dimensions in enumerate(axes):
            for dimension in dimensions:
                if grown[position].shape[dimension] == 1:
                    grown[position] = grown[position].repeat_interleave(2, dimension)
        try:
            with self.flat_module() as module:
                module(*grown)
        except Exception:
            return sample
        return grown

    @contextmanager
    def flat_module(self) -> Iterator[FlatModule]:
        """Context manager that yields the model in evaluation mode with flat inputs and outputs."""
        with evaluating(self.model), state_restored(self.model):
            yield FlatModule(self.model, self.inputs).eval()

    def calibration_arrays(self, options: BuildOptions) -> Iterator[list[np.ndarray]]:
        for tensors in self.calibration_tensors(options):
            yield list(map(as_array, tensors))

    def calibration_tensors(self, options: BuildOptions) -> Iterator[list[torch.Tensor]]:
        """Yield calibration batches as flat lists of tensors, up to `options.sample_size` rows.

        Raises
        ------
        UsageError
            If calibration data are missing.
        """
        if self.data is None:
            raise UsageError(
                "Calibration data are needed to quantize to int8; pass calib_data, a DataLoader or "
                "a batch of the model's input",
                code="argument-missing",
                argument="calib_data",
            )
        batches = batches_of(self.model, self.data, self.inputs, CALIBRATION_DATA)
        for batch in first_batches(batches, options.sample_size):
            yield list(map(torch.as_tensor, self.inputs.flatten(batch.args, batch.kwargs)))


# More inputs are derived from a sample with few rows, whose results may be near zero.
_FEW_ROWS = 4
_OTHER_SAMPLES = 4


class DerivedInputs(NamedTuple):
    """Candidate test inputs that are derived from a sample, e.g. with other values or sizes.

    Attributes
    ----------
    description : str
    resized : bool
        True if sizes differ from the sample.
    candidates : list of list of Tensor
        Flat inputs; the first that the model accepts is used.
    """

    description: str
    resized: bool
    candidates: list[list[torch.Tensor]]


def derived_inputs(
    sample: Sequence[torch.Tensor], axes: Sequence[Sequence[int]]
) -> Iterator[Callable[[Sequence[torch.Tensor]], DerivedInputs | None]]:
    """Yield functions that derive test inputs from the last accepted inputs.

    Parameters
    ----------
    sample : sequence of Tensor
    axes : sequence of sequence of int
        Dimensions of each tensor whose sizes may change.
    """
    yield _other_values
    if sample and (not sample[0].ndim or len(sample[0]) <= _FEW_ROWS):
        for seed in range(1, _OTHER_SAMPLES):
            yield partial(_other_values, seed=seed)
    if any(axes):
        yield lambda inputs: other_sizes(inputs, axes)
        yield lambda inputs: _one_row(inputs, sample, axes)


def _other_values(inputs: Sequence[torch.Tensor], seed: int = 0) -> DerivedInputs | None:
    shuffled = [_shuffled(each, seed) for each in inputs]
    if all(map(_same, shuffled, inputs)):
        return None
    real = [each.is_floating_point() or each.is_complex() for each in inputs]
    reals = [
        other if is_real else one
        for other, one, is_real in zip(shuffled, inputs, real, strict=True)
    ]
    rolled = [
        other if is_real or not one.ndim else one.roll(1, 0)
        for other, one, is_real in zip(shuffled, inputs, real, strict=True)
    ]
    # integers may be indices: ids can be shuffled freely, edges of a graph cannot
    candidates = [shuffled, rolled, reals]
    distinct = [each for each in candidates if not all(map(_same, each, inputs))]
    return DerivedInputs("other values", False, distinct)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _shuffled(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a tensor with other values in the same range, in shuffled order."""
    if not tensor.numel():
        return tensor
    generator = torch.Generator().manual_seed(tensor.numel() + 7919 * seed)
    order = torch.randperm(tensor.numel(), generator=generator)
    mixed = tensor.reshape(-1)[order].reshape(tensor.shape)
    if not tensor.is_floating_point():
        return mixed
    finite = bool(torch.isfinite(tensor).all())
    low, high = (float(tensor.min()), float(tensor.max())) if finite else (0.0, 0.0)
    if not finite or low == high == 0.0:  # a mask, or an initial state
        noise = torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
        return mixed if not finite else noise
    if low == high:
        factor = 0.5 + torch.rand(tensor.shape, generator=generator)
        return tensor * factor.to(tensor.dtype)
    if seed:
        drawn = torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
        return low + (high - low) * drawn
    # mirrored, so that sums and means differ, too
    return (low + high - mixed).clamp(low, high)


def other_sizes(
    inputs: Sequence[torch.Tensor], axes: Sequence[Sequence[int]]
) -> DerivedInputs | None:
    """Derive inputs in which all variable sizes grow, all shrink, or only the row count grows."""
    rows = _rows(inputs, axes)
    grown = {_key(size, axis): size + _step(size, axis) for size, axis in _sizes(inputs, axes)}
    shrunk = {
        _key(size, axis): max(1, size - _step(size, axis)) if axis else size + 1
        for size, axis in _sizes(inputs, axes)
    }
    only_rows = {_key(rows, 0): rows + 1} if rows is not None else {}
    others = [_resized(inputs, axes, each) for each in (grown, shrunk, only_rows) if each]
    several = any(dimension for each in axes for dimension in each)
    description = "other sizes" if several or rows is None else f"{rows + 1} rows"
    return DerivedInputs(description, True, others) if others else None


def _one_row(inputs, sample, axes) -> DerivedInputs | None:
    rows = _rows(sample, axes)
    if rows is None or rows == 1:
        return None
    return DerivedInputs("one row", True, [_resized(inputs, axes, {_key(rows, 0): 1})])


def _rows(sample, axes) -> int | None:
    """Return the number of rows of the first tensor whose dimension 0 may change, or None."""
    sizes = (tensor.shape[0] for tensor, each in zip(sample, axes, strict=True) if 0 in each)
    return next(sizes, None)


def _sizes(sample, axes) -> list[tuple[int, int]]:
    return [
        (tensor.shape[dimension], dimension)
        for tensor, each in zip(sample, axes, strict=True)
        for dimension in each
    ]


def _key(size: int, dimension: int) -> tuple[int, bool]:
    """Return a key shared by equal sizes, which change together; row counts have separate keys."""
    return size, dimension == 0


def _step(size: int, dimension: int) -> int:
    """Return the step by which a size changes: 1 row, or the largest power of 2 dividing it."""
    if dimension == 0:
        return 2 if size == 1 else 1
    return next(step for step in (32, 16, 8, 4, 2, 1) if size % step == 0)


def _resized(inputs, axes, sizes: dict) -> list[torch.Tensor]:
    resized = []
    for tensor, each in zip(inputs, axes, strict=True):
        for dimension in each:
            size = tensor.shape[dimension]
            wanted = sizes.get(_key(size, dimension), size)
            if wanted != size and size:
                tensor = tensor.index_select(dimension, torch.arange(wanted) % size)
        resized.append(tensor)
    return resized


@contextmanager
def state_restored(model: torch.nn.Module | None) -> Iterator[set[str]]:
    """Context manager that restores a module's attributes and buffers at exit.

    Yields
    ------
    set of str
        Receives the names of changed attributes and buffers at the end.
    """
    changed: set[str] = set()
    modules = [] if model is None else list(model.named_modules())
    before = [(name, module, dict(vars(module)), _contents(module)) for name, module in modules]
    try:
        yield changed
    finally:
        for name, module, attributes, contents in before:
            prefix = f"{name}." if name else ""
            for key, value in list(vars(module).items()):
                if key not in attributes or attributes[key] is not value:
                    changed.add(prefix + key)
                    vars(module).pop(key)
            vars(module).update(attributes)
            for (owner, key), value in contents.items():
                changed.update(
                    {prefix + str(key)} if _restore_content(owner, key, value, module) else ()
                )


def _contents(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Return copies of a module's buffers, and of tensors and containers in its attributes."""
    contents: dict[tuple[str, str], Any] = {}
    for key, value in module._buffers.items():
        if value is not None:
            contents["_buffers", key] = (value, value.detach().clone())
    for key, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            contents["", key] = (value, value.detach().clone())
        elif isinstance(value, (list, dict, set)) and not key.startswith("_"):
            contents["", key] = (value, value.copy())
    return contents


def _restore_content(owner: str, key: str, kept: tuple[Any, Any], module: torch.nn.Module) -> bool:
    value, copy = kept
    changed = False
    if owner and module._buffers.get(key) is not value:
        module._buffers[key] = value
        changed = True
    if isinstance(value, torch.Tensor):
        if value.shape == copy.shape and not _equal(value, copy):
            with torch.no_grad():
                value.copy_(copy)
            changed = True
    elif len(value) != len(copy):
        value.clear()
        value.extend(copy) if isinstance(value, list) else value.update(copy)
        changed = True
    return changed


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device.type == "meta" or one.is_quantized or one.layout is not torch.strided:
        return True
    if one.is_floating_point():  # NaN equals NaN here
        one, other = one.nan_to_num(), other.nan_to_num()
    return torch.equal(one, other)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Temporarily set PyTorch's random state from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        yield
