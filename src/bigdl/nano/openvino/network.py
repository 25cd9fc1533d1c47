"""OpenVINO networks: reading, reshaping, writing, and compiling for a device.

All models accelerated with OpenVINO use this module, whatever their framework. A compiled network
takes and returns lists of arrays.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from bigdl.common.checks import check_choice, check_integer, check_positive
from bigdl.common.cpu import usable_cores
from bigdl.common.errors import LazyModule, UsageError, as_usage_error
from bigdl.common.private_folders import scratch_folder
from bigdl.nano.acceleration.precision import BF16, FP32, PRECISIONS
from bigdl.nano.acceleration.structure import cast_array
from bigdl.nano.acceleration.texts import as_strings
from bigdl.nano.openvino.integers import IntegerGuard, forbid_negative

if TYPE_CHECKING:
    import openvino as ov

NetworkSource: TypeAlias = "str | os.PathLike | tuple[bytes, bytes] | ov.Model"
"""A network, its file, or the bytes of its ``.xml`` and ``.bin`` files."""
Shapes: TypeAlias = "str | Mapping[str, object] | Mapping[int, object] | Sequence[object]"
"""Shapes of inputs: in one text, by name or position, or in order."""

openvino = LazyModule("openvino", "nano")

SAVED_NAME = "ov_saved_model"
"""Name, without suffix, of the two files of a network in a saved directory."""

_READABLE = (".xml", ".onnx")
# OpenVINO property names before 2022, and today's names.
_RENAMED = {
    "CPU_THREADS_NUM": "INFERENCE_NUM_THREADS",
    "CPU_THROUGHPUT_STREAMS": "NUM_STREAMS",
    "CPU_BIND_THREAD": "ENABLE_CPU_PINNING",
}
_RENAMED_VALUES = {"CPU_THROUGHPUT_AUTO": "AUTO", "CPU_THROUGHPUT_NUMA": "NUMA"}
_NAMED_VALUE = re.compile(r"\s*(?P<name>[^\[\](),]*?)\s*[\[(](?P<value>[^\[\]()]*)[\])]\s*(?:,|$)")


@functools.cache
def core():
    """Return the ``openvino.Core`` of this process, which is thread-safe."""
    return openvino.Core()


def checked_device(device: str) -> str:
    """Return a device name as this version of OpenVINO spells it; refuse missing devices.

    Parameters
    ----------
    device : str
        ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"`` (formerly ``"VPUX"``), or a combination such as
        ``"AUTO:GPU,CPU"``.

    Returns
    -------
    str

    Raises
    ------
    UsageError
        If this machine does not have the device.
    """
    name = str(device).upper().replace("VPUX", "NPU")
    plugin, _, listed = name.partition(":")
    combined = plugin in ("AUTO", "MULTI", "HETERO", "BATCH")
    wanted = [each.partition("(")[0] for each in listed.split(",") if each] if combined else [name]
    present = core().available_devices
    for each in wanted:
        each = each.lstrip("-")  # "AUTO:-GPU" excludes a device
        if not any(have == each or have.startswith(f"{each}.") for have in present):
            raise UsageError(
                f"Your machine don't have {each} device (only have {','.join(present)}), "
                "please modify the incoming device value.",
                code="processor-unsupported",
                argument="device",
                allowed=list(present),
            )
    return name


def supports_bf16() -> bool:
    """Return True if the processor has bfloat16 instructions."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def renamed_properties(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return properties under the names that OpenVINO uses today."""
    return {
        _RENAMED.get(key, key): _RENAMED_VALUES.get(value, value)
        if isinstance(value, str)
        else value
        for key, value in config.items()
    }


def read_network(source: NetworkSource):
    """Read a network from files, bytes or an ``openvino.Model``.

    Parameters
    ----------
    source : str, Path, pair of bytes, or openvino.Model
        An ``.xml`` file with its ``.bin`` file next to it, an ``.onnx`` file, a directory from
        :func:`write_network`, the content of the two files, or a network, which is returned
        unchanged.

    Returns
    -------
    openvino.Model

    Raises
    ------
    UsageError
        If the file does not exist or holds no network.
    """
    if isinstance(source, openvino.Model):
        return source
    if isinstance(source, tuple) and len(source) == 2:
        with as_usage_error(
            "OpenVINO cannot read the given bytes", text=reason, code="file-damaged"
        ):
            return core().read_model(*source)
    if not isinstance(source, str | os.PathLike):
        raise UsageError(
            "A network is the path of an .xml or .onnx file or an openvino.Model, "
            f"not {type(source).__name__}",
            code="argument-type",
        )
    path = Path(source)
    if path.is_dir():
        path = path / f"{SAVED_NAME}.xml"
    if path.suffix not in _READABLE:
        raise UsageError(
            f"A network is read from an .xml or .onnx file, not from {str(source)!r}",
            code="file-format",
            path=str(source),
        )
    if not path.is_file():
        raise UsageError(f"{str(path)!r} doesn't exist.", code="path-missing", path=str(path))
    with as_usage_error(
        f"OpenVINO cannot read {str(path)!r}", text=reason, code="file-damaged", path=str(path)
    ):
        return core().read_model(path)


def write_network(network, path: str | os.PathLike) -> Path:
    """Write a network as a pair of files, ``.xml`` and ``.bin``.

    Complete files replace existing ones atomically, so a network may overwrite the files that it
    was read from, whose weights are still mapped into memory.

    Parameters
    ----------
    network : openvino.Model
        Network to write; its constants keep their types.
    path : str or Path
        The ``.xml`` file, or a directory for ``ov_saved_model.xml``, which is created.

    Returns
    -------
    Path
        The ``.xml`` file.
    """
    target = Path(path)
    if target.suffix != ".xml":
        target = target / f"{SAVED_NAME}.xml"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".saving-") as folder:
        temporary = Path(folder, target.name)
        openvino.save_model(network, temporary, compress_to_fp16=False)
        # Replace the weights first, so that the new .xml file never refers to the old weights.
        os.replace(temporary.with_suffix(".bin"), target.with_suffix(".bin"))
        os.replace(temporary, target)
    return target


def network_bytes(network, *, half: bool = False) -> tuple[bytes, bytes]:
    """Return the contents of a network's two files, a pair that :func:`read_network` accepts.

    With `half`, fp32 constants are stored in fp16.
    """
    with scratch_folder("network") as folder:
        text = Path(folder, "network.xml")
        openvino.save_model(network, text, compress_to_fp16=half)
        return text.read_bytes(), text.with_suffix(".bin").read_bytes()


def with_private_constants(network: ov.Model) -> ov.Model:
    """Return a copy of a network whose constants share no memory with a module.

    Parameters
    ----------
    network : openvino.Model
        Network converted with ``share_weights``; constants of strings are never shared.
    """
    clone = network.clone()
    _make_constants_private(clone)
    return clone


def _make_constants_private(network: ov.Model) -> None:
    for op in network.get_ops():
        for body in _bodies(op):
            _make_constants_private(body)
        if op.get_type_name() != "Constant" or op.get_element_type().get_type_name() == "string":
            continue
        private = openvino.op.Constant(op.get_tensor_view(), shared_memory=False)
        private.set_friendly_name(op.get_friendly_name())
        for reader in op.output(0).get_target_inputs():
            reader.replace_source_output(private.output(0))


def _bodies(op: ov.Node) -> list[ov.Model]:
    """Return the networks within a condition or loop."""
    name = op.get_type_name()
    if name == "If":
        return [op.get_then_body(), op.get_else_body()]
    return [op.get_function()] if name in ("Loop", "TensorIterator") else []


def port_name(port) -> str:
    """Return the name of an input or output, or its node's name if the port has none."""
    return port.get_any_name() if port.get_names() else port.get_node().get_friendly_name()


def parse_shapes(shapes: Any, network) -> dict[int, Any]:
    """Parse new shapes for a network's inputs.

    Parameters
    ----------
    shapes : str, mapping or sequence
        ``"[1,3,224,224]"`` for the only input (or for all), ``"x[1,3],y[?,4]"``, a mapping of
        names to shapes, one shape, or one shape for each input. A dimension is a number, a range
        such as ``1..8``, or ``?`` or -1 for any size.
    network : openvino.Model
        Network with the inputs.

    Returns
    -------
    dict of int to openvino.PartialShape
        Shapes by position of the input; other inputs keep their shapes.

    Raises
    ------
    UsageError
        If there is no such input, or `shapes` is invalid.
    """
    if isinstance(shapes, str):
        shapes = named_values(shapes)
    elif not isinstance(shapes, Mapping):
        nested = isinstance(shapes, Sequence) and any(
            isinstance(each, Sequence | openvino.PartialShape) for each in shapes
        )
        shapes = dict(enumerate(shapes)) if nested else {"": shapes}
    return {
        position: _partial_shape(shape)
        for key, shape in shapes.items()
        for position in positions(key, network)
    }


def reshaped(network, shapes: Shapes):
    """Return the network if it already has these input shapes, else a copy that has them.

    Parameters
    ----------
    network : openvino.Model
    shapes : str, mapping or sequence
        See :func:`parse_shapes`.

    Raises
    ------
    UsageError
        If the network cannot have these input shapes.
    """
    wanted = parse_shapes(shapes, network)
    if all(network.inputs[i].partial_shape == shape for i, shape in wanted.items()):
        return network
    clone = network.clone()
    with as_usage_error(
        f"The network cannot have inputs {shapes}", text=reason, code="argument-value"
    ):
        clone.reshape(wanted)
    return clone


def loose_shapes(network) -> dict[int, Any]:
    """Return the input shapes with a dynamic first dimension, by position of the input."""
    shapes = {position: port.partial_shape for position, port in enumerate(network.inputs)}
    return {
        position: openvino.PartialShape([-1, *list(shape)[1:]])
        for position, shape in shapes.items()
        if shape.rank.is_static and len(shape)
    }


def named_values(text: str) -> dict[str, str]:
    """Parse text such as ``"x[1,3],y[?,4]"`` into a dict of names and bracket contents.

    Raises
    ------
    UsageError
        If the text does not have this form.
    """
    values, end = {}, 0
    while end < len(text):
        match = _NAMED_VALUE.match(text, end)
        if match is None:
            raise UsageError(
                f"Shapes are written as '[1,3,224,224]' or 'x[1,3],y[1,4]', not as {text!r}",
                code="argument-value",
            )
        values[match["name"]] = match["value"]
        end = match.end()
    return values


def positions(key: str | int, network: ov.Model) -> list[int]:
    """Return the positions of the inputs with this name; "" selects all inputs.

    Raises
    ------
    UsageError
        If there is no such input.
    """
    ports = network.inputs
    if key == "":
        return list(range(len(ports)))
    for position, port in enumerate(ports):
        if key == position or key in port.get_names() or key == port_name(port):
            return [position]
    names = ", ".join(map(port_name, ports))
    raise UsageError(
        f"The network has no input {key!r}; it has {names}", code="argument-unknown", argument=key
    )


def _partial_shape(shape: object):
    with as_usage_error(f"{shape!r} is not a shape", text=reason, code="argument-value"):
        if isinstance(shape, str):
            shape = f"[{shape.strip().strip('[]')}]"
        return openvino.PartialShape(shape)


def reason(error: Exception) -> str:
    """Return the text of an OpenVINO exception without source file locations."""
    lines = [line.strip() for line in str(error).splitlines()]
    texts = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return texts[-1] if texts else " ".join(lines)


_COPIED = {"f32", "f64", "i8", "i16", "i32", "i64", "u8", "boolean"}
_MOST_COPIED = 1 << 19  # bytes; sharing one array costs as much as copying about 100 kB


class _BoundRequest:
    """An infer request with fixed input and output memory."""

    def __init__(self, compiled: ov.CompiledModel):
        self._request = compiled.create_infer_request()
        inputs, outputs = compiled.inputs, compiled.outputs
        self._inputs = [self._request.get_input_tensor(i).data for i in range(len(inputs))]
        self._outputs = [self._request.get_output_tensor(i).data for i in range(len(outputs))]

    def infer(self, arrays: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        for index, memory in enumerate(self._inputs):
            memory[...] = arrays[index]
        self._request.infer()
        return [each.copy() for each in self._outputs]


class _Compilation:
    """One compilation of a network and its infer requests."""

    def __init__(self, network, device: str, config: dict[str, Any]):
        self.network = network
        sentence = f"OpenVINO cannot compile the network for {device} with {config}"
        with as_usage_error(sentence, text=reason, code="model-unsupported"):
            self.compiled = core().compile_model(_numpy_ports(network), device, config)
        self.names = [port_name(port) for port in self.compiled.inputs]
        types = [port.get_element_type() for port in self.compiled.inputs]
        # types of the input arrays; None for strings
        self.dtypes = [
            None if each.get_type_name() == "string" else np.dtype(each.to_dtype())
            for each in types
        ]
        # deque's append and pop are atomic, so a request belongs to one thread at a time.
        self.idle: deque = deque()
        self.bound: deque[_BoundRequest] = deque()
        self.by_shapes: dict[tuple, _Compilation] = {}
        self.integers: IntegerGuard | None = None  # only of the compilation for all shapes

    @cached_property
    def worth_static_shapes(self) -> bool:
        """True if compiling once per input shape pays off: small networks with dynamic inputs."""
        ops = self.network.get_ops()
        constants = (op.get_byte_size() for op in ops if op.get_type_name() == "Constant")
        dynamic = any(port.partial_shape.is_dynamic for port in self.network.inputs)
        return dynamic and sum(constants) <= _MOST_BYTES

    @cached_property
    def input_shapes(self) -> list[tuple[int, ...]] | None:
        """Static input shapes if calls copy arrays into a request; None if calls share arrays."""
        ports = [*self.compiled.inputs, *self.compiled.outputs]
        names = {port.get_element_type().get_type_name() for port in ports}
        fixed = all(port.partial_shape.is_static for port in ports)
        if not fixed or not names <= _COPIED or not self.compiled.inputs:
            return None
        shapes = [tuple(port.shape) for port in ports]
        if sum(int(np.prod(each)) for each in shapes) * 8 > _MOST_COPIED:
            return None
        return shapes[: len(self.compiled.inputs)]

    def infer_bound(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """Run once on copies of small arrays; return None if the network expects other shapes."""
        shapes = self.input_shapes
        if shapes is None:
            return None
        arrays = _fitting(inputs, self)
        if any(arrays[index].shape != shape for index, shape in enumerate(shapes)):
            return None
        try:
            request = self.bound.pop()
        except IndexError:
            request = _BoundRequest(self.compiled)
        try:
            return request.infer(arrays)
        finally:
            self.bound.append(request)

    def take(self):
        try:
            return self.idle.pop()
        except IndexError:
            return self.compiled.create_infer_request()

    def infer(self, request: ov.InferRequest, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        arrays = _fitting(inputs, self)
        try:
            return list(request.infer(arrays, share_inputs=True).to_tuple())
        except RuntimeError as error:
            raise _misfit(arrays, self, error) from error


class CompiledNetwork:
    """A compiled OpenVINO network; any number of threads may call it.

    Parameters
    ----------
    network : str, Path, pair of bytes, or openvino.Model
        See :func:`bigdl.nano.openvino.network.read_network`.
    device : str
        ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"`` (formerly ``"VPUX"``), ``"AUTO"``, ….
    precision : str
        Precision of the computation, or of a quantized network; see
        :data:`bigdl.nano.acceleration.PRECISIONS`. It sets ``INFERENCE_PRECISION_HINT`` on a CPU.
    thread_num : int, optional
        Threads of one inference on a CPU (``INFERENCE_NUM_THREADS``). Default: one per physical
        core in the affinity mask. Other devices ignore it. Fewer threads than cores are not pinned,
        since several processes may share the machine.
    config : mapping, optional
        OpenVINO properties, e.g. ``{"PERFORMANCE_HINT": "THROUGHPUT"}``. They override the
        properties set by other parameters.
    shapes : str, mapping or sequence, optional
        New shapes of the inputs; see :func:`bigdl.nano.openvino.network.parse_shapes`.
    cache_dir : str or Path, optional
        Directory in which OpenVINO caches compiled networks (``CACHE_DIR``).

    Attributes
    ----------
    device, precision, thread_num
        The arguments; the device as OpenVINO spells it.
    additional_config : dict
        Requested properties: `config` with the properties set by `precision`, `thread_num` and
        `cache_dir`.
    final_config : dict
        All properties that the network was compiled with.

    Raises
    ------
    UsageError
        If the network cannot be read, reshaped or compiled, or the device or precision is not
        available.

    Examples
    --------
    >>> import numpy as np
    >>> import openvino
    >>> from openvino import opset13
    >>> from bigdl.nano.openvino import CompiledNetwork
    >>> x = opset13.parameter([-1, 2], np.float32, name="x")
    >>> double = openvino.Model([opset13.multiply(x, np.float32(2))], [x], "double")
    >>> network = CompiledNetwork(double, thread_num=1)
    >>> network.infer([np.array([[1, 2]], np.float32)])
    [array([[2., 4.]], dtype=float32)]
    >>> network.reshape("[4,2]")  # for batches of four rows
    (True, None)
    """

    additional_config: dict[str, Any]
    final_config: dict[str, Any]

    def __init__(
        self,
        network: NetworkSource,
        device: str = "CPU",
        *,
        precision: str = FP32,
        thread_num: int | None = None,
        config: Mapping[str, Any] | None = None,
        shapes: Shapes | None = None,
        cache_dir: str | os.PathLike | None = None,
    ):
        if thread_num is not None:
            check_positive("thread_num", thread_num)
        self.precision = PRECISIONS[check_choice("precision", precision, PRECISIONS)]
        network = read_network(network)
        self.device = checked_device(device)
        self.thread_num = thread_num
        self._lock = threading.Lock()  # held while the compilation changes
        self._configure(dict(config or {}), cache_dir)
        if shapes is not None:
            network = reshaped(network, shapes)
        self._now = self._compiled(network)

    def _compiled(self, network: ov.Model) -> _Compilation:
        """Compile a network and derive the integer input ranges for which its results are exact."""
        device, config = self.device, self.final_config  # no reference cycle through self
        made = _Compilation(network, device, config)
        made.integers = IntegerGuard(
            network, made.names, lambda rest: _Compilation(rest, device, config)
        )
        return made

    @property
    def network(self):
        """The ``openvino.Model``; assigning another model compiles it with the same properties."""
        return self._now.network

    @network.setter
    def network(self, network: NetworkSource) -> None:
        made = self._compiled(read_network(network))
        with self._lock:
            self._now = made

    @property
    def compiled(self):
        """The ``openvino.CompiledModel``."""
        return self._now.compiled

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs in order."""
        return list(self._now.names)

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs in order."""
        return [port_name(port) for port in self._now.compiled.outputs]

    @property
    def num_threads(self) -> int:
        """Number of threads of one inference; 0 if the device does not report it."""
        try:
            return int(self._now.compiled.get_property("INFERENCE_NUM_THREADS"))
        except RuntimeError:
            return 0

    def infer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the network once.

        Parameters
        ----------
        inputs : sequence of array_like
            One array per input, in order. Contiguous arrays of the network's types are not copied.

        Returns
        -------
        list of ndarray
            One array per output, owned by the caller.

        Raises
        ------
        UsageError
            If the number of arrays, a shape or a type does not fit, an index is outside of its
            table, or integers exceed OpenVINO's 32 bits.
        """
        now, inputs = self._ready_for(inputs)
        copied = now.infer_bound(inputs) if self.device == "CPU" else None
        if copied is not None:
            return copied
        request = now.take()
        try:
            return now.infer(request, inputs)
        finally:
            now.idle.append(request)

    def expect_callers(self, callers: int) -> None:
        """Compile for `callers` threads that call the network concurrently.

        Each call then uses a share of the CPU cores instead of all. A requested number of threads
        and requested OpenVINO properties stay unchanged.
        """
        streams = min(callers, len(usable_cores()))
        requested = {"NUM_STREAMS", "PERFORMANCE_HINT"} & set(self.additional_config)
        if self.device == "CPU" and self.thread_num is None and streams > 1 and not requested:
            self.final_config = {**self.final_config, "NUM_STREAMS": streams}
            self.network = self.network

    def lend_request(self) -> tuple[Any, Callable[[], None]]:
        """Return an infer request for exclusive use, and a function that releases the request."""
        now = self._now
        request = now.take()
        return request, functools.partial(now.idle.append, request)

    def infer_by(self, request: ov.InferRequest, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the network once with a request from :meth:`lend_request`."""
        now, arrays = self._ready_for(inputs)
        return now.infer(request, arrays)

    def forbid_negative(self, positions: Iterable[int]) -> None:
        """Refuse negative integers in these inputs; saved copies of the network also refuse them.

        OpenVINO counts a negative index from the end, but the framework may refuse it.
        """
        with self._lock:
            now = self._now
            forbid_negative(now.network, [now.names[each] for each in positions])
            now.integers = self._compiled(now.network).integers

    def _ready_for(self, inputs: Sequence[np.ndarray]) -> tuple[_Compilation, Sequence[np.ndarray]]:
        """Return a compilation with exact results for these inputs, and its input arrays."""
        now = self._now
        guard = now.integers
        if guard is not None and guard.limits:
            inputs = list(_fitting(inputs, now).values())
            other = guard.checked(inputs)
            if other is not None:
                return other
        return self._compilation_for(inputs), inputs

    def _compilation_for(self, inputs: Sequence[np.ndarray]) -> _Compilation:
        return self._now

    def infer_many(
        self, batches: Iterable[Sequence[np.ndarray]], num_requests: int = 0
    ) -> list[list[np.ndarray]]:
        """Run the network on many inputs, several at a time.

        Parameters
        ----------
        batches : iterable of sequence of array_like
            Inputs of one :meth:`infer` call each.
        num_requests : int
            Number of concurrent inferences; 0 uses OpenVINO's optimal number for the compiled
            network, which is 1 unless it was compiled for throughput.

        Returns
        -------
        list of list of ndarray
            Results in the order of `batches`.

        Raises
        ------
        UsageError
            If one of the inputs does not fit, after the running inferences have ended.
        """
        check_integer("num_requests", num_requests, 0)
        optimal = self.compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        most = num_requests or optimal
        running: deque[Future[list[np.ndarray]]] = deque()
        results = []
        with ThreadPoolExecutor(most, thread_name_prefix="bigdl-openvino") as threads:
            for inputs in batches:
                if len(running) >= most:
                    results.append(running.popleft().result())
                running.append(threads.submit(self.infer, inputs))
            return results + [each.result() for each in running]

    def reshape(self, shapes: Shapes) -> tuple[bool, str | None]:
        """Change the shapes of the inputs.

        Parameters
        ----------
        shapes : str, mapping or sequence
            See :func:`bigdl.nano.openvino.network.parse_shapes`.

        Returns
        -------
        ok : bool
            True if the inputs have these shapes now; otherwise nothing has changed.
        error : str or None
            Reason for a failure.
        """
        with self._lock:
            try:
                network = reshaped(self._now.network, shapes)
                if network is not self._now.network:
                    self._now = self._compiled(network)
            except UsageError as error:
                return False, f"Failed to reshape this model. Error message: {error}"
        return True, None

    def save(self, path: str | os.PathLike):
        """Write the network; see :func:`bigdl.nano.openvino.network.write_network`."""
        return write_network(self._now.network, path)

    def __getstate__(self) -> dict:
        """Return the pickle state, which contains the network's files but no compiled network."""
        state = {key: value for key, value in vars(self).items() if key != "_lock"}
        return state | {"_now": network_bytes(self._now.network)}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._now = self._compiled(read_network(state["_now"]))

    def _configure(self, config: dict[str, Any], cache_dir: str | os.PathLike | None) -> None:
        on_cpu = self.device == "CPU"
        if self.precision == BF16 and not on_cpu:
            raise UsageError(
                f"Device {self.device} don't support bfloat16.",
                code="unsupported",
                argument="device",
            )
        if self.precision == BF16 and not supports_bf16():
            able = core().get_property(self.device, "OPTIMIZATION_CAPABILITIES")
            raise UsageError(
                "Platform doesn't support BF16 format: OpenVINO can use "
                f"{', '.join(sorted(able))} on this machine",
                code="processor-unsupported",
            )
        requested: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        if cache_dir is not None:
            requested["CACHE_DIR"] = str(cache_dir)
        if on_cpu:
            (requested if self.precision == BF16 else defaults).update(self.precision.hints)
        elif _may_take_cpu(self.device):
            # A combined device takes the properties of its member devices.
            defaults["DEVICE_PROPERTIES"] = {"CPU": dict(self.precision.hints)}
        if on_cpu and self.thread_num is not None:
            requested["INFERENCE_NUM_THREADS"] = self.thread_num
            if self.thread_num < len(usable_cores()):
                # Pinning starts at the first core, so several processes with a few threads each
                # would all compute on the same cores.
                defaults["ENABLE_CPU_PINNING"] = False
        self.additional_config = requested | config
        self.final_config = defaults | self.additional_config


def _may_take_cpu(device: str) -> bool:
    """Return True for an AUTO, MULTI or HETERO device that can use the CPU."""
    plugin, _, listed = device.partition(":")
    names = [each.partition("(")[0] for each in listed.split(",")]
    return plugin in ("AUTO", "MULTI", "HETERO") and (not listed or "CPU" in names)


def _fitting(inputs: Sequence[Any], now: _Compilation) -> dict[int, np.ndarray]:
    """Convert the inputs to arrays of the network's types; return them by input position."""
    if len(inputs) != len(now.names):
        raise UsageError(
            f"The network has {len(now.names)} inputs ({', '.join(now.names)}), "
            f"but {len(inputs)} were given",
            code="model-input",
        )
    arrays = {}
    for position, (value, dtype) in enumerate(zip(inputs, now.dtypes, strict=True)):
        array = np.asarray(value)
        if dtype is None:
            array = _fixed_width(array, now.names[position])
        elif array.dtype != dtype:
            if not np.can_cast(array.dtype, dtype, "same_kind"):
                raise UsageError(
                    f"Input {now.names[position]} is of {dtype}, and {array.dtype} cannot be "
                    "converted to it without loss",
                    code="model-input",
                    argument=now.names[position],
                )
            array = cast_array(array, dtype, now.names[position])
        arrays[position] = array
    return arrays


def _fixed_width(array: np.ndarray, name: str) -> np.ndarray:
    """Convert strings to the fixed-width array that OpenVINO takes."""
    if array.dtype.kind == "U":
        return array
    strings = as_strings(array, name)
    if any(each.endswith("\0") for each in strings.flat):
        raise UsageError(
            f"Input {name!r} holds a string that ends with a null character, which "
            "OpenVINO would truncate",
            code="data-value",
            argument=name,
        )
    return strings.astype(str)


def _misfit(arrays: dict[int, np.ndarray], now: _Compilation, error: Exception) -> UsageError:
    shapes = ", ".join(f"{now.names[i]}{list(array.shape)}" for i, array in arrays.items())
    taken = ", ".join(
        f"{name}{port.partial_shape}"
        for name, port in zip(now.names, now.compiled.inputs, strict=True)
    )
    return UsageError(
        f"The network takes {taken}, but got {shapes}: {reason(error)}", code="model-input"
    )


def _numpy_ports(network):
    """Return the network with float32 instead of bfloat16 at its inputs and outputs."""
    bf16, f32 = openvino.Type.bf16, openvino.Type.f32
    ports = (network.inputs, network.outputs)
    if not any(port.get_element_type() == bf16 for side in ports for port in side):
        return network
    steps = openvino.preprocess.PrePostProcessor(network.clone())
    for side, handle in zip(ports, (steps.input, steps.output), strict=True):
        for position, port in enumerate(side):
            if port.get_element_type() == bf16:
                handle(position).tensor().set_element_type(f32)
    return steps.build()


# Each compilation holds the weights, and large networks gain little, so these have only one.
_MOST_SHAPES = 4
_MOST_BYTES = 128 * 2**20


class ShapedNetwork(CompiledNetwork):
    """A network on a CPU, compiled separately for each of the first few input shapes it receives.

    The first call with a new shape compiles the network, which takes up to some tenths of a second.
    All calls with equal shapes use the same compilation, so their results are bit-identical.
    Further shapes, and networks of more than 128 MiB, share the compilation for dynamic shapes.
    Parameters are those of :class:`CompiledNetwork`.
    """

    def _compilation_for(self, inputs: Sequence[np.ndarray]) -> _Compilation:
        now = self._now
        if self.device != "CPU" or not now.worth_static_shapes:
            return now
        shapes = tuple(np.shape(each) for each in inputs)
        compilation = now.by_shapes.get(shapes)
        if compilation is None and len(now.by_shapes) < _MOST_SHAPES:
            compilation = self._compiled_for(shapes, now)
        return compilation or now

    def _compiled_for(self, shapes: tuple, now: _Compilation) -> _Compilation | None:
        """Return a compilation for these shapes, or None if the network does not accept them."""
        with self._lock:
            if shapes in now.by_shapes:
                return now.by_shapes[shapes]
            ports = now.network.inputs
            if len(ports) != len(shapes) or not all(
                port.partial_shape.compatible(openvino.PartialShape(shape))
                for port, shape in zip(ports, shapes, strict=True)
            ):
                return None
            with suppress(UsageError):  # the dynamic compilation reports invalid shapes
                network = reshaped(now.network, dict(enumerate(shapes)))
                now.by_shapes[shapes] = _Compilation(network, self.device, self.final_config)
            return now.by_shapes.get(shapes)
