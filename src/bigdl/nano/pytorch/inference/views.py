"""Searches as programs that were written for BigDL 2.x see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.registry import methods
from bigdl.nano.acceleration.search.trial import Trial

__all__ = ["NAMES_OF_BIGDL_2", "MethodsOfBigDL2", "ModelRow"]

_LAYOUTS = ("", "_channels_last")
# The methods of BigDL 2.x. Others are tried by search_mode="extended", or by their names.
NAMES_OF_BIGDL_2 = frozenset(
    {
        "original",
        *(f"{kind}{layout}" for kind in ("fp32_ipex", "bf16", "bf16_ipex") for layout in _LAYOUTS),
        "fp32_channels_last",
        *("static_int8", "static_int8_ipex"),
        *(f"jit_{kind}{layout}" for kind in ("fp32", "bf16", "int8") for layout in _LAYOUTS),
        *(f"jit_{kind}_ipex{layout}" for kind in ("fp32", "bf16") for layout in _LAYOUTS),
        *(f"openvino_{kind}" for kind in ("fp32", "bf16", "fp16", "int8")),
        *(f"onnxruntime_{kind}" for kind in ("fp32", "int8_qlinear", "int8_integer")),
    }
)


class MethodsOfBigDL2(Mapping):
    """Methods by their names, read when they are first asked for."""

    def __init__(self, default: bool):
        self._default = default

    def __getitem__(self, name: str) -> Method:
        if name not in self._names():
            raise KeyError(name)
        return methods("torch")[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return f"{{{', '.join(self)}}}"

    def _names(self) -> list[str]:
        return [
            name
            for name, method in methods("torch").items()
            if name in NAMES_OF_BIGDL_2 and (method.default or not self._default)
        ]


class ModelRow(Mapping):
    """One entry of ``optimized_model_dict``."""

    _KEYS = ("status", "latency", "accuracy", "model")

    def __init__(self, get_model: Callable[[str], Any], trial: Trial):
        self._get_model = get_model
        self._trial = trial

    def __getitem__(self, key: str) -> Any:
        if key not in self._KEYS:
            raise KeyError(key)
        if key != "model":
            return getattr(self._trial, key)
        return self._get_model(self._trial.method) if self._trial.usable else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._KEYS)

    def __len__(self) -> int:
        return len(self._KEYS)

    def __repr__(self) -> str:
        return repr({key: self[key] for key in self._KEYS if key != "model"})
