"""Programs that ask for CUDA, on the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from bigdl.nano.pytorch.patching.replaced import Replaced, show_torch_to_dynamo

__all__ = ["get_cuda_status", "patch_cuda", "unpatch_cuda"]

# Functions of torch that take a device by keyword.
_FACTORIES = """
    arange asarray as_tensor bartlett_window blackman_window empty empty_like empty_quantized
    empty_strided eye fft.fftfreq fft.rfftfreq from_file full full_like hamming_window
    hann_window kaiser_window linspace load logspace nested.nested_tensor normal ones ones_like
    rand rand_like randint randint_like randn randn_like randperm range scalar_tensor
    sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor
    sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices vander zeros zeros_like
"""
_METHODS = """
    new_empty new_full new_ones new_tensor new_zeros
"""
_NOTHING = """
    empty_cache init ipc_collect manual_seed manual_seed_all reset_peak_memory_stats seed
    seed_all set_device synchronize
"""

_replaced = Replaced()


def get_cuda_status() -> bool:
    """Whether :func:`patch_cuda` is in force."""
    return _replaced.active


def patch_cuda(disable_jit: bool = True) -> None:
    """Let a program that is written for CUDA run on the CPU.

    ``.cuda()``, ``.to("cuda")`` and ``device="cuda"`` mean the CPU, streams and events do nothing,
    autocast to float16 on CUDA is autocast to bfloat16, and process groups of NCCL are of gloo.
    ``torch.cuda.is_available()`` and ``torch.cuda.device_count()`` tell the truth: a program must
    not depend on them.

    Parameters
    ----------
    disable_jit : bool
        Accepted; nothing of it is needed any more.
    """
    if _replaced.active:
        return
    show_torch_to_dynamo()
    for name in _FACTORIES.split():
        path, _, last = name.rpartition(".")
        owner = getattr(torch, path) if path else torch
        if hasattr(owner, last):
            _replaced.set(owner, last, _on_cpu(getattr(owner, last)))
    for name in (*_METHODS.split(), "to"):
        _replaced.set(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    _replaced.set(torch.nn.Module, "to", _on_cpu(torch.nn.Module.to))
    for owner in (torch.Tensor, torch.nn.Module):
        _replaced.set(owner, "cuda", lambda value, *args, **kwargs: value)
    _replaced.set(torch.Tensor, "is_cuda", property(lambda tensor: False))
    for name in _NOTHING.split():
        _replaced.set(torch.cuda, name, _doing_nothing(name))
    for name in ("current_stream", "default_stream"):
        _replaced.set(torch.cuda, name, lambda *args, **kwargs: _Stream())
    for name, idle in (("Stream", _Stream), ("ExternalStream", _External), ("Event", _Event)):
        _replaced.set(torch.cuda, name, idle)
    for name in ("stream", "device"):
        _replaced.set(torch.cuda, name, lambda *args, **kwargs: contextlib.nullcontext())
    _replaced.set(torch.cuda, "current_device", lambda: 0)
    _patch_amp()
    if torch.distributed.is_available():
        started = torch.distributed.init_process_group
        _replaced.set(torch.distributed, "init_process_group", _with_gloo(started))


def unpatch_cuda() -> None:
    """Put everything back; again does nothing."""
    _replaced.undo()


class _Idle:
    """A stream or an event on which nothing happens."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between two events."""
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one by default."""
        return event or _Event()

    record = synchronize = wait = wait_event = wait_stream = record_stream = (
        lambda self, *args, **kwargs: None
    )


class _Stream(_Idle):
    """``torch.cuda.Stream``."""


class _External(_Stream):
    """``torch.cuda.ExternalStream``."""


class _Event(_Idle):
    """``torch.cuda.Event``."""


def _patch_amp() -> None:
    original = torch.autocast

    class Autocast(original):
        """``torch.autocast``; on CUDA it is bfloat16 on the CPU."""

        def __init__(self, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any):
            if str(device_type).startswith("cuda"):
                device_type, dtype = "cpu", torch.bfloat16
            super().__init__(device_type, dtype, *args, **kwargs)

    class CudaAutocast(Autocast):
        """``torch.cuda.amp.autocast``."""

        def __init__(self, enabled: bool = True, dtype: Any = None, cache_enabled: bool = True):
            super().__init__("cuda", dtype, enabled, cache_enabled)

    class Scaler(torch.amp.GradScaler):
        """A scaler that does not scale: bfloat16 has the range of float32."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__("cpu", enabled=False)

    class CudaScaler(Scaler):
        """``torch.cuda.amp.GradScaler``."""

    for owner in (torch, torch.amp):
        _replaced.set(owner, "autocast", Autocast)
    _replaced.set(torch.amp, "GradScaler", Scaler)
    _replaced.set(torch.cuda.amp, "GradScaler", CudaScaler)
    _replaced.set(torch.cuda.amp, "autocast", CudaAutocast)


def _on_cpu(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu_for(kwargs["device"])
        if "map_location" in kwargs:
            kwargs["map_location"] = _cpu_for(kwargs["map_location"])
        return function(*map(_cpu_for, args), **kwargs)

    return call


def _cpu_for(value: Any) -> Any:
    """The CPU for a device of CUDA; any other value itself."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def _with_gloo(function: Callable) -> Callable:
    @functools.wraps(function)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        function("gloo" if backend == "nccl" else backend, *args, **kwargs)

    return init_process_group


def _doing_nothing(name: str) -> Callable[..., None]:
    """A function of its own for each name, as those of torch are."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    nothing.__name__ = nothing.__qualname__ = name
    return nothing
