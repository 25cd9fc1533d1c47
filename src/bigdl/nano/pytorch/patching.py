"""Patches of other libraries that let unmodified programs use Nano or run without a GPU.

:func:`patch_torch` replaces Lightning's Trainer and torchvision's transforms and datasets by
Nano's; :func:`patch_cuda` runs code for CUDA on the CPU; :func:`patch_dtype` replaces one
floating-point dtype by another; :func:`patch_encryption` adds encryption keys to ``torch.save`` and
``torch.load``. They modify other packages in this process until they are undone. Processes of a
Trainer, a TorchNano or ``@nano`` inherit the patches and the default dtype of the process that
starts them, before they import the program.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.attribute_patch import Patch
from bigdl.nano.lazy_names import public_names
from bigdl.nano.pytorch import encryption

# In the order in which other processes apply them.
_encryption, _cuda, _dtype, _names = (Patch() for _ in range(4))


def _import_dynamo() -> None:
    """Import TorchDynamo before torch's functions are patched.

    Its import creates a table of torch's functions by identity. With patched functions in that
    table, it would not recognize the original functions after the patch is undone.
    """
    import torch._dynamo  # noqa: F401


def patch_torch(cuda_to_cpu: bool = True) -> None:
    """Redirect imports of ``pytorch_lightning.Trainer`` and of torchvision to Nano's versions.

    Call it before the program's imports; names that are already imported do not change.
    ``torchvision.transforms`` and ``torchvision.datasets`` are replaced if torchvision works.

    Parameters
    ----------
    cuda_to_cpu : bool
        Also call :func:`patch_cuda`.

    Examples
    --------
    >>> from bigdl.nano.pytorch import patch_torch, unpatch_torch
    >>> patch_torch(cuda_to_cpu=False)
    >>> from pytorch_lightning import Trainer
    >>> Trainer
    <class 'bigdl.nano.pytorch.trainer.Trainer'>
    >>> unpatch_torch()
    """
    if not _names.active:
        _names.call = (patch_torch, (False,))
        import pytorch_lightning as pl
        import pytorch_lightning.trainer

        from bigdl.nano.pytorch.trainer import Trainer

        for owner in (pl, pytorch_lightning.trainer):
            _names.set(owner, "Trainer", Trainer)
        torchvision = _working_torchvision()
        for name in ("transforms", "datasets"):
            if torchvision is not None:
                ours = importlib.import_module(f"bigdl.nano.pytorch.vision.{name}")
                _names.set(torchvision, name, ours)
    if cuda_to_cpu:
        patch_cuda()


def unpatch_torch() -> None:
    """Undo :func:`patch_torch`; do nothing if it is not active.

    Examples
    --------
    >>> from bigdl.nano.pytorch import patch_torch, unpatch_torch
    >>> patch_torch()
    >>> unpatch_torch()
    >>> from pytorch_lightning import Trainer
    >>> Trainer
    <class 'pytorch_lightning.trainer.trainer.Trainer'>
    """
    _names.undo()
    unpatch_cuda()


def _working_torchvision() -> object:
    """Return torchvision with its transforms and datasets, or None if it is missing or broken."""
    try:
        for name in ("transforms", "datasets"):
            importlib.import_module(f"torchvision.{name}")
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError):  # RuntimeError: built for another torch
        return None


# Functions of torch with a keyword `device`.
_DEVICE_FACTORIES = """
    arange asarray as_tensor bartlett_window blackman_window empty empty_like empty_quantized
    empty_strided eye fft.fftfreq fft.rfftfreq from_file full full_like hamming_window
    hann_window kaiser_window linspace load logspace nested.nested_tensor normal ones ones_like
    rand rand_like randint randint_like randn randn_like randperm range scalar_tensor
    sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor
    sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices vander zeros zeros_like
"""
_DEVICE_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
_CUDA_NOTHING = """
    empty_cache init ipc_collect manual_seed manual_seed_all reset_accumulated_memory_stats
    reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats seed seed_all
    set_device set_per_process_memory_fraction set_rng_state set_rng_state_all set_stream
    synchronize
"""
_CUDA_ZERO = """
    max_memory_allocated max_memory_reserved memory_allocated memory_reserved
"""
_CUDA_TENSORS = """
    BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor
    ShortTensor
"""


def get_cuda_status() -> bool:
    """Return True while :func:`patch_cuda` is active.

    Examples
    --------
    >>> from bigdl.nano.pytorch.patching import get_cuda_status, patch_cuda, unpatch_cuda
    >>> patch_cuda()
    >>> get_cuda_status()
    True
    >>> unpatch_cuda()
    >>> get_cuda_status()
    False
    """
    return _cuda.active


def patch_cuda(disable_jit: bool = True) -> None:
    """Patch ``torch.cuda`` so that programs written for CUDA run on the CPU.

    ``.cuda()``, ``.to("cuda")``, ``.to(0)``, ``device="cuda"`` and ``device=1`` mean the CPU. Types
    such as ``torch.cuda.FloatTensor`` become CPU types, streams and events do nothing, autocast to
    float16 on CUDA becomes autocast to bfloat16, and NCCL process groups use gloo.
    ``torch.cuda.is_available()`` and ``torch.cuda.device_count()`` are not patched, so a program
    must not depend on them.

    Parameters
    ----------
    disable_jit : bool
        Accepted; it has no effect.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.patching import patch_cuda, unpatch_cuda
    >>> patch_cuda()
    >>> torch.nn.Linear(2, 1).cuda()(torch.ones(1, 2, device="cuda")).device
    device(type='cpu')
    >>> unpatch_cuda()
    """
    if _cuda.active:
        return
    _cuda.call = (patch_cuda, ())
    _import_dynamo()
    on_cpu = functools.partial(_with_arguments, _cpu_for)
    for name in _DEVICE_FACTORIES.split():
        path, _, last = name.rpartition(".")
        owner = getattr(torch, path) if path else torch
        if hasattr(owner, last):
            _cuda.set(owner, last, on_cpu(getattr(owner, last)))
    for name in _DEVICE_METHODS:
        _cuda.set(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        _cuda.set(owner, "to", _first_on_cpu(on_cpu(owner.to)))
    _cuda.set(torch.Tensor, "type", on_cpu(torch.Tensor.type))
    _cuda.set(torch.Tensor, "record_stream", _no_op("record_stream"))
    for name in _CUDA_TENSORS.split():
        _cuda.set(torch.cuda, name, getattr(torch, name))
    for name in _CUDA_ZERO.split():
        _cuda.set(torch.cuda, name, lambda *args, **kwargs: 0)
    for owner in (torch.Tensor, torch.nn.Module):
        _cuda.set(owner, "cuda", lambda value, *args, **kwargs: value)
    _cuda.set(torch.Tensor, "is_cuda", property(lambda tensor: False))
    for name in _CUDA_NOTHING.split():
        _cuda.set(torch.cuda, name, _no_op(name))
    for name in ("current_stream", "default_stream"):
        _cuda.set(torch.cuda, name, lambda *args, **kwargs: _Stream())
    for name, stub in (("Stream", _Stream), ("ExternalStream", _ExternalStream), ("Event", _Event)):
        _cuda.set(torch.cuda, name, stub)
    for name in ("stream", "device"):
        _cuda.set(torch.cuda, name, lambda *args, **kwargs: contextlib.nullcontext())
    _cuda.set(torch.cuda, "current_device", lambda: 0)
    _patch_amp()
    if torch.distributed.is_available():
        started = torch.distributed.init_process_group
        _cuda.set(torch.distributed, "init_process_group", _with_arguments(_gloo_for, started))


def unpatch_cuda() -> None:
    """Undo :func:`patch_cuda`; do nothing if it is not active.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.patching import patch_cuda, unpatch_cuda
    >>> original = torch.zeros
    >>> patch_cuda()
    >>> torch.zeros is original
    False
    >>> unpatch_cuda()
    >>> torch.zeros is original
    True
    """
    _cuda.undo()


class _NoOpContext(contextlib.nullcontext):
    """Placeholder for a CUDA stream or event; does nothing."""

    def __init__(self, *args: object, **kwargs: object):
        super().__init__(self)

    def query(self) -> bool:
        """Return True, since all work is done."""
        return True

    def elapsed_time(self, end: object) -> float:
        """Return 0 milliseconds."""
        return 0.0

    def record_event(self, event: object = None) -> object:
        """Return `event`, or a new event by default."""
        return event or _Event()

    record = synchronize = wait = wait_event = wait_stream = record_stream = (
        lambda self, *args, **kwargs: None
    )


class _Stream(_NoOpContext):
    """Replacement for ``torch.cuda.Stream``."""


class _ExternalStream(_Stream):
    """Replacement for ``torch.cuda.ExternalStream``."""


class _Event(_NoOpContext):
    """Replacement for ``torch.cuda.Event``."""


def _patch_amp() -> None:
    class Autocast(torch.autocast):
        """Replacement for ``torch.autocast`` that maps device ``cuda`` to CPU bfloat16."""

        def __init__(
            self, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
        ):
            if str(device_type).startswith("cuda"):
                device_type, dtype = "cpu", torch.bfloat16
            super().__init__(device_type, dtype, *args, **kwargs)

    class CudaAutocast(Autocast):
        """Replacement for ``torch.cuda.amp.autocast``."""

        def __init__(
            self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True
        ):
            super().__init__("cuda", dtype, enabled, cache_enabled)

    class Scaler(torch.amp.GradScaler):
        """Gradient scaler that does not scale, since bfloat16 has the range of float32."""

        def __init__(self, *args: object, **kwargs: object):
            super().__init__("cpu", enabled=False)

    for owner in (torch, torch.amp):
        _cuda.set(owner, "autocast", Autocast)
    for owner in (torch.amp, torch.cuda.amp):
        _cuda.set(owner, "GradScaler", Scaler)
    _cuda.set(torch.cuda.amp, "autocast", CudaAutocast)


def _with_arguments(change: Callable[[Any], Any], function: Callable) -> Callable:
    """Wrap a function so that `change` is applied to each of its arguments."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        options = {name: change(value) for name, value in kwargs.items()}
        if change is _cpu_for and _is_number_of_device(options.get("device")):
            options["device"] = "cpu"
        return function(*map(change, args), **options)

    return call


def _first_on_cpu(function: Callable) -> Callable:
    """Wrap a method ``to`` so that a device number as its first argument selects the CPU."""

    @functools.wraps(function)
    def to(self: object, *args: object, **kwargs: object) -> object:
        if args and _is_number_of_device(args[0]):
            args = ("cpu", *args[1:])
        return function(self, *args, **kwargs)

    return to


def _is_number_of_device(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _cpu_for(value: object) -> object:
    """Convert a CUDA device or tensor type to its CPU equivalent; leave other values unchanged."""
    if isinstance(value, str) and value.startswith("torch.cuda.") and value.endswith("Tensor"):
        return value.replace(".cuda", "")
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def _gloo_for(value: object) -> object:
    """Return "gloo" for "nccl"; return other values unchanged."""
    return "gloo" if isinstance(value, str) and value == "nccl" else value


def _no_op(name: str) -> Callable[..., None]:
    """Return a new function with the given name that does nothing."""

    def nothing(*args: object, **kwargs: object) -> None:
        pass

    nothing.__name__ = nothing.__qualname__ = name
    return nothing


_TYPES = {
    **dict.fromkeys(("fp64", "float64", "double", torch.float64), torch.float64),
    **dict.fromkeys(("fp32", "float32", "float", torch.float32), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", torch.bfloat16), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", torch.float16), torch.float16),
}
_DTYPE_METHODS = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "bfloat16"}
_DTYPE_FACTORIES = """
    arange as_tensor asarray empty empty_like eye full full_like linspace logspace ones
    ones_like rand rand_like randn randn_like tensor zeros zeros_like
"""


def patch_dtype(
    from_dtype: str | torch.dtype = "fp64", to_dtype: str | torch.dtype = "fp32"
) -> None:
    """Replace one floating-point dtype with another in programs that name it explicitly.

    This affects ``dtype=`` of functions that create tensors, ``.to(dtype)`` and methods named after
    the dtype such as ``.double()``, but not NumPy arrays.

    Parameters
    ----------
    from_dtype, to_dtype : str or torch.dtype
        ``"fp64"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``.

    Raises
    ------
    UsageError
        If a dtype is unknown, or another one is already replaced.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.patching import patch_dtype, unpatch_dtype
    >>> patch_dtype("fp64", "fp32")
    >>> torch.zeros(2, dtype=torch.float64).dtype, torch.ones(2).double().dtype
    (torch.float32, torch.float32)
    >>> unpatch_dtype()
    """
    for value in (from_dtype, to_dtype):
        if value not in _TYPES:
            raise UsageError(
                f"There is no type {value!r} to replace; choose 'fp64', 'fp32', 'bf16' or 'fp16'",
                code="argument-value",
                allowed=["fp64", "fp32", "bf16", "fp16"],
            )
    if _dtype.active:
        raise UsageError("A type is replaced already; call unpatch_dtype first", code="state")
    _dtype.call = (patch_dtype, (from_dtype, to_dtype))
    _import_dynamo()
    old, new = _TYPES[from_dtype], _TYPES[to_dtype]
    with_type = functools.partial(_with_arguments, lambda value: new if value is old else value)
    for name in _DTYPE_FACTORIES.split():
        _dtype.set(torch, name, with_type(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        _dtype.set(owner, "to", with_type(owner.to))
        method = _DTYPE_METHODS.get(old, "half")
        _dtype.set(owner, method, lambda value, *args, **kwargs: value.to(new))


def unpatch_dtype() -> None:
    """Undo :func:`patch_dtype`; do nothing if it is not active.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.patching import patch_dtype, unpatch_dtype
    >>> patch_dtype("fp64", "fp32")
    >>> unpatch_dtype()
    >>> torch.zeros(2, dtype=torch.float64).dtype
    torch.float64
    """
    _dtype.undo()


def patch_encryption() -> None:
    """Add ``encryption_key`` to ``torch.save`` and ``decryption_key`` to ``torch.load``.

    While patched, the originals are available as ``torch.old_save`` and ``torch.old_load``.

    Examples
    --------
    >>> import torch
    >>> from cryptography.fernet import Fernet
    >>> from bigdl.nano.pytorch.patching import patch_encryption, unpatch_encryption
    >>> key = Fernet.generate_key()
    >>> patch_encryption()
    >>> torch.save({"weight": torch.ones(2)}, "weights.pt", encryption_key=key)
    >>> torch.load("weights.pt", decryption_key=key)
    {'weight': tensor([1., 1.])}
    >>> unpatch_encryption()
    """
    if _encryption.active:
        return
    _encryption.call = (patch_encryption, ())
    for name, ours in (("save", encryption.save), ("load", encryption.load)):
        _encryption.set(torch, f"old_{name}", getattr(torch, name))
        _encryption.set(torch, name, ours)


def unpatch_encryption() -> None:
    """Undo :func:`patch_encryption`; do nothing if it is not active.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.patching import patch_encryption, unpatch_encryption
    >>> patch_encryption()
    >>> hasattr(torch, "old_save")
    True
    >>> unpatch_encryption()
    >>> hasattr(torch, "old_save")
    False
    """
    _encryption.undo()


__all__ = public_names(__name__)
