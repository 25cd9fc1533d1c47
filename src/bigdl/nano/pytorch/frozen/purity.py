"""Purity analysis: whether ``forward`` depends only on its input, tensors and attributes.

Layers of torch are known to be pure. For other modules the bytecode is analysed: ``forward`` and
the functions that it calls must not set attributes or globals. They may use only torch, constants,
and functions that pass the same test. Effects on objects show in a run of the module: attributes
and random states are compared before and after (:class:`RandomStateTrace`).
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import random
import sys
import types
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import nn

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)

_CHANGING = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME")
_MODULES = ("math", "functools", "itertools", "operator", "typing", "collections", "torch")
_KNOWN = (
    "builtins",
    "abc",
    "typing",
    "torch",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning",
)
_AROUND = ("__call__", "_call_impl", "__getattr__", "__getattribute__")
_BUILTINS = frozenset(
    "abs all any bool callable dict divmod enumerate filter float frozenset getattr hasattr int "  # noqa: SIM905
    "isinstance issubclass iter len list map max min next pow range repr reversed round set slice "
    "sorted str sum super tuple type zip".split()
)
_CONSTANTS = (
    *(int, float, complex, str, bytes, bool, type(None), type(Ellipsis), range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def is_constant(value: object) -> bool:
    """Return True for immutable values."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_constant, value))
    return isinstance(value, _CONSTANTS)


def why_mode_matters(part: nn.Module) -> str | None:
    """Return the reason why a layer is not deterministic in its current mode, or None."""
    if isinstance(part, NORMS) and (part.training or part.running_mean is None):
        if part.running_mean is None and not part.training:
            return "has no running statistics, so an image's result depends on its batch"
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or part.track_running_stats:
            return "is in train mode, so its statistics follow the batches; call eval() on it"
    if not part.training:
        return None
    if isinstance(part, RANDOM) and getattr(part, "p", cast("Any", getattr(part, "dropout", 1))):
        return "is in train mode, so it draws random numbers; call eval() on it"
    if reads_mode(part):
        return "is in train mode and reads its mode; call eval() on it"
    return None


def reads_mode(part: nn.Module) -> bool:
    """Return True if a custom module's forward reads ``training``."""
    if _is_of_torch(type(part)):
        return False
    code = getattr(type(part).forward, "__code__", None)
    return code is None or "training" in code.co_names


def why_impure(part: nn.Module, uses: dict[tuple[int, str], tuple[dict, str, Any]]) -> str | None:
    """Return the reason why a module (without its submodules) may have side effects, or None.

    Parameters
    ----------
    part : Module
    uses : dict
        Receives the globals that its code reads, with their values.
    """
    cls, forward = type(part), vars(part).get("forward")
    is_original = forward is None or _as_written(part, forward)
    if isinstance(part, torch.jit.ScriptModule) or not is_original:
        return "its forward was replaced by one whose code cannot be read"
    if _is_of_torch(cls):
        return None
    for name, value in vars(part).items():
        if name != "forward" and isinstance(value, _FUNCTIONS):
            reason = _PurityAnalyzer(part, uses).why_function(value)
            if reason:
                return f"{reason} (its attribute {name})"
    analyzer = _PurityAnalyzer(part, uses)
    for base in cls.__mro__:
        for name in _AROUND if is_of_user(base) else ():
            if name in vars(base):
                return f"{base.__name__} overrides {name}"
    return analyzer.why()


def is_of_user(cls: type) -> bool:
    """Return True for a user-defined class, i.e. one not from Python, torch or Lightning."""
    return cls.__module__.split(".")[0] not in _KNOWN


def _as_written(part: nn.Module, forward: object) -> bool:
    """Return True if `forward` is the method of the module's class or Nano's replacement of it."""
    if type(forward).__module__.startswith("bigdl.nano.pytorch."):
        return True
    method = (getattr(forward, "__func__", None), getattr(forward, "__self__", None))
    return method[0] is type(part).forward and method[1] is part


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.modules.")


def _code_of_torch(code: types.CodeType) -> bool:
    return code.co_filename.startswith(_TORCH_FOLDER)


_TORCH_FOLDER = torch.__file__.removesuffix("__init__.py")


class _PurityAnalyzer:
    """Bytecode analysis of one module's forward and of the functions that it calls."""

    def __init__(self, part: nn.Module, uses: dict):
        self._types = [type(part), *(type(value) for value in vars(part).values())]
        self._uses = uses
        self._read: set[types.CodeType] = set()
        self._named = {"forward"}  # names of analysed methods

    def why(self) -> str | None:
        return self._methods("forward")

    def _methods(self, name: str) -> str | None:
        """Return the reason why a method with this name may have side effects, or None."""
        for cls in self._types:
            if cls.__module__ == "builtins":
                continue
            for base in cls.__mro__:
                method = vars(base).get(name)
                if isinstance(method, property):
                    method = method.fget
                elif isinstance(method, staticmethod | classmethod):
                    method = method.__func__
                reason = method and self.why_function(method)
                if reason:
                    return reason
        return None

    def why_function(self, function: Any) -> str | None:
        """Return the reason why a function may have side effects, or None."""
        if isinstance(function, functools.partial):
            wrong = [v for v in (*function.args, *function.keywords.values()) if not is_constant(v)]
            return self.why_function(function.func) or (
                f"{function.func} gets an argument of type {type(wrong[0]).__name__}"
                if wrong
                else None
            )
        if isinstance(function, types.MethodType):
            if not isinstance(function.__self__, type):
                return f"{function.__qualname__} belongs to another object"
            function = function.__func__
        code = getattr(function, "__code__", None)
        if code is None:
            module = str(getattr(function, "__module__", None) or "torch")
            known = module.split(".")[0] in _MODULES or isinstance(function, type)
            return None if known else f"{function!r} is not written in Python"
        if code in self._read:
            return None
        self._read.add(code)
        wrapped = getattr(function, "__wrapped__", None)
        reason = None if wrapped is None else self.why_function(wrapped)
        if reason:
            return reason
        if not _code_of_torch(code):
            if any(isinstance(v, list | dict | set) for v in function.__defaults__ or ()):
                return f"{function.__qualname__} has a mutable default"
            for cell in function.__closure__ or ():
                reason = self._why_value(cell.cell_contents, function.__qualname__, "a variable")
                if reason:
                    return reason
            return self._code(code, function)
        return self._follow(code)

    def _follow(self, code: types.CodeType) -> str | None:
        """Return the reason why a method that the code refers to may have side effects, or None."""
        for name in code.co_names:
            if name in self._named:
                continue
            self._named.add(name)
            reason = self._methods(name)
            if reason:
                return reason
        return None

    def _code(self, code: types.CodeType, function: types.FunctionType) -> str | None:
        where = function.__qualname__
        cells = set(code.co_freevars)
        module: Any = None  # module on top of the stack after the last instruction
        for step in dis.get_instructions(code):
            if step.opname in _CHANGING or (step.opname == "STORE_DEREF" and step.argval in cells):
                what = "imports" if step.opname == "IMPORT_NAME" else "changes"
                return f"{where} {what} {step.argval}"
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                exists, value = _global(function, step.argval)
                if not exists:
                    return f"{where} uses {step.argval}, which is not defined"
                module = value if isinstance(value, types.ModuleType) else None
                reason = None if module else self._why_value(value, where, step.argval)
                if reason:
                    return reason
                if step.argval in function.__globals__:
                    key = (id(function.__globals__), step.argval)
                    self._uses[key] = (function.__globals__, step.argval, value)
                elif step.argval not in _BUILTINS and not _is_error(value):
                    return f"{where} calls {step.argval}"
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and module is not None:
                reason = self._why_member(module, step.argval, where)
                if reason:
                    return reason
                value = getattr(module, step.argval)
                module = value if isinstance(value, types.ModuleType) else None
            elif module is not None and step.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG"):
                if module.__name__.split(".")[0] not in _MODULES:
                    return f"{where} uses {module.__name__}"
                module = None
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                reason = self._code(constant, function)
                if reason:
                    return reason
        return self._follow(code)

    def _why_member(self, module: types.ModuleType, name: str, where: str) -> str | None:
        if module.__name__.split(".")[0] in _MODULES:
            return None
        value = getattr(module, name, None)
        if isinstance(value, types.ModuleType):
            return None
        self._uses[id(vars(module)), name] = (vars(module), name, value)
        return self._why_value(value, where, f"{module.__name__}.{name}")

    def _why_value(self, value: object, where: str, name: str) -> str | None:
        """Return the reason why code that uses a value may have side effects, or None."""
        if is_constant(value) or _owner(value) in ("typing", "torch"):
            return None
        if isinstance(value, type):
            plain = issubclass(value, tuple | nn.Module | torch.Tensor) or _is_error(value)
            plain = plain or hasattr(value, "__dataclass_fields__")
            return None if plain or value.__module__ == "builtins" else f"{where} makes a {name}"
        if isinstance(value, _FUNCTIONS):
            if value is getattr(builtins, name, None):
                return None
            return self.why_function(value)
        if isinstance(value, types.ModuleType):
            return None if value.__name__.split(".")[0] in _MODULES else f"{where} uses {name}"
        return f"{where} uses {name}, a {type(value).__name__}"


def _owner(value: object) -> str:
    """Return the top-level package of a value's class."""
    named = value if isinstance(value, type) else type(value)
    return str(named.__module__).split(".")[0] if not isinstance(value, torch.Tensor) else ""


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _global(function: types.FunctionType, name: str) -> tuple[bool, Any]:
    if name in function.__globals__:
        return True, function.__globals__[name]
    return hasattr(builtins, name), getattr(builtins, name, None)


class RandomStateTrace:
    """Snapshot of the random states of torch, Python and NumPy."""

    def __init__(self) -> None:
        self._states = list(_random_states())

    def why_changed(self) -> str | None:
        """Return a message that names the random generator used since the snapshot, or None."""
        for (name, before), (_, now) in zip(self._states, _random_states(), strict=True):
            if before != now:
                return f"it draws random numbers ({name})"
        return None


def _random_states() -> Iterator[tuple[str, Any]]:
    yield "torch", torch.get_rng_state().numpy().tobytes()
    yield "random", random.getstate()
    name, keys, *rest = cast("tuple", np.random.get_state())
    yield "numpy", (name, keys.tobytes(), *rest)


def framework_attributes() -> frozenset[str]:
    """Return the attribute names that torch and Lightning set on each module."""
    return _torch_names() | (_lightning_names() if "pytorch_lightning" in sys.modules else set())


@functools.cache
def _torch_names() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


@functools.cache
def _lightning_names() -> frozenset[str]:
    import pytorch_lightning

    return frozenset(vars(pytorch_lightning.LightningModule()))
