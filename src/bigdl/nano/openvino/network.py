"""Networks of OpenVINO: read, named, reshaped, written, and compiled for one device.

This is the part that every accelerated model in OpenVINO stands on, whatever framework it came
from. It knows no framework itself: a compiled network takes and gives lists of arrays.
"""

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
from typing import Any

import numpy as np

from bigdl.common.checks import check_choice, check_integer, check_positive
from bigdl.common.cpu import usable_cores
from bigdl.common.errors import LazyModule, UsageError, as_usage_error
from bigdl.common.private_folders import scratch_folder
from bigdl.nano.acceleration.precision import BF16, FP32, PRECISIONS
from bigdl.nano.acceleration.structure import cast_array
from bigdl.nano.acceleration.texts import as_strings
from bigdl.nano.openvino.integers import IntegerGuard, forbid_negative

openvino = LazyModule("openvino", "nano")

SAVED_NAME = "ov_saved_model"
"""Name, without suffix, of the two files of a network in a directory of its own."""

_READABLE = (".xml", ".onnx")
# What properties of OpenVINO were called before 2022.
_RENAMED = {
    "CPU_THREADS_NUM": "INFERENCE_NUM_THREADS",
    "CPU_THROUGHPUT_STREAMS": "NUM_STREAMS",
    "CPU_BIND_THREAD": "ENABLE_CPU_PINNING",
}
_RENAMED_VALUES = {"CPU_THROUGHPUT_AUTO": "AUTO", "CPU_THROUGHPUT_NUMA": "NUMA"}
_NAMED_VALUE = re.compile(r"\s*(?P<name>[^\[\](),]*?)\s*[\[(](?P<value>[^\[\]()]*)[\])]\s*(?:,|$)")


@functools.cache
def core():
    """The ``openvino.Core`` of this process; it is safe to use from several threads."""
    return openvino.Core()


def checked_device(device: str) -> str:
    """Return the name of a device as this version of OpenVINO spells it.

    Parameters
    ----------
    device : str
        ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"`` (``"VPUX"`` is its old name), or one of
        OpenVINO's combinations such as ``"AUTO:GPU,CPU"``.

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
        each = each.lstrip("-")  # "AUTO:-GPU" leaves one out
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
    """Return True if the processor has instructions for bfloat16."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def renamed_properties(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return properties under the names that OpenVINO has for them today."""
    return {
        _RENAMED.get(key, key): _RENAMED_VALUES.get(value, value)
        if isinstance(value, str)
        else value
        for key, value in config.items()
    }


def read_network(source: Any):
    """Return a network from any of its forms.

    Parameters
    ----------
    source : str, Path, pair of bytes, or openvino.Model
        An ``.xml`` file with its ``.bin`` beside it, an ``.onnx`` file, a directory that
        :func:`write_network` made, the content of the two files, or a network itself, which is
        returned as it is.

    Returns
    -------
    openvino.Model

    Raises
    ------
    UsageError
        If there is no such file or it holds no network.
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

    The files come into being at once when they are complete, so that a network may be written
    over the files that it was read from, whose weights are still mapped into memory.

    Parameters
    ----------
    network : openvino.Model
        What to write; its constants keep their types.
    path : str or Path
        The ``.xml`` file, or a directory, which is created, for ``ov_saved_model.xml``.

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
        aside = Path(folder, target.name)
        openvino.save_model(network, aside, compress_to_fp16=False)
        # The weights first: a reader that finds the new text also finds the new weights.
        os.replace(aside.with_suffix(".bin"), target.with_suffix(".bin"))
        os.replace(aside, target)
    return target


def network_bytes(network, *, half: bool = False) -> tuple[bytes, bytes]:
    """Return the content of the two files of a network, as :func:`read_network` takes it.

    With `half` constants in fp32 are stored in fp16.
    """
    with scratch_folder("network") as folder:
        text = Path(folder, "network.xml")
        openvino.save_model(network, text, compress_to_fp16=half)
        return text.read_bytes(), text.with_suffix(".bin").read_bytes()


def port_name(port) -> str:
    """Return the name of an input or output; the name of its node where it has none of its own."""
    return port.get_any_name() if port.get_names() else port.get_node().get_friendly_name()


def parse_shapes(shapes: Any, network) -> dict[int, Any]:
    """Return wanted shapes of a network's inputs.

    Parameters
    ----------
    shapes : str, mapping or sequence
        ``"[1,3,224,224]"`` for the only input (or for all), ``"x[1,3],y[?,4]"``, a mapping of
        names to shapes, one shape, or one shape for each input. A dimension is a number, a range
        such as ``1..8``, or ``?`` or -1 for any size.
    network : openvino.Model
        The network that has the inputs.

    Returns
    -------
    dict of int to openvino.PartialShape
        By position of the input; an input that is not named keeps its shape.

    Raises
    ------
    UsageError
        If there is no such input, or `shapes` cannot be understood.
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


def reshaped(network, shapes: Any):
    """Return the network itself if its inputs have these shapes, else a copy whose inputs do.

    Parameters
    ----------
    network : openvino.Model
    shapes : str, mapping or sequence
        See :func:`parse_shapes`.

    Raises
    ------
    UsageError
        If the network cannot have such inputs.
    """
    wanted = parse_shapes(shapes, network)
    if all(network.inputs[i].partial_shape == shape for i, shape in wanted.items()):
        return network
    twin = network.clone()
    with as_usage_error(
        f"The network cannot have inputs {shapes}", text=reason, code="argument-value"
    ):
        twin.reshape(wanted)
    return twin


def loose_shapes(network) -> dict[int, Any]:
    """Return shapes of the inputs with any number of rows, by position; of those that have rows."""
    shapes = {position: port.partial_shape for position, port in enumerate(network.inputs)}
    return {
        position: openvino.PartialShape([-1, *list(shape)[1:]])
        for position, shape in shapes.items()
        if shape.rank.is_static and len(shape)
    }


def named_values(text: str) -> dict[str, str]:
    """Return what stands in brackets after each name, e.g. of ``"x[1,3],y[?,4]"``; "" is no name.

    Raises
    ------
    UsageError
        If the text is not of this form.
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


def positions(key: str | int, network: Any) -> list[int]:
    """Return the positions of the inputs of this name; "" means all.

    Raises
    ------
    UsageError
        If there is none.
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


def _partial_shape(shape: Any):
    with as_usage_error(f"{shape!r} is not a shape", text=reason, code="argument-value"):
        if isinstance(shape, str):
            shape = f"[{shape.strip().strip('[]')}]"
        return openvino.PartialShape(shape)


def reason(error: Exception) -> str:
    """Return the text of an exception of OpenVINO without the places in its source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return said[-1] if said else " ".join(lines)


_COPIED = {"f32", "f64", "i8", "i16", "i32", "i64", "u8", "boolean"}
_MOST_COPIED = 1 << 19  # bytes; handing one array over costs as much as copying about 100 kB


class _BoundRequest:
    """An infer request whose inputs and outputs stay the same memory."""

    def __init__(self, compiled: Any):
        self._request = compiled.create_infer_request()
        inputs, outputs = compiled.inputs, compiled.outputs
        self._inputs = [self._request.get_input_tensor(i).data for i in range(len(inputs))]
        self._outputs = [self._request.get_output_tensor(i).data for i in range(len(outputs))]

    def infer(self, arrays: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        for place, own in enumerate(self._inputs):
            own[...] = arrays[place]
        self._request.infer()
        return [each.copy() for each in self._outputs]


class _Compilation:
    """One compiled form of a network and the infer requests made from it."""

    def __init__(self, network, device: str, config: dict[str, Any]):
        self.network = network
        sentence = f"OpenVINO cannot compile the network for {device} with {config}"
        with as_usage_error(sentence, text=reason, code="model-unsupported"):
            self.compiled = core().compile_model(_numpy_ports(network), device, config)
        self.names = [port_name(port) for port in self.compiled.inputs]
        types = [port.get_element_type() for port in self.compiled.inputs]
        # of an input's arrays; None for strings
        self.dtypes = [
            None if each.get_type_name() == "string" else np.dtype(each.to_dtype())
            for each in types
        ]
        # deque's append and pop are atomic: a request belongs to one thread at a time.
        self.idle: deque = deque()
        self.bound: deque[_BoundRequest] = deque()
        self.forms: dict[tuple, _Compilation] = {}
        self.integers: IntegerGuard | None = None  # of the form for all shapes

    @cached_property
    def worth_forms(self) -> bool:
        """True if a form for each shape gains: a small network with dynamic inputs."""
        ops = self.network.get_ops()
        constants = (op.get_byte_size() for op in ops if op.get_type_name() == "Constant")
        dynamic = any(port.partial_shape.is_dynamic for port in self.network.inputs)
        return dynamic and sum(constants) <= _MOST_BYTES

    @cached_property
    def input_shapes(self) -> list[tuple[int, ...]] | None:
        """Shapes of arrays that are copied into a request; None where they are handed over."""
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
        """Run once by copying small arrays; None if they are not of the shapes for that."""
        shapes = self.input_shapes
        if shapes is None:
            return None
        arrays = _fitting(inputs, self)
        if any(arrays[place].shape != shape for place, shape in enumerate(shapes)):
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

    def infer(self, request: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        arrays = _fitting(inputs, self)
        try:
            return list(request.infer(arrays, share_inputs=True).to_tuple())
        except RuntimeError as error:
            raise _misfit(arrays, self, error) from error


class CompiledNetwork:
    """A network of OpenVINO that is ready to run; any number of threads may call it.

    Parameters
    ----------
    network : str, Path, pair of bytes, or openvino.Model
        See :func:`bigdl.nano.openvino.network.read_network`.
    device : str
        ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"`` (or its old name ``"VPUX"``), ``"AUTO"``, ….
    precision : str
        What the network computes in, or was quantized to; see
        :data:`bigdl.nano.acceleration.PRECISIONS`. It sets ``INFERENCE_PRECISION_HINT`` on a CPU.
    thread_num : int, optional
        Threads of one inference on a CPU (``INFERENCE_NUM_THREADS``); by default OpenVINO takes
        one for each physical core in the affinity mask. Other devices do not use it. Fewer
        threads than cores are not pinned, since several processes may share the machine.
    config : mapping, optional
        Properties of OpenVINO, e.g. ``{"PERFORMANCE_HINT": "THROUGHPUT"}``. They go before what
        the other parameters mean.
    shapes : str, mapping or sequence, optional
        Shapes to give the inputs first; see :func:`bigdl.nano.openvino.network.parse_shapes`.
    cache_dir : str or Path, optional
        Directory in which OpenVINO keeps compiled networks (``CACHE_DIR``).

    Attributes
    ----------
    device, precision, thread_num
        As given; the device as OpenVINO spells it.
    additional_config : dict
        What the caller asked for: `config` with the properties that `precision`, `thread_num` and
        `cache_dir` stand for.
    final_config : dict
        All that the network was compiled with.

    Raises
    ------
    UsageError
        If the network cannot be read, reshaped or compiled, or the device or a type of numbers is
        not there.

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
        network: Any,
        device: str = "CPU",
        *,
        precision: str = FP32,
        thread_num: int | None = None,
        config: Mapping[str, Any] | None = None,
        shapes: Any = None,
        cache_dir: Any = None,
    ):
        if thread_num is not None:
            check_positive("thread_num", thread_num)
        self.precision = PRECISIONS[check_choice("precision", precision, PRECISIONS)]
        network = read_network(network)
        self.device = checked_device(device)
        self.thread_num = thread_num
        self._lock = threading.Lock()  # of those who change the compilation
        self._configure(dict(config or {}), cache_dir)
        if shapes is not None:
            network = reshaped(network, shapes)
        self._now = self._compiled(network)

    def _compiled(self, network: Any) -> _Compilation:
        """Return a network's compilation, with the limits of its integers."""
        device, config = self.device, self.final_config  # not self: its threads end with it
        made = _Compilation(network, device, config)
        made.integers = IntegerGuard(
            network, made.names, lambda rest: _Compilation(rest, device, config)
        )
        return made

    @property
    def network(self):
        """The ``openvino.Model``; setting another one compiles it with the same properties."""
        return self._now.network

    @network.setter
    def network(self, network: Any) -> None:
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
        """Threads that one inference may use; 0 on a device that has none."""
        try:
            return int(self._now.compiled.get_property("INFERENCE_NUM_THREADS"))
        except RuntimeError:
            return 0

    def infer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the network once.

        Parameters
        ----------
        inputs : sequence of array_like
            One array for each input, in order. Contiguous arrays of the network's types are read
            where they lie.

        Returns
        -------
        list of ndarray
            One array for each output, which the caller owns.

        Raises
        ------
        UsageError
            If the number of arrays, a shape or a type does not fit, an index is outside of its
            table, or integers cannot be computed in the 32 bits that OpenVINO has.
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
        """Compile for so many threads that call at the same time.

        Each then has its share of the cores of a CPU, where one call alone would have all. What was
        asked for by a number of threads or properties of OpenVINO stays as it is.
        """
        streams = min(callers, len(usable_cores()))
        asked = {"NUM_STREAMS", "PERFORMANCE_HINT"} & set(self.additional_config)
        if self.device == "CPU" and self.thread_num is None and streams > 1 and not asked:
            self.final_config = {**self.final_config, "NUM_STREAMS": streams}
            self.network = self.network

    def lend_request(self) -> tuple[Any, Callable[[], None]]:
        """Return an infer request that nobody else uses, and a function that takes it back."""
        now = self._now
        request = now.take()
        return request, functools.partial(now.idle.append, request)

    def infer_by(self, request: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the network once by a request that :meth:`lend_request` returned."""
        now, arrays = self._ready_for(inputs)
        return now.infer(request, arrays)

    def forbid_negative(self, positions: Iterable[int]) -> None:
        """Refuse negative integers in these inputs from now on, also where the network is saved.

        A runtime takes a negative index for a place from the end, which a framework may refuse.
        """
        with self._lock:
            now = self._now
            forbid_negative(now.network, [now.names[each] for each in positions])
            now.integers = self._compiled(now.network).integers

    def _ready_for(self, inputs: Sequence[np.ndarray]) -> tuple[_Compilation, Sequence[np.ndarray]]:
        """Return the compilation for these inputs, and the arrays that it takes."""
        now = self._now
        guard = now.integers
        if guard is not None and guard.limits:
            inputs = list(_fitting(inputs, now).values())
            other = guard.checked(inputs)
            if other is not None:
                return other
        return self._form_for(inputs), inputs

    def _form_for(self, inputs: Sequence[np.ndarray]) -> _Compilation:
        return self._now

    def infer_many(
        self, batches: Iterable[Sequence[np.ndarray]], num_requests: int = 0
    ) -> list[list[np.ndarray]]:
        """Run the network on many inputs, several at a time.

        Parameters
        ----------
        batches : iterable of sequence of array_like
            What :meth:`infer` takes, many times.
        num_requests : int
            Inferences under way at the same time; 0 means the number that OpenVINO finds best for
            the compiled network, which is 1 unless it was compiled for throughput.

        Returns
        -------
        list of list of ndarray
            In the order of `batches`.

        Raises
        ------
        UsageError
            If one of the inputs does not fit, after those that were under way have ended.
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

    def reshape(self, shapes: Any) -> tuple[bool, str | None]:
        """Give the inputs other shapes.

        Parameters
        ----------
        shapes : str, mapping or sequence
            See :func:`bigdl.nano.openvino.network.parse_shapes`.

        Returns
        -------
        ok : bool
            Whether the inputs have these shapes now. If not, everything is as it was.
        error : str or None
            Why not.
        """
        with self._lock:
            try:
                network = reshaped(self._now.network, shapes)
                if network is not self._now.network:
                    self._now = self._compiled(network)
            except UsageError as error:
                return False, f"Failed to reshape this model. Error message: {error}"
        return True, None

    def save(self, path: Any):
        """Write the network; see :func:`bigdl.nano.openvino.network.write_network`."""
        return write_network(self._now.network, path)

    def __getstate__(self) -> dict:
        """Pickle the content of its files; it is compiled again when it is read or copied."""
        state = {key: value for key, value in vars(self).items() if key != "_lock"}
        return state | {"_now": network_bytes(self._now.network)}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._now = self._compiled(read_network(state["_now"]))

    def _configure(self, config: dict[str, Any], cache_dir: Any) -> None:
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
        meant: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        if cache_dir is not None:
            meant["CACHE_DIR"] = str(cache_dir)
        if on_cpu:
            (meant if self.precision == BF16 else defaults).update(self.precision.hints)
        elif _may_take_cpu(self.device):
            # Each of these devices has the properties of the ones behind it.
            defaults["DEVICE_PROPERTIES"] = {"CPU": dict(self.precision.hints)}
        if on_cpu and self.thread_num is not None:
            meant["INFERENCE_NUM_THREADS"] = self.thread_num
            if self.thread_num < len(usable_cores()):
                # Pinning begins with the first core: several processes with a few threads each,
                # which together use the machine, would all compute on the same cores.
                defaults["ENABLE_CPU_PINNING"] = False
        self.additional_config = meant | config
        self.final_config = defaults | self.additional_config


def _may_take_cpu(device: str) -> bool:
    """Return True for a combination of devices in which the CPU may be."""
    plugin, _, listed = device.partition(":")
    names = [each.partition("(")[0] for each in listed.split(",")]
    return plugin in ("AUTO", "MULTI", "HETERO") and (not listed or "CPU" in names)


def _fitting(inputs: Sequence[Any], now: _Compilation) -> dict[int, np.ndarray]:
    """Arrays of the network's types by position."""
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
                    f"Input {now.names[position]} is of {dtype}, and {array.dtype} cannot be made "
                    "that without loss",
                    code="model-input",
                    argument=now.names[position],
                )
            array = cast_array(array, dtype, now.names[position])
        arrays[position] = array
    return arrays


def _fixed_width(array: np.ndarray, name: str) -> np.ndarray:
    """Return texts as the fixed-width array that OpenVINO takes."""
    if array.dtype.kind == "U":
        return array
    strings = as_strings(array, name)
    if any(each.endswith("\0") for each in strings.flat):
        raise UsageError(
            f"Input {name!r} holds a text that ends with a null character, which "
            "OpenVINO would cut",
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
        f"The network takes {taken} and was given {shapes}: {reason(error)}", code="model-input"
    )


def _numpy_ports(network):
    """The network, with float32 at the inputs and outputs that are in bf16, which numpy lacks."""
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


# Each form has weights of its own, so large networks, which gain little, have one form only.
_MOST_SHAPES = 4
_MOST_BYTES = 128 * 2**20


class ShapedNetwork(CompiledNetwork):
    """A network on a CPU with a compiled form for each of the first few shapes of its inputs.

    The first call with a new shape takes as long as compiling, up to some tenths of a second. All
    calls with equal shapes go through the same form, so their results are equal to the last bit.
    Further shapes, and networks of more than 128 MiB, share the dynamic form. Parameters are those
    of :class:`CompiledNetwork`.
    """

    def _form_for(self, inputs: Sequence[np.ndarray]) -> _Compilation:
        now = self._now
        if self.device != "CPU" or not now.worth_forms:
            return now
        shapes = tuple(np.shape(each) for each in inputs)
        form = now.forms.get(shapes)
        if form is None and len(now.forms) < _MOST_SHAPES:
            form = self._compiled_for(shapes, now)
        return form or now

    def _compiled_for(self, shapes: tuple, now: _Compilation) -> _Compilation | None:
        """Return a form for these shapes; None if the network does not take them."""
        with self._lock:
            if shapes in now.forms:
                return now.forms[shapes]
            ports = now.network.inputs
            if len(ports) != len(shapes) or not all(
                port.partial_shape.compatible(openvino.PartialShape(shape))
                for port, shape in zip(ports, shapes, strict=True)
            ):
                return None
            with suppress(UsageError):  # the dynamic form says what is wrong with the shapes
                network = reshaped(now.network, dict(enumerate(shapes)))
                now.forms[shapes] = _Compilation(network, self.device, self.final_config)
            return now.forms.get(shapes)
