"""A network compiled for one device: lists of arrays in, lists of arrays out.

This is the part that every accelerated model in OpenVINO stands on, whatever framework it came
from. It knows no framework itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from bigdl.common.checks import check_choice, check_integer, check_positive
from bigdl.common.cpu import usable_cores
from bigdl.common.errors import UsageError, require
from bigdl.nano.openvino.network import (
    checked_device,
    core,
    network_bytes,
    port_name,
    read_network,
    reason,
    reshaped,
    supports_bf16,
    write_network,
)

__all__ = ["CompiledNetwork", "ShapedNetwork"]


# A processor with AMX would otherwise compute fp32 networks in bf16.
_CPU_HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f32", "int8": "f32"}


class _Compilation:
    """One compiled form of a network and the infer requests made from it."""

    def __init__(self, network, device: str, config: dict[str, Any]):
        self.network = network
        try:
            self.compiled = core().compile_model(_numpy_ports(network), device, config)
        except RuntimeError as error:
            raise UsageError(
                f"OpenVINO cannot compile the network for {device} with {config}: {reason(error)}"
            ) from error
        self.names = [port_name(port) for port in self.compiled.inputs]
        self.dtypes = [_numpy_type(port) for port in self.compiled.inputs]
        # deque's append and pop are atomic: a request belongs to one thread at a time.
        self.idle: deque = deque()

    def take(self):
        try:
            return self.idle.pop()
        except IndexError:
            return self.compiled.create_infer_request()


class CompiledNetwork:
    """A network of OpenVINO that is ready to run; any number of threads may call it.

    Parameters
    ----------
    network : str, Path, pair of bytes, or openvino.Model
        See :func:`bigdl.nano.openvino.network.read_network`.
    device : str
        ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"`` (or its old name ``"VPUX"``), ``"AUTO"``, ….
    precision : str
        What the network computes in: ``"fp32"``, ``"bf16"``, ``"fp16"``, or ``"int8"`` for one
        that was quantized. It sets ``INFERENCE_PRECISION_HINT`` on a CPU.
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
    """

    def __init__(
        self,
        network: Any,
        device: str = "CPU",
        *,
        precision: str = "fp32",
        thread_num: int | None = None,
        config: Mapping[str, Any] | None = None,
        shapes: Any = None,
        cache_dir: Any = None,
    ):
        if thread_num is not None:
            check_positive("thread_num", thread_num)
        network = read_network(network)
        self.device = checked_device(device)
        self.precision = precision
        self.thread_num = thread_num
        self._lock = threading.Lock()  # of those who change the compilation
        self._configure(dict(config or {}), cache_dir)
        if shapes is not None:
            network = reshaped(network, shapes)
        self._now = _Compilation(network, self.device, self.final_config)

    @property
    def network(self):
        """The ``openvino.Model``; setting another one compiles it with the same properties."""
        return self._now.network

    @network.setter
    def network(self, network: Any) -> None:
        made = _Compilation(read_network(network), self.device, self.final_config)
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
            If the number of arrays, a shape or a type does not fit.
        """
        now = self._now
        arrays = _fitting(inputs, now)
        request = now.take()
        try:
            return list(request.infer(arrays, share_inputs=True).to_tuple())
        except RuntimeError as error:
            raise _misfit(arrays, now, error) from error
        finally:
            now.idle.append(request)

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
        now = self._now
        most = num_requests or now.compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        running: deque = deque()
        results = []
        try:
            for inputs in batches:
                arrays = _fitting(inputs, now)
                if len(running) >= most:
                    results.append(_collect(running, now))
                request = now.take()
                running.append((request, arrays))
                try:
                    request.start_async(arrays, share_inputs=True)
                except RuntimeError as error:
                    now.idle.append(running.pop()[0])
                    raise _misfit(arrays, now, error) from error
            while running:
                results.append(_collect(running, now))
        finally:
            for request, _ in running:  # of a failed call; they may still read their arrays
                request.cancel()
                with contextlib.suppress(RuntimeError):
                    request.wait()
                now.idle.append(request)
        return results

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
                    self._now = _Compilation(network, self.device, self.final_config)
            except UsageError as error:
                return False, f"Failed to reshape this model. Error message: {error}"
        return True, None

    def save(self, path: Any):
        """Write the network; see :func:`bigdl.nano.openvino.network.write_network`."""
        return write_network(self._now.network, path)

    def __getstate__(self) -> dict:
        """Pickle the content of its files; it is compiled again when it is read."""
        state = self.__dict__.copy()
        del state["_lock"]
        state["_now"] = network_bytes(self._now.network)
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._now = _Compilation(read_network(state["_now"]), self.device, self.final_config)

    def __deepcopy__(self, memo: dict) -> CompiledNetwork:
        twin = type(self).__new__(type(self))
        state = self.__dict__ | {"additional_config": dict(self.additional_config)}
        twin.__dict__.update(state | {"final_config": dict(self.final_config)})
        twin._lock = threading.Lock()
        twin._now = _Compilation(self.network.clone(), self.device, self.final_config)
        return twin

    def _configure(self, config: dict[str, Any], cache_dir: Any) -> None:
        check_choice("precision", self.precision, _CPU_HINTS)
        on_cpu = self.device == "CPU"
        if self.precision == "bf16":
            self._check_bf16(on_cpu)
        meant: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        if cache_dir is not None:
            meant["CACHE_DIR"] = str(cache_dir)
        if on_cpu:
            hints = meant if self.precision == "bf16" else defaults
            hints["INFERENCE_PRECISION_HINT"] = _CPU_HINTS[self.precision]
        if on_cpu and self.thread_num is not None:
            meant["INFERENCE_NUM_THREADS"] = self.thread_num
            if self.thread_num < len(usable_cores()):
                # Pinning begins with the first core: several processes with a few threads each,
                # which together use the machine, would all compute on the same cores.
                defaults["ENABLE_CPU_PINNING"] = False
        self.additional_config = meant | config
        self.final_config = defaults | self.additional_config

    def _check_bf16(self, on_cpu: bool) -> None:
        if not on_cpu:
            raise UsageError(f"Device {self.device} don't support bfloat16.")
        if not supports_bf16(self.device):
            able = core().get_property(self.device, "OPTIMIZATION_CAPABILITIES")
            raise UsageError(
                "Platform doesn't support BF16 format: OpenVINO can use "
                f"{', '.join(sorted(able))} on this machine"
            )


def _fitting(inputs: Sequence[Any], now: _Compilation) -> dict[int, np.ndarray]:
    """Arrays of the network's types by position."""
    if len(inputs) != len(now.names):
        raise UsageError(
            f"The network has {len(now.names)} inputs ({', '.join(now.names)}), "
            f"but {len(inputs)} were given"
        )
    arrays = {}
    for position, (given, dtype) in enumerate(zip(inputs, now.dtypes, strict=True)):
        array = np.asarray(given)
        if dtype is not None and array.dtype != dtype:
            if not np.can_cast(array.dtype, dtype, "same_kind"):
                raise UsageError(
                    f"Input {now.names[position]} is of {dtype}, and {array.dtype} cannot be made "
                    "that without loss"
                )
            array = array.astype(dtype)
        arrays[position] = array
    return arrays


def _collect(running: deque, now: _Compilation) -> list[np.ndarray]:
    """Results of the inference that was started first."""
    request, arrays = running.popleft()
    try:
        request.wait()
        return [np.array(tensor.data) for tensor in request.output_tensors]
    except RuntimeError as error:
        raise _misfit(arrays, now, error) from error
    finally:
        now.idle.append(request)


def _misfit(arrays: dict[int, np.ndarray], now: _Compilation, error: Exception) -> UsageError:
    given = ", ".join(f"{now.names[i]}{list(array.shape)}" for i, array in arrays.items())
    taken = ", ".join(
        f"{name}{port.partial_shape}"
        for name, port in zip(now.names, now.compiled.inputs, strict=True)
    )
    return UsageError(f"The network takes {taken} and was given {given}: {reason(error)}")


def _numpy_ports(network):
    """The network, with float32 at the inputs and outputs that are in bf16, which numpy lacks."""
    openvino = require("openvino", "nano")
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


def _numpy_type(port) -> np.dtype | None:
    """Type of an input's arrays; None for strings."""
    kind = port.get_element_type()
    return None if kind.get_type_name() == "string" else np.dtype(kind.to_dtype())


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

    def __init__(self, network: Any, device: str = "CPU", **keywords: Any):
        super().__init__(network, device, **keywords)
        self._forget()

    def infer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self._of is not self._now:  # another network or other shapes by now
            self._forget()
        if not self._worthwhile:
            return super().infer(inputs)
        shapes = tuple(np.shape(each) for each in inputs)
        form = self._forms.get(shapes)
        if form is None and len(self._forms) < _MOST_SHAPES:
            form = self._compiled_for(shapes)
        return super().infer(inputs) if form is None else form.infer(inputs)

    def _compiled_for(self, shapes: tuple) -> CompiledNetwork | None:
        """A form for these shapes; None if the network does not take them."""
        with self._lock:
            if shapes in self._forms:
                return self._forms[shapes]
            if not _take(self.network.inputs, shapes):
                return None
            try:
                form = CompiledNetwork(
                    self.network,
                    self.device,
                    precision=self.precision,
                    thread_num=self.thread_num,
                    config=self.additional_config,
                    shapes=dict(enumerate(shapes)),
                )
            except UsageError:  # the dynamic form says what is wrong with the shapes
                return None
            self._forms[shapes] = form
            return form

    def _forget(self) -> None:
        self._of = self._now
        self._forms: dict[tuple, CompiledNetwork] = {}
        self._worthwhile = (
            self.device == "CPU"
            and any(port.partial_shape.is_dynamic for port in self.network.inputs)
            and _constant_bytes(self.network) <= _MOST_BYTES
        )

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in ("_of", "_forms")}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._forget()

    def __deepcopy__(self, memo: dict) -> ShapedNetwork:
        twin = cast("ShapedNetwork", super().__deepcopy__(memo))
        twin._forget()
        return twin


def _take(ports: Sequence[Any], shapes: tuple) -> bool:
    """Return True if inputs are declared so that they take arrays of these shapes."""
    openvino = require("openvino", "nano")
    return len(ports) == len(shapes) and all(
        port.partial_shape.compatible(openvino.PartialShape(shape))
        for port, shape in zip(ports, shapes, strict=True)
    )


def _constant_bytes(network) -> int:
    return sum(op.get_byte_size() for op in network.get_ops() if op.get_type_name() == "Constant")
