"""The methods of BigDL 2.x for PyTorch."""

from __future__ import annotations

__all__ = ["NAMES_OF_BIGDL_2"]

_LAYOUTS = ("", "_channels_last")
# Others are tried by search_mode="extended", or by their names.
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
