"""PyTorch graphs of a model (traced, scripted, compiled) and the models that run them.

Graphs take and return flat lists of tensors and can be saved to a directory. :class:`GraphModel`
gives a graph the user's signature.
"""

from __future__ import annotations

import copy
import io
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from bigdl.common.cpu import isa_flags
from bigdl.common.environment import EnvContext
from bigdl.common.errors import UsageError, as_usage_error, first_line
from bigdl.common.private_folders import scratch_directory
from bigdl.nano.acceleration.method import BuildOptions, Method
from bigdl.nano.acceleration.precision import BF16
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.acceleration.saved import read_code, write_code
from bigdl.nano.acceleration.structure import Structure, flatten
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    LoadOptions,
    Settings,
    module_with_weights,
    save_weights,
)
from bigdl.nano.pytorch.inference.compiling import compiled as compiled_by_inductor
from bigdl.nano.pytorch.inference.compiling import inductor_cache
from bigdl.nano.pytorch.inference.source import (
    FlatModule,
    ForwardInputs,
    TorchSource,
)

LAYOUTS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}
_BY_RANK = {4: "channels_last", 5: "channels_last_3d"}


def layouts_of(tensors) -> list[str]:
    """Return each input's memory layout: channels last for 4-D and 5-D tensors, or "original"."""
    return [_BY_RANK.get(tensor.ndim, "original") for tensor in tensors]


def apply_layouts(value):
    """Convert 4-D and 5-D tensors in a nested value to channels last."""
    leaves, structure = flatten(value)
    return structure.rebuild([_to_layout(x) if torch.is_tensor(x) else x for x in leaves])


def module_to_channels_last(module: torch.nn.Module) -> torch.nn.Module:
    """Convert a module's 4-D and 5-D weights to channels last in place."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.ndim in _BY_RANK:
            tensor.data = _to_layout(tensor.data)
    return module


def _to_layout(tensor: torch.Tensor) -> torch.Tensor:
    layout = LAYOUTS.get(_BY_RANK.get(tensor.ndim, ""))
    return tensor if layout is None else tensor.contiguous(memory_format=layout)


# Instruction sets for which TorchInductor generates special code.
_VECTOR_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


def export_flat(
    module: torch.nn.Module, source: TorchSource, dynamic_axes: bool | Mapping
) -> torch.export.ExportedProgram:
    """Export a module with flat inputs and outputs as a single graph.

    Parameters
    ----------
    module : FlatModule or GraphModule
    source : TorchSource
    dynamic_axes : bool or dict
        Sizes that may change if the model allows it; see :meth:`TorchSource.dynamic_dimensions`.

    Raises
    ------
    UsageError
        If the model cannot be exported, e.g. because of data-dependent control flow.
    """
    axes = source.dynamic_dimensions(dynamic_axes)
    shapes: tuple = tuple(dict.fromkeys(each, torch.export.Dim.AUTO) for each in axes)
    if isinstance(module, FlatModule):  # its only parameter is *tensors
        shapes = (shapes,)
    sample = tuple(source.general_sample(axes))
    sentence = f"{type(source.model).__name__} cannot be exported as one graph"
    with (
        as_usage_error(sentence, code="model-unsupported"),
        torch.no_grad(),
        quiet(),
        inductor_cache(),
    ):
        return torch.export.export(module, sample, dynamic_shapes=shapes)


class CompiledGraph:
    """Exported graph that TorchInductor has compiled ahead of time, including weights.

    Sizes are checked and strides corrected before each call; the compiled code checks neither.

    Parameters
    ----------
    directory : Path
        Output of ``torch._inductor.aoti_compile_and_package``; removed with this object.
    shapes : list of list of int or None
        Shape of each input; None for a size that may change.
    dtypes : list of str
        Dtype of each input, e.g. ``"float32"``.
    """

    file = "compiled.pt2"

    def __init__(self, directory: Path, shapes: list, dtypes: list[str], names: Sequence[str]):
        self._shapes = shapes
        self._dtypes = [getattr(torch, name) for name in dtypes]
        self._names = names
        self._load(directory)

    def _load(self, directory: Path) -> None:
        self._package = directory / self.file
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        # the package is unpacked to TMPDIR
        with quiet(), inductor_cache(), EnvContext({"TMPDIR": directory}):
            self._run = torch._inductor.aoti_load_package(
                str(self._package), run_single_threaded=False
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the compiled package and the processor's instruction sets, for pickling."""
        state = {k: v for k, v in vars(self).items() if k not in ("_run", "_package")}
        isa = sorted(isa_flags().intersection(_VECTOR_SETS))
        return {**state, "package": self._package.read_bytes(), "isa": isa}

    def __setstate__(self, state: dict[str, Any]) -> None:
        package, isa = state.pop("package"), state.pop("isa")
        _check_processor(isa)
        vars(self).update(state)
        directory = scratch_directory("bigdl-inductor-")
        (directory / self.file).write_bytes(package)
        self._load(directory)

    @classmethod
    def compile(cls, program: torch.export.ExportedProgram, names: Sequence[str]) -> CompiledGraph:
        """Compile an exported program with a C++ compiler; takes seconds to minutes."""
        values = [
            node.meta["val"]
            for node in program.graph.nodes
            if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
        ]
        shapes = [[size if isinstance(size, int) else None for size in v.shape] for v in values]
        dtypes = [str(value.dtype).removeprefix("torch.") for value in values]
        directory = scratch_directory("bigdl-inductor-")
        with (
            ExitStack() as failed,
            as_usage_error("The graph cannot be compiled", code="model-unsupported"),
        ):
            failed.callback(shutil.rmtree, directory, ignore_errors=True)
            with torch.no_grad(), quiet(), inductor_cache():
                torch._inductor.aoti_compile_and_package(
                    program,
                    package_path=str(directory / cls.file),
                    inductor_configs={"freezing": True},
                )
            graph = cls(directory, shapes, dtypes, names)
            failed.pop_all()
        return graph

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        checked = [
            _cast_input(*each)
            for each in zip(tensors, self._shapes, self._dtypes, self._names, strict=True)
        ]
        try:
            return list(self._run(checked))
        except RuntimeError as error:  # the message includes the stack of compiled code
            raise UsageError(
                f"The compiled graph cannot compute this input: {first_line(error)}",
                code="model-input",
            ) from error

    def write(self, directory: Path, compression: str) -> dict:
        """Write the compiled package to a directory; return the metadata for :meth:`read`."""
        return {
            "graph": "compiled",
            **write_code(directory / self.file, self._package.read_bytes()),
            "package_path": self.file,
            "shapes": self._shapes,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self._dtypes],
            "isa": sorted(isa_flags().intersection(_VECTOR_SETS)),
        }

    @classmethod
    def read(
        cls,
        directory: Path,
        meta: Mapping,
        inputs: ForwardInputs,
        load: Callable[[Path], torch.nn.Module],
    ) -> Self:
        """Load a saved package; raise UsageError if the processor lacks required instructions.

        The package is a library with machine code.
        """
        _check_processor(meta["isa"])
        package = read_code(directory / meta["package_path"], meta, "compiled code")
        copy = scratch_directory("bigdl-inductor-")  # outlives the saved directory
        (copy / cls.file).write_bytes(package)
        return cls(copy, meta["shapes"], meta["dtypes"], inputs.names)


def _check_processor(isa: Iterable[str]) -> None:
    lacking = set(isa).difference(isa_flags())
    if lacking:
        raise UsageError(
            f"The model was compiled for a processor with {', '.join(sorted(lacking))}, which "
            "this one does not have; accelerate the original model again here",
            code="processor-unsupported",
        )


def script_bytes(script: torch.jit.ScriptModule) -> bytes:
    """Serialize a TorchScript module to the bytes of its file."""
    file = io.BytesIO()
    with quiet():
        torch.jit.save(script, file)
    return file.getvalue()


def read_script(file: Path, meta: Mapping[str, Any]) -> torch.jit.ScriptModule:
    """Load the script in a saved directory, which must be trusted: scripts can write files."""
    return _script_of(read_code(file, meta, "a program of TorchScript"))


def _script_of(data: bytes) -> torch.jit.ScriptModule:
    with quiet():
        return torch.jit.load(io.BytesIO(data), map_location="cpu")


class ScriptGraph:
    """Graph of a frozen TorchScript module.

    Parameters
    ----------
    script : torch.jit.ScriptModule
    inputs : ForwardInputs or None
        None for a traced module with flat inputs and outputs. Otherwise the module was scripted and
        takes the arguments of the user's forward.
    sizes : list of list of int or None, optional
        Sizes of each input; None for a size that may change.
    """

    file = "ckpt.pth"

    def __init__(
        self,
        script: torch.jit.ScriptModule,
        inputs: ForwardInputs | None,
        sizes: list | None = None,
    ):
        self._script = script
        self._inputs = inputs
        self._sizes = sizes

    def __getstate__(self) -> dict[str, Any]:
        """Return the script's file content for pickling."""
        return {**vars(self), "_script": script_bytes(self._script)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._script = _script_of(state["_script"])

    @classmethod
    def make(
        cls, module: FlatModule, source: TorchSource, method: str | None, options: BuildOptions
    ) -> ScriptGraph:
        """Trace or script a module.

        Parameters
        ----------
        module : FlatModule
        source : TorchSource
        method : {"trace", "script"} or None
            None traces. If the trace would lose control flow, the module is scripted; if that
            fails, the trace is used with a warning.
        options : BuildOptions

        Raises
        ------
        UsageError
            If the method is unknown, or the model cannot be converted by it.
        """
        if method not in (None, "trace", "script"):
            raise UsageError(
                f"jit_method {method} is invalid.",
                code="argument-value",
                argument="jit_method",
                allowed=[None, "trace", "script"],
            )
        name, reasons = type(module.model).__name__, []
        lost = None
        script: Any = None
        if method != "script" and "trace" not in options.rejected_exporters:
            try:
                script, lost = _traced(module, source.sample_tensors, options.jit_strict)
            except UsageError as error:
                reasons.append(str(error))
        can_script = method != "trace" and "script" not in options.rejected_exporters
        if can_script and (script is None or lost is not None):
            try:
                scripted = _scripted(module.model)
            except UsageError as error:
                reasons.append(str(error))
            else:
                source.exporter = "script"
                return cls(scripted, module.inputs)
        if script is None:
            short = "; ".join(reason[:150] for reason in reasons)
            raise UsageError(
                short or f"No other exporter can convert {name} to TorchScript",
                code="model-unsupported",
            )
        if lost is not None and method != "trace":
            source.conversion_warning = (
                f"{name} branches on its data ({lost.filename}, line {lost.lineno}) and cannot be "
                "scripted; its trace, jit_method='trace', always takes the sample's branch"
            )
        source.exporter = "trace"
        return cls(script, None, source.verified_sizes(script))

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._sizes is not None:
            for tensor, sizes in zip(tensors, self._sizes, strict=True):
                _check_sizes(tensor, sizes)
        try:
            if self._inputs is None:
                return list(self._script(*tensors))
            args, kwargs = self._inputs.unflatten(tensors)
            return flatten(self._script(*args, **kwargs))[0]
        except RuntimeError as error:  # its last line describes the cause
            raise UsageError(
                f"TorchScript cannot compute this input: {str(error).strip().splitlines()[-1]}; "
                "give it in the sizes of the sample, or convert the model with a sample like it",
                code="model-input",
            ) from error

    def write(self, directory: Path, compression: str) -> dict:
        """Write the script and return the metadata for :meth:`read`."""
        return {
            "graph": "script",
            **write_code(directory / self.file, script_bytes(self._script)),
            "checkpoint": self.file,
            "flat": self._inputs is None,
            "sizes": self._sizes,
        }

    @classmethod
    def read(
        cls,
        directory: Path,
        meta: Mapping,
        inputs: ForwardInputs,
        load: Callable[[Path], torch.nn.Module],
    ) -> Self:
        """Load a script that :meth:`write` wrote."""
        script = read_script(directory / meta["checkpoint"], meta)
        return cls(script, None if meta["flat"] else inputs, meta.get("sizes"))


class ModuleGraph:
    """Graph interface for a Python module, optionally compiled by ``torch.compile``.

    Parameters
    ----------
    module : FlatModule
        A copy of the user's module.
    compiled : bool
    """

    file = "ckpt.pth"

    def __init__(self, module: FlatModule, compiled: bool):
        self.module = module
        self._compiled = compiled
        self._run: Callable = compiled_by_inductor(module) if compiled else module

    def __getstate__(self) -> dict[str, Any]:
        """Return the module for pickling; its first call compiles it again."""
        return {"module": self.module, "compiled": self._compiled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ModuleGraph.__init__(self, **state)

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self._compiled:
            return list(self._run(*tensors))
        with torch._inductor.config.patch(freezing=True), torch.no_grad():
            return list(self._run(*tensors))

    def write(self, directory: Path, compression: str) -> dict:
        """Write the weights and return the metadata for :meth:`read`."""
        save_weights(self.module.model, directory / self.file, compression)
        return {
            "graph": "module",
            "checkpoint": self.file,
            "compiled": self._compiled,
            "compression": compression,
        }

    @classmethod
    def read(
        cls,
        directory: Path,
        meta: Mapping,
        inputs: ForwardInputs,
        load: Callable[[Path], torch.nn.Module],
    ) -> Self:
        """Load saved weights with `load`, which returns a copy of the user's module."""
        module = load(directory / meta["checkpoint"])
        return cls(FlatModule(module, inputs).eval(), meta["compiled"])


_GRAPHS: dict[str, Any] = {
    "compiled": CompiledGraph,
    "script": ScriptGraph,
    "module": ModuleGraph,
}


_LIBRARIES = str(Path(torch.__file__).parent)


def _traced(module, tensors, strict):
    """Trace a module; return the graph and the first data-dependence warning, or None."""
    name, seen = type(module.model).__name__, warnings.catch_warnings(record=True)
    sentence = f"{name} cannot be traced"
    with (
        as_usage_error(sentence, text=first_line, code="model-unsupported"),
        torch.no_grad(),
        _marked_as_scripting(module),
        seen as warned,
    ):
        warnings.simplefilter("always")
        script = torch.jit.trace(module, tuple(tensors), strict=strict, check_trace=False)
        script = torch.jit.freeze(script.eval())
    # PyTorch's modules give this warning for shape checks.
    lost = (
        each
        for each in warned
        if issubclass(each.category, torch.jit.TracerWarning)
        and not each.filename.startswith(_LIBRARIES)
    )
    return script, next(lost, None)


def _scripted(model):
    sentence = f"{type(model).__name__} cannot be scripted"
    with (
        as_usage_error(sentence, text=first_line, code="model-unsupported"),
        torch.no_grad(),
        _marked_as_scripting(model),
        quiet(),
    ):
        return torch.jit.freeze(torch.jit.script(model).eval())


@contextmanager
def _marked_as_scripting(model: torch.nn.Module) -> Iterator[None]:
    """Temporarily mark LightningModules as being scripted, so that reading ``trainer`` works.

    TorchScript reads all attributes; Lightning's ``to_torchscript`` sets the same mark.
    """
    parts = [part for part in model.modules() if hasattr(part, "_jit_is_scripting")]
    try:
        for part in parts:
            vars(part)["_jit_is_scripting"] = True
        yield
    finally:
        for part in parts:
            vars(part).pop("_jit_is_scripting", None)


def _cast_input(tensor, shape, dtype, name):
    if tensor.dtype is not dtype:
        if tensor.dtype.is_floating_point and not dtype.is_floating_point:
            raise UsageError(
                f"Input {name!r} must be of {dtype}, but it is of {tensor.dtype}; convert it",
                code="model-input",
                argument=name,
            )
        other = tensor.to(dtype)
        whole = not tensor.dtype.is_floating_point and not dtype.is_floating_point
        if whole and not torch.equal(other.to(tensor.dtype), tensor):
            raise UsageError(
                f"Input {name!r} must be of {dtype}, but it holds integers that do not fit it",
                code="data-value",
                argument=name,
            )
        tensor = other
    _check_sizes(tensor, shape, f"Input {name!r}", ", or convert the model with other dynamic_axes")
    return tensor.contiguous()


def _check_sizes(
    tensor, shape, who="An input", advice=", or convert the model with a sample like it"
):
    sizes = tensor.shape
    if len(sizes) != len(shape) or any(
        wanted is not None and wanted != size for wanted, size in zip(shape, sizes, strict=True)
    ):
        wanted = [("any" if size is None else size) for size in shape]
        raise UsageError(
            f"{who} must have the shape {wanted}, but it has {list(sizes)}; give it in this shape"
            f"{advice}",
            code="model-input",
        )


class GraphModel(AcceleratedModel):
    """Accelerated model that runs a PyTorch graph.

    Parameters
    ----------
    graph
        An object of one of the graph classes in this module.
    inputs : ForwardInputs
    outputs : Structure
    facts : mapping
        Values of the attributes below.
    **keywords
        Keywords of :class:`AcceleratedModel`.

    Attributes
    ----------
    channels_last : bool
        True to convert 4-D and 5-D inputs to channels last.
    channels_last_available : list of str
        Memory layout of each input.
    use_ipex : bool
        True if the method's name contains ``ipex``.
    jit_strict, jit_method
        Options of TorchScript.
    """

    bf16 = False
    weights_prepack = None
    enable_onednn = False
    channels_last: bool
    _FACTS = ("channels_last", "channels_last_available", "use_ipex", "jit_strict", "jit_method")

    def __init__(
        self,
        graph: Any,
        inputs: ForwardInputs,
        outputs: Structure,
        facts: Mapping[str, Any],
        **keywords: Any,
    ):
        super().__init__(inputs, outputs, **keywords)
        self.nano_graph = graph
        for name in self._FACTS:
            setattr(self, name, facts[name])

    @property
    def inference_settings(self) -> Settings:
        return Settings(threads=self.thread_num, bf16=self.bf16)

    @property
    def nano_code(self) -> torch.nn.Module | None:
        return getattr(self.nano_graph, "module", None)

    def nano_run(self, args: tuple, kwargs: dict) -> object:
        tensors = [torch.as_tensor(leaf) for leaf in self.nano_inputs.flatten(args, kwargs)]
        if self.channels_last:
            tensors = list(map(_to_layout, tensors))
        lowered = self.bf16 and not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16) if lowered else nullcontext():
            return self.nano_outputs.rebuild(self.nano_graph(tensors))

    def save_to(self, directory: Path, compression: str) -> dict[str, Any]:
        if compression != "fp32" and not isinstance(self.nano_graph, ModuleGraph):
            raise UsageError(
                f"compression={compression!r} does not apply to {type(self).__name__} of method "
                f"{self.nano_method!r}: its weights are part of a compiled graph; leave it out",
                code="argument-conflict",
                argument="compression",
                method=self.nano_method,
            )
        return {
            **self.nano_graph.write(directory, compression),
            **self.nano_describe(),
            **{name: getattr(self, name) for name in self._FACTS},
        }

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        if "inputs" not in meta or meta.get("graph") not in list(_GRAPHS):
            raise UsageError(
                "The directory was written by another version of BigDL, whose compiled models "
                "cannot be read; accelerate the original model again",
                code="version-unsupported",
            )
        inputs = ForwardInputs.from_json(meta["inputs"])

        def load(file: Path) -> torch.nn.Module:
            return convert_in_place(
                module_with_weights(file, options), cls.bf16, meta["channels_last"]
            )

        graph = _GRAPHS[meta["graph"]].read(directory, meta, inputs, load)
        outputs = Structure.from_json(meta["outputs"])
        keywords = {"method": meta["method"], "threads": meta["thread_num"]}
        return cls(graph, inputs, outputs, meta, **keywords).nano_attach(options.model)


class PytorchIPEXJITModel(GraphModel):
    """Model that runs a graph in fp32."""


class PytorchIPEXJITBF16Model(GraphModel):
    """Model that runs a graph under autocast to bfloat16."""

    bf16 = True


class PytorchQuantizedModel(GraphModel):
    """Model that runs a graph in int8."""


class PytorchIPEXQuantizationModel(PytorchQuantizedModel):
    """Model that runs a graph in int8, built with ``method="ipex"``."""


class PytorchJITINT8Model(PytorchQuantizedModel):
    """Model that runs a graph in int8, built with ``accelerator="jit"``."""


def graph_model(
    graph: object, source: TorchSource, method: Method, options: BuildOptions
) -> GraphModel:
    """Build the accelerated model that runs the graph of an acceleration method."""
    cls: type[GraphModel] = PytorchIPEXJITModel
    if method.precision == BF16:
        cls = PytorchIPEXJITBF16Model
    elif method.precision.quantized and method.accelerator == "jit":
        cls = PytorchJITINT8Model
    elif method.precision.quantized:
        cls = PytorchIPEXQuantizationModel if method.ipex else PytorchQuantizedModel
    facts = {
        "channels_last": method.channels_last,
        "channels_last_available": layouts_of(source.sample_tensors),
        "use_ipex": method.ipex,
        "jit_strict": options.jit_strict,
        "jit_method": options.jit_method,
    }
    keywords = {"method": method.name, "threads": options.thread_num}
    model = cls(graph, source.inputs, source.outputs, facts, **keywords)
    return model.nano_attach(source.model)


# Layers that autocast runs in bf16; bf16 weights save a cast at each call.
_LOWERED = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)


def convert_in_place(module: torch.nn.Module, bf16: bool, channels_last: bool) -> torch.nn.Module:
    """Convert a copied module to bf16 weights and channels last in place; return it."""
    for part in module.modules() if bf16 else ():
        # exact classes only: a subclass may use its weights differently
        if type(part) in _LOWERED:
            part.to(torch.bfloat16)
    return module_to_channels_last(module) if channels_last else module


class ModuleModel(AcceleratedModel):
    """Accelerated model that runs the Python code of a copied module.

    Attributes
    ----------
    nano_module : Module
        The copied module.
    channels_last : bool
    channels_last_available : list of str
        Memory layout of each input.
    """

    bf16: ClassVar[bool] = False
    compiled: ClassVar[bool] = False

    def __init__(self, module, *, channels_last=False, layouts=(), threads=None, method=None):
        super().__init__(method=method, threads=threads)
        self.nano_module = convert_in_place(module.eval(), self.bf16, channels_last)
        self.channels_last = channels_last
        self.channels_last_available = list(layouts)
        self._set_call()

    def _set_call(self) -> None:
        # in a dict, so that it is not a submodule
        call = compiled_by_inductor(self.nano_module) if self.compiled else self.nano_module
        self.__dict__["nano_call"] = call

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling; the first call compiles the module again."""
        return {key: value for key, value in vars(self).items() if key != "nano_call"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_call()

    @property
    def inference_settings(self) -> Settings:
        return Settings(threads=self.thread_num, bf16=self.bf16)

    @property
    def nano_code(self) -> torch.nn.Module | None:
        return self.nano_module

    def nano_run(self, args: tuple, kwargs: dict) -> object:
        if self.channels_last:
            args, kwargs = apply_layouts(args), apply_layouts(kwargs)
        with ExitStack() as stack:
            if self.compiled:
                stack.enter_context(torch._inductor.config.patch(freezing=True))
            if self.bf16 and not torch.is_autocast_enabled("cpu"):
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            return self.nano_call(*args, **kwargs)

    def _attribute_owner(self) -> str:
        return type(self.nano_module).__name__

    def save_to(self, directory: Path, compression: str) -> dict:
        save_weights(self.nano_module, directory / "ckpt.pth", compression)
        return {
            "checkpoint": "ckpt.pth",
            "channels_last": self.channels_last,
            "channels_last_available": self.channels_last_available,
            "thread_num": self.thread_num,
            "compression": compression,
            "method": self.nano_method,
        }

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        converted = cls(
            module_with_weights(directory / meta["checkpoint"], options),
            channels_last=meta["channels_last"],
            layouts=meta.get("channels_last_available", ()),
            threads=meta["thread_num"],
            method=meta.get("method", "bf16"),
        )
        return converted.nano_attach(options.model)


class BF16Model(ModuleModel):
    """Model that runs a module's code under autocast to bfloat16.

    Weights of linear and convolutional layers are stored in bfloat16, which saves autocast's cast
    at every call. Others stay in fp32. Results are the same as with autocast alone.
    """

    bf16 = True


class CompiledModel(ModuleModel):
    """Module that ``torch.compile`` compiles at its first call; needs no sample."""

    compiled = True


class CompiledBF16Model(CompiledModel, BF16Model):
    """Module under autocast to bfloat16 that ``torch.compile`` compiles at its first call."""


class CompiledInt8Model(CompiledModel):
    """Module with linear layers quantized by torchao, compiled by ``torch.compile``.

    It is saved with floating-point weights, which are quantized again when it is loaded.
    """

    def __init__(self, module: torch.nn.Module, *, config: str, **keywords: object):
        import torchao.quantization as torchao

        with torch.no_grad(), quiet():
            torchao.quantize_(module.eval(), getattr(torchao, config)())
        self.__dict__["nano_config"] = config
        super().__init__(module, **keywords)

    def __reduce__(self) -> tuple:
        """Pickle the original module; unpickling quantizes it again."""
        if self.nano_source is None:
            raise UsageError(
                "A model that was quantized without a sample is pickled as its original, which is "
                "missing; pass model when loading it",
                code="model-copy",
            )
        return _quantized_again, (
            type(self),
            self.nano_source,
            {"config": self.nano_config, "threads": self.thread_num, "method": self.nano_method},
        )

    def save_to(self, directory: Path, compression: str) -> dict:
        if self.nano_source is None:
            raise UsageError(
                "A model that was quantized without a sample is saved as the weights of its "
                "original, which is missing; pass model when loading it",
                code="argument-missing",
                argument="model",
            )
        save_weights(self.nano_source, directory / "ckpt.pth", compression)
        return {
            "checkpoint": "ckpt.pth",
            "config": self.nano_config,
            "thread_num": self.thread_num,
            "compression": compression,
            "method": self.nano_method,
        }

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        converted = cls(
            module_with_weights(directory / meta["checkpoint"], options),
            config=str(meta["config"]),
            threads=meta["thread_num"],
            method=meta["method"],
        )
        return converted.nano_attach(options.model)


def _quantized_again(
    model_class: type[CompiledInt8Model], source: torch.nn.Module, keywords: Mapping[str, Any]
) -> CompiledInt8Model:
    return model_class(copy.deepcopy(source), **keywords).nano_attach(source)


class ScriptedModel(ModuleModel):
    """Model that runs a scripted module, built without a sample."""

    file = "ckpt.pth"

    @classmethod
    def scripted(cls, module: torch.nn.Module, *, channels_last: bool = False, **keywords: object):
        """Script a module and return its accelerated model.

        Raises
        ------
        UsageError
            If the module cannot be scripted.
        """
        ready = convert_in_place(module.eval(), cls.bf16, channels_last)
        return cls(_scripted(ready), channels_last=channels_last, **keywords)

    def __init__(
        self, script: object, *, channels_last: bool = False, **keywords: Any
    ):  # keywords: of the base
        AcceleratedModel.__init__(self, **keywords)
        self.__dict__["nano_call"] = script  # not a submodule
        self.channels_last = channels_last
        self.channels_last_available: list[str] = []
        self.jit_method = "script"

    @property
    def nano_code(self) -> torch.nn.Module | None:
        return None

    def _attribute_owner(self) -> str:
        return type(self).__name__

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, with the script as its file content."""
        return {**vars(self), "nano_call": script_bytes(self.nano_call)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)
        self.__dict__["nano_call"] = _script_of(state["nano_call"])

    def save_to(self, directory: Path, compression: str) -> dict:
        return {
            "checkpoint": self.file,
            **write_code(directory / self.file, script_bytes(self.nano_call)),
            "channels_last": self.channels_last,
            "thread_num": self.thread_num,
            "method": self.nano_method,
        }

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        loaded = cls(
            read_script(directory / meta["checkpoint"], meta),
            channels_last=meta["channels_last"],
            threads=meta["thread_num"],
            method=meta["method"],
        )
        return loaded.nano_attach(options.model)


class ScriptedBF16Model(ScriptedModel):
    """Model that runs a scripted module under autocast to bfloat16."""

    bf16 = True
