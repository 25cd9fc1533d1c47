"""Keras models with sample data; arguments, results and data are converted to flat lists.

Networks of other runtimes take and return flat lists of arrays. :class:`KerasCallSignature`
describes the nesting of a call's arguments, and a
:class:`~bigdl.nano.acceleration.structure.Structure` that of its results.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import keras
import numpy as np

from bigdl.common.errors import UsageError, as_usage_error, require
from bigdl.nano.acceleration import structure as nesting
from bigdl.nano.acceleration.agreement import PREPROCESSING
from bigdl.nano.acceleration.method import BuildOptions, Probe
from bigdl.nano.acceleration.structure import (
    Structure,
    first_batches,
    flatten,
    is_tensor,
    read,
    refuse_objects,
)

if TYPE_CHECKING:
    import tensorflow as tf

_OF_KERAS = ("training", "mask")


class Port(NamedTuple):
    """Specification of one tensor of a call.

    Attributes
    ----------
    name : str
    shape : tuple of int or None
        Sizes, None for dynamic ones; the first dimension is the batch.
    dtype : str
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class KerasCallSignature(nesting.CallSignature):
    """Nested structure and tensors of the arguments in calls of a Keras model.

    Attributes
    ----------
    ports : tuple of Port
        Specifications of the tensors in the order of the structures.
    """

    ports: tuple[Port, ...] = ()

    @classmethod
    def of_specs(cls, model: keras.Model, arguments: Sequence[Any]) -> KerasCallSignature:
        """Create a call signature from one spec, or nested specs, per argument of the model's call.

        Parameters
        ----------
        model : keras.Model
        arguments : sequence
            Nests of objects with a shape and a dtype: ``tf.TensorSpec``, ``keras.KerasTensor``,
            ``keras.InputSpec``, tensors, ndarrays. The first dimension is the batch.
        """
        parameters = tuple(_parameters(model)[: len(arguments)]) or ("inputs",)
        if len(parameters) < len(arguments):
            raise UsageError(
                f"{type(model).__name__}.call takes {len(parameters)} inputs, but {len(arguments)} "
                "were given",
                code="model-input",
            )
        specs: list[Any] = []
        structures = {}
        for name, argument in zip(parameters, arguments, strict=True):
            leaves, structures[name] = flatten(plain(argument), _is_spec)
            specs += leaves
        paths = [path for name, each in structures.items() for path in each.paths(name)]
        names: list[Any] = [getattr(spec, "name", None) for spec in specs]
        if not all(names) or len(set(names)) < len(names):
            names = [path.replace(".", "_") for path in paths]
        return cls(parameters, structures, ports=tuple(map(_port, specs, names)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(port.name for port in self.ports)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list:
        """Flatten the arguments of a call to tensors in the order of :attr:`ports`.

        As in Keras, the first parameter may have other forms: a dict by name for a list, a list of
        one for a tensor, nested Python numbers.

        Raises
        ------
        UsageError
            If an argument is missing, duplicate, unknown or has a different nesting.
        """
        leaves: list = []
        for name, value in self._bind(args, kwargs or {}).items():
            structure = self.structures[name]
            structure.take(self._conformed(structure, value), name, leaves)
        return leaves

    def arrays(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list:
        """Flatten the arguments of a call to ndarrays of the ports' types and ranks."""
        leaves = self.flatten(args, kwargs)
        return [as_array(leaf, port) for leaf, port in zip(leaves, self.ports, strict=True)]

    def pack(self, leaves: Iterable[Any]) -> tuple:
        """Return the positional arguments of a call from its flat tensors."""
        return self.unflatten(leaves)[0]

    def to_json(self) -> dict:
        return {**super().to_json(), "ports": ports_as_json(self.ports)}

    @classmethod
    def from_json(cls, data: Mapping, **others: object) -> KerasCallSignature:
        return super().from_json(data, ports=ports_from_json(data["ports"]))

    def _conformed(self, structure: Structure, value: object) -> object:
        """Convert a value to the nesting of `structure` in the cases that Keras also accepts."""
        single = structure.node_type == "tensor"
        if (
            isinstance(value, Mapping)
            and len(self.parameters) == 1
            and structure.node_type != "dict"
        ):
            if set(self.names) <= set(value):
                listed = [value[name] for name in self.names]
                return listed[0] if single else listed
        elif single and isinstance(value, (list, tuple)):
            one = len(value) == 1 and (is_tensor(value[0]) or isinstance(value[0], (list, tuple)))
            return value[0] if one and is_tensor(value[0]) else np.asarray(value)
        elif not single and len(structure.children) == 1 and is_tensor(value):
            return [value] if structure.node_type != "dict" else {structure.keys[0]: value}
        elif structure.node_type == "dict" and isinstance(value, (list, tuple)):
            return dict(zip(structure.keys, value, strict=False))
        return value


def ports_as_json(ports: Iterable[Port]) -> list[list]:
    """Convert ports to JSON-serializable lists."""
    return [[port.name, list(port.shape), port.dtype] for port in ports]


def ports_from_json(data: Iterable[Sequence[Any]]) -> tuple[Port, ...]:
    """Convert lists from :func:`ports_as_json` to ports."""
    return tuple(Port(name, tuple(shape), dtype) for name, shape, dtype in data)


def as_array(value: object, port: Port | None = None) -> np.ndarray:
    """Convert a tensor to an ndarray of a port's type and rank, without a copy if possible."""
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if port is None or port.dtype == "string":
        return array
    if str(array.dtype) != port.dtype:
        array = nesting.cast_array(array, numpy_type(port.dtype), port.name)
    elif array.dtype.name == "bfloat16":  # runtimes do not accept NumPy's bfloat16
        array = array.astype(np.float32)
    rank = len(port.shape)
    if array.ndim == rank - 1 and port.shape[-1] == 1:
        return array[..., None]
    if array.ndim == rank + 1 and array.shape[-1] == 1:
        return array[..., 0]
    return array


def plain(value: object) -> object:
    """Replace Keras' tracked containers in nested tensors by builtin ones."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        create: Any = type(value)
        return create(*map(plain, value))
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value] if isinstance(value, list) else tuple(map(plain, value))
    return value


def numpy_type(name: str) -> np.dtype:
    return np.dtype(np.float32 if name == "bfloat16" else name)


def _is_spec(value: object) -> bool:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return True
    if not isinstance(value, (Mapping, list, tuple)):
        raise UsageError(
            "input_spec must be a tf.TensorSpec, or a list or dict of them, not "
            f"{type(value).__name__}",
            code="argument-type",
            argument="input_spec",
        )
    return False


def _port(spec: tf.TensorSpec, name: str) -> Port:
    dtype = getattr(spec.dtype, "name", None) or str(spec.dtype)
    shape = tuple(None if size is None else int(size) for size in spec.shape)
    return Port(name, (None, *shape[1:]), dtype)


def _parameters(model: keras.Model) -> list[str]:
    """Return the names of the positional parameters of ``call`` that are inputs."""
    return [
        name
        for name, each in inspect.signature(model.call).parameters.items()
        if name not in _OF_KERAS and each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]


def batches_of(
    data: tuple[Any, Any], inputs: KerasCallSignature, size: int
) -> Iterator[tuple[list[np.ndarray], Any]]:
    """Yield the flat inputs and the targets of each batch; targets are None if there are none.

    Parameters
    ----------
    data : tuple
        ``x`` and ``y``. `x` may be an ndarray, a tensor, a nest of them, or a ``tf.data.Dataset``
        of ``x``, ``(x, y)`` or ``(x, y, weight)``, batched or not.
    inputs : KerasCallSignature
    size : int
        Number of rows of a batch; batches from a dataset stay as they are.
    """
    x, y = data
    if not _is_stream(x):
        leaves = _leaves(x, inputs)
        for start in range(0, len(leaves[0]), size):
            rows = slice(start, start + size)
            yield [leaf[rows] for leaf in leaves], _sliced(y, rows)
        return
    features, _ = next(map(_split, read(cast("Iterable[Any]", x))), (None, None))
    if features is None:
        return
    if not _is_batched(features, inputs):
        x = x.batch(size)
    for features, targets in map(_split, read(x)):
        yield _leaves(features, inputs), _sliced(targets, slice(None))


def rows_as_arrays(
    data: tuple[Any, Any], inputs: KerasCallSignature, count: int, size: int
) -> Iterator[list[np.ndarray]]:
    """Yield flat lists of input arrays in batches, up to `count` rows.

    Raises
    ------
    UsageError
        If there is no row.
    """
    batches = (arrays for arrays, _ in batches_of(data, inputs, size))
    return first_batches(batches, count, empty="x holds no row; give at least one")


def first_rows(data: tuple[Any, Any], inputs: KerasCallSignature, count: int) -> list[np.ndarray]:
    """Return the first `count` rows, or all rows if there are fewer, as a flat list of arrays."""
    columns = zip(*rows_as_arrays(data, inputs, count, count), strict=True)
    return [np.concatenate(column)[:count] for column in columns]


def _is_stream(x: object) -> bool:
    if is_tensor(x) or isinstance(x, (list, tuple, Mapping)):
        return False
    if not hasattr(x, "element_spec"):
        raise UsageError(
            "x must be an array, a tensor, a list or dict of them, or a tf.data.Dataset, not a "
            f"{type(x).__name__}",
            code="data-type",
            argument="x",
        )
    return True


def _split(element: object) -> tuple[Any, Any]:
    if isinstance(element, tuple):
        return element[0], element[1] if len(element) > 1 else None
    return element, None


def _leaves(x: Any, inputs: KerasCallSignature) -> list[np.ndarray]:
    several = isinstance(x, (list, tuple)) and len(inputs.parameters) == len(x) > 1
    return inputs.arrays(x if several else [x])


def _is_batched(features: object, inputs: KerasCallSignature) -> bool:
    """Return True if an element is a batch; single rows have one dimension fewer than the input."""
    ranks = [np.ndim(leaf) for leaf in flatten(features)[0]]
    return any(rank >= len(port.shape) for rank, port in zip(ranks, inputs.ports, strict=False))


def _sliced(y: object, rows: slice) -> object:
    """Return rows of nested targets as ndarrays."""
    leaves, structure = flatten(y)
    return structure.rebuild([np.asarray(leaf)[rows] for leaf in leaves])


# Size of dynamic dimensions, except the batch, in a random sample.
_OPEN_SIZE = 8
_OTHER_SAMPLES = 3
_RANDOM_ROWS = 8


class KerasSource:
    """A Keras model with sample data, from which acceleration methods build a faster model.

    Parameters
    ----------
    model : keras.Model
        Model; it is built if necessary, but not changed otherwise.
    input_spec : optional
        Nested ``tf.TensorSpec`` of the input, or a list of them for several arguments.
    x, y : optional
        Data for calibration: ndarrays, tensors, nests of them, or a ``tf.data.Dataset``.
    batch : int, optional
        Number of rows of a calibration batch.

    Raises
    ------
    UsageError
        If an operation needs the input's specification and it is unknown.
    """

    def __init__(
        self,
        model: keras.Model,
        input_spec: Any = None,  # a nest of specs
        x: object = None,
        y: object = None,
        batch: int | None = None,
    ):
        self.model = model
        self.data = (x, y)
        self.exporter: str | None = None
        self.cache_key: str | None = None
        self.conversion_warning: str | None = None
        self._probes: list[Probe] | None = None
        self._input_spec = input_spec
        self._batch = batch

    @cached_property
    def inputs(self) -> KerasCallSignature:
        """Call signature of the model: names, types and nesting of its arguments."""
        known = vars(self.model).get("nano_inputs")  # of an accelerated model
        return known or KerasCallSignature.of_specs(self.model, self._arguments())

    def _arguments(self) -> list:
        """Return one nested structure of specs or tensors per argument of the model's call."""
        model, spec = self.model, self._input_spec
        if getattr(model, "inputs", None):
            symbolic = plain(model.inputs if isinstance(model, keras.Sequential) else model.input)
            if isinstance(symbolic, (list, tuple)) and len(symbolic) == 1:
                symbolic = symbolic[0]
            return [symbolic if spec is None else _like(symbolic, spec)]
        if spec is None:
            x = self.data[0]
            called = None if x is not None else _specs_of_call(model)
            if called is not None:
                return called
            if x is None:
                raise UsageError(
                    f"The input of {type(model).__name__} is not known, as it is a subclass of "
                    "keras.Model; pass input_spec, e.g. tf.TensorSpec((None, 224, 224, 3), "
                    "tf.float32)",
                    code="argument-missing",
                    argument="input_spec",
                )
            spec = x
            if _is_stream(x):  # assume batches, since single rows look the same here
                spec, _ = next(map(_split, read(cast("Iterable[Any]", x))), (None, None))
                if spec is None:
                    raise UsageError(
                        "x holds no row; give at least one", code="data-empty", argument="x"
                    )
        elif isinstance(spec, (list, tuple)) and len(spec) == 1:
            spec = spec[0]
        several = isinstance(spec, (list, tuple)) and len(_parameters(model)) >= len(spec) > 1
        return list(spec) if several else [spec]

    def _call(self, tensors: Iterable[object]) -> object:
        return self.model(*self.inputs.pack(tensors), training=False)

    @cached_property
    def graph(self) -> tf.types.experimental.PolymorphicFunction:
        """``tf.function`` of the model with flat inputs and outputs."""
        tf = require("tensorflow", "tf")

        def flat(*tensors):
            leaves, self._structure = flatten(plain(self._call(tensors)))
            return tuple(map(tf.identity, leaves))

        pairs = zip(self.inputs.ports, self.graph_names, strict=True)
        specs = [tf.TensorSpec(port.shape, port.dtype, name=name) for port, name in pairs]
        return tf.function(flat, input_signature=specs, autograph=False)

    @cached_property
    def concrete(self) -> tf.types.experimental.ConcreteFunction:
        """Concrete function of :attr:`graph`."""
        name = type(self.model).__name__
        sentence = f"{name} cannot be called with its input in a graph"
        with as_usage_error(sentence, "; pass another input_spec", code="model-input"):
            if not self.model.built:
                self._call(self.random_arrays(1))
            concrete = self.graph.get_concrete_function()
        if not concrete.outputs:
            raise UsageError(
                f"{name} returns no tensor, so it cannot be converted", code="model-output"
            )
        return concrete

    @property
    def outputs(self) -> Structure:
        """Nested structure of the model's results, found by tracing the model."""
        known = vars(self.model).get("nano_outputs")  # of an accelerated model
        if known is not None:
            return known
        assert self.concrete is not None
        refuse_objects(self._structure, f"{type(self.model).__name__} returns")
        return self._structure

    @cached_property
    def output_ports(self) -> tuple[Port, ...]:
        """Specifications of the output tensors."""
        known = vars(self.model).get("nano_ports")  # of an accelerated model
        if known is not None:
            return known
        tensors = self.concrete.outputs
        shapes = [() if each.shape.rank is None else tuple(each.shape) for each in tensors]
        types = [each.dtype.name for each in tensors]
        return tuple(map(Port, self.outputs.paths(""), shapes, types))

    def probes(self, options: BuildOptions) -> list[Probe]:
        """Return test inputs and the model's results for comparisons with an accelerated model.

        The first is the sample. Further inputs that the model does not accept are left out.
        """
        if PREPROCESSING.intersection(options.conversion):  # the results differ intentionally
            return [Probe("the sample", self.sample_arrays(), None)]
        if self._probes is None:
            sample = self.sample_arrays()
            sentence = f"{type(self.model).__name__} fails on the sample of its input"
            with as_usage_error(sentence, "; pass another input_spec", code="model-input"):
                self._probes = [Probe("the sample", sample, self._called(sample))]
            rows = len(sample[0]) + 2 if sample and np.ndim(sample[0]) else 1
            drawn = [[_mirrored(each, seed) for each in sample] for seed in range(_OTHER_SAMPLES)]
            more = [np.take(each, np.arange(rows) % len(each), 0) for each in drawn[0]]
            for words, inputs in (*(("other values", each) for each in drawn), ("rows", more)):
                result = self.original(inputs)
                if result is not None:
                    words = f"{rows} rows" if inputs is more else words
                    self._probes.append(Probe(words, inputs, result, inputs is more))
        return self._probes

    def _called(self, inputs: Sequence[np.ndarray]) -> object:
        return self.model(
            *self.inputs.pack(map(keras.ops.convert_to_tensor, inputs)), training=False
        )

    def original(self, inputs: Sequence[np.ndarray], noise: float = 0.0) -> object:
        """Return the model's results for flat inputs, or None if the model rejects the inputs.

        Parameters
        ----------
        inputs : sequence of ndarray
        noise : float
            Relative size of random noise added to the inputs.
        """
        if noise:
            random = np.random.default_rng(0)
            inputs = [
                (each * (1 + noise * random.standard_normal(each.shape))).astype(each.dtype)
                if np.issubdtype(each.dtype, np.floating)
                else each
                for each in inputs
            ]
        try:
            return self._called(inputs)
        except Exception:
            return None

    def alternative(self, inputs: Sequence[np.ndarray]) -> None:
        """Return None, since Keras has no second code path with other valid results."""

    def refused_negatives(self) -> list[int]:
        """Return positions of integer inputs for which the model refuses negative numbers."""
        sample, refused = self.sample_arrays(), []
        for position, array in enumerate(sample):
            if array.dtype.kind != "i" or not array.size:
                continue
            other = array.copy()
            other.flat[0] = -1
            if self.original([*sample[:position], other, *sample[position + 1 :]]) is None:
                refused.append(position)
        return refused

    def run(self, model: keras.Model, inputs: Sequence[np.ndarray]) -> object:
        """Return an accelerated model's results for flat inputs."""
        return model(*self.inputs.pack(inputs))

    def runs_code(self, model: keras.Model) -> bool:
        """Return False, since accelerated models run a graph instead of Python code."""
        return False

    def check_side_effects(self, model: keras.Model, method: object) -> None:
        """Do nothing, since layers keep their state in variables, which graphs contain."""

    def sample_arrays(self) -> list[np.ndarray]:
        """Return one row of data, or random numbers if there is no data, as a list of arrays."""
        if self.data[0] is not None:
            return first_rows(self.data, self.inputs, 1)
        return self.random_arrays(1)

    def random_arrays(self, rows: int) -> list[np.ndarray]:
        """Return random numbers from 0 to 1, or random zeros and ones, in the inputs' shapes."""
        random = np.random.default_rng(0)
        arrays = []
        for port in self.inputs.ports:
            shape = [rows, *(size or _OPEN_SIZE for size in port.shape[1:])]
            dtype = numpy_type(port.dtype)
            real = np.issubdtype(dtype, np.floating)
            numbers = random.random(shape) if real else random.integers(0, 2, shape)
            arrays.append(numbers.astype(dtype))
        return arrays

    def calibration_arrays(self, options: BuildOptions) -> Iterator[list[np.ndarray]]:
        """Yield flat lists of arrays from the data, up to the sample size.

        Without data, it yields random numbers.
        """
        if self.data[0] is None:
            for _ in range(2):
                yield self.random_arrays(_RANDOM_ROWS)
            return
        size = self._batch or _RANDOM_ROWS
        yield from rows_as_arrays(self.data, self.inputs, options.sample_size, size)

    @cached_property
    def graph_names(self) -> list[str]:
        """Input names that are valid in TensorFlow graphs and ONNX files."""
        safe = [re.sub(r"[^\w.-]", "_", name) for name in self.inputs.names]
        return [name if name[:1].isalnum() else f"x{name}" for name in safe]


_OF_OTHER_TYPES = (
    "Embedding",
    "Hashing",
    "CategoryEncoding",
    "Discretization",
    "TextVectorization",
)


def _specs_of_call(model: keras.Model) -> list | None:
    """Return specs of a subclassed model's arguments from the shapes of an earlier call.

    Keras records only shapes, so return None for a model with layers for integers or strings.
    """
    shapes = getattr(model, "_build_shapes_dict", None)
    names = {cls.__name__ for layer in model._flatten_layers() for cls in type(layer).__mro__}
    others = any(name in _OF_OTHER_TYPES or name.endswith("Lookup") for name in names)
    if not shapes or not model.built or others:
        return None
    shapes = shapes.get("input_shape", shapes) if len(shapes) == 1 else shapes
    arguments = list(shapes.values()) if isinstance(shapes, Mapping) else [shapes]

    def spec(shape):
        return keras.KerasTensor((None, *shape[1:]), model.variable_dtype)

    return [keras.tree.map_shape_structure(spec, each) for each in arguments]


def _mirrored(array: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return an array of the same shape with different values in the same range."""
    if not array.size or array.dtype.kind not in "iufb":
        return array
    random = np.random.default_rng(seed)
    mixed = random.permutation(array.ravel()).reshape(array.shape)
    if seed and array.dtype.kind == "f" and np.isfinite(array).all():
        return random.uniform(array.min(), array.max(), array.shape).astype(array.dtype)
    if array.dtype.kind == "f" and np.isfinite(array).all() and array.min() < array.max():
        mixed = (array.min() + array.max() - mixed).astype(array.dtype)
    return mixed


def _like(symbolic: object, spec: object) -> object:
    """Nest the user's specs like the inputs of a functional model."""
    leaves, structure = flatten(symbolic, _is_spec)
    if isinstance(spec, dict):
        if structure.node_type == "dict" and set(spec) == set(structure.keys):
            return {key: spec[key] for key in structure.keys}
        spec = list(spec.values())
    specs = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if len(specs) != len(leaves):
        raise UsageError(
            f"input_spec describes {len(specs)} inputs, but the model has {len(leaves)}",
            code="model-input",
            argument="input_spec",
        )
    return structure.rebuild(specs)
