"""Helpers for modules of PyTorch, under the names of BigDL 2.x.

They are thin: what they do is done in :mod:`bigdl.nano.pytorch.inference`. torch is imported when a
name is first used.
"""

import importlib
import importlib.metadata

_HOMES = {
    "get_forward_args": "inspection",
    "get_forward_defaults": "inspection",
    "get_forward_annotations": "inspection",
    "get_conditional_args": "inspection",
    "get_input_example": "samples",
    "complement_input_sample": "samples",
    "export_to_onnx": "convert",
    "jit_convert": "convert",
    "load_model": "convert",
    "save_model": "convert",
    "patch_attrs_from_model_to_object": "convert",
    "MetaData": "metadata",
    "apply_proper_channels_last": "channels_last",
    "generate_channels_last_available": "channels_last",
}
# Names of booleans: whether a package is older than this.
_OLDER = {
    **{
        f"TORCH_VERSION_LESS_{version.replace('.', '_')}": ("torch", version)
        for version in ("1.10", "1.11", "1.12", "1.13", "2.0")
    },
    "TORCHVISION_VERSION_LESS_1_12": ("torchvision", "0.12"),
    "TORCHVISION_VERSION_LESS_1_14": ("torchvision", "0.14"),
}

__all__ = [
    *_HOMES,
    *_OLDER,
]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _OLDER:
        return _is_older(*_OLDER[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})


def _is_older(package: str, version: str) -> bool:
    """Whether an installed package is older; one that is missing is not."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _release(found) < _release(version)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
