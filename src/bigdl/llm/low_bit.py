"""Linear layers whose weights have 4, 5, 8 or 16 bits, as in `bigdl.llm` of BigDL 2.4.

A format rounds the rows of a weight in groups: ``level[code] * scale + offset``. The layers run in
PyTorch, so they work in any model, and gradients pass through them to LoRA adapters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError, as_usage_error, require

CONFIG_KEY = "bigdl_transformers_low_bit"
FACTS = "bigdl_config.json"
RUNTIME = "runtime"
"""Key of ``bigdl_config.json``; its value is one of the two runtimes."""
# The network of a decoder in OpenVINO is in the folder of this name.
OPENVINO, PYTORCH = "openvino", "pytorch"
WEIGHTS = "low_bit_model.safetensors"  # not a name that transformers reads as a whole model

_GROUPS = (64, 32)
# Quantiles of a normal distribution (Dettmers et al., 2023, appendix E).
_NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = tuple(sorted({sign * each / 6 for each in _E2M1 for sign in (-1, 1)}))


@dataclass(frozen=True)
class LowBitFormat:
    """Number format of the weights of a linear layer.

    Attributes
    ----------
    bits : int
    symmetric : bool
        False if each group also has an offset.
    levels : tuple of float
        Values of the codes between -1 and 1; empty for evenly spaced ones.
    dtype : torch.dtype, optional
        Type of stored floating-point weights.
    """

    bits: int
    symmetric: bool = True
    levels: tuple[float, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def level_values(self) -> torch.Tensor:
        """Value of each code before scaling."""
        if self.levels:
            return torch.tensor(self.levels)
        first = 2 ** (self.bits - 1) if self.symmetric else 0
        return torch.arange(2**self.bits, dtype=torch.float32) - first


FORMATS: Mapping[str, LowBitFormat] = {
    "sym_int4": LowBitFormat(4),
    "asym_int4": LowBitFormat(4, symmetric=False),
    "sym_int5": LowBitFormat(5),
    "asym_int5": LowBitFormat(5, symmetric=False),
    "sym_int8": LowBitFormat(8),
    "nf4": LowBitFormat(4, levels=_NF4),
    "fp4": LowBitFormat(4, levels=_FP4),
    "fp8": LowBitFormat(8, dtype=torch.float8_e4m3fn),
    "fp16": LowBitFormat(16, dtype=torch.float16),
    "bf16": LowBitFormat(16, dtype=torch.bfloat16),
}
MIXED = "mixed_4bit"
"""Name for nf4 or fp4, whichever changes a layer less."""
LOW_BITS = (*FORMATS, MIXED)


def check_low_bit(name: str, argument: str = "low_bit") -> None:
    """Raise UsageError unless `name` is a format.

    Raises
    ------
    UsageError
        Names the nearest format for those of BigDL 2.4 that do not exist here.
    """
    if name == "nf3":
        raise UsageError(
            f"{argument}='nf3' is not supported: no runtime has weights of 3 bits; use 'nf4'",
            code="unsupported",
            argument=argument,
        )
    check_choice(argument, name, LOW_BITS)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes of 4 or 5 bits as bytes: half bytes, then the fifth bits."""
    low = codes & 15
    half_bytes = low[:, ::2] | (low[:, 1::2] << 4)
    if bits == 4:
        return half_bytes
    high = (codes >> 4).view(len(codes), -1, 8)
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8)
    return torch.cat([half_bytes, (high * weights).sum(2).to(torch.uint8)], 1)


def _unpacked(data: torch.Tensor, columns: int, bits: int) -> torch.Tensor:
    half_bytes = data[:, : columns // 2]
    codes = torch.stack([half_bytes & 15, half_bytes >> 4], 2).view(len(data), columns)
    if bits == 4:
        return codes
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    high = (data[:, columns // 2 :, None] >> shifts) & 1
    return codes | (high.reshape(len(data), columns) << 4)


def _group_size(columns: int, low_bit: LowBitFormat) -> int:
    if low_bit.bits == 8:  # one scale per row is exact enough
        return columns
    return next((size for size in _GROUPS if columns % size == 0), columns)


def _quantized(
    weight: torch.Tensor, low_bit: LowBitFormat
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the data, scales and offsets of a weight."""
    weight = weight.detach().float()
    rows, columns = weight.shape
    if low_bit.bits == 16:
        return weight.to(low_bit.dtype), None, None
    groups = weight.view(rows, -1, _group_size(columns, low_bit))
    largest = groups.abs().amax(2)
    if low_bit.dtype is not None:  # fp8
        scales = (largest / torch.finfo(low_bit.dtype).max).clamp(min=1e-12)
        return (weight / scales).to(low_bit.dtype), scales, None
    if low_bit.bits == 8:
        scales = (largest / 127).clamp(min=1e-12)
        return (weight / scales).round().to(torch.int8), scales, None
    offsets = None
    if low_bit.levels:
        scales = largest.clamp(min=1e-12)
        levels = low_bit.level_values
        middles = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(groups / scales[..., None], middles)
    elif low_bit.symmetric:
        # The value of the largest size is exact: its code is the lowest level.
        extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
        half = 2 ** (low_bit.bits - 1)
        scales = extreme / -half
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        codes = (groups / scales[..., None]).round() + half
    else:
        offsets = groups.amin(2)
        scales = ((groups.amax(2) - offsets) / (2**low_bit.bits - 1)).clamp(min=1e-12)
        codes = ((groups - offsets[..., None]) / scales[..., None]).round()
    codes = codes.clamp(0, 2**low_bit.bits - 1).to(torch.uint8).view(rows, columns)
    return _packed(codes, low_bit.bits), scales, offsets


class _LinearFunction(torch.autograd.Function):
    """Product with a weight that is dequantized again in the backward pass."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, values: torch.Tensor, layer: LowBitLinear
    ) -> torch.Tensor:
        vars(ctx)["layer"] = layer
        return functional.linear(values, layer.dequantized(values.dtype))

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient @ vars(ctx)["layer"].dequantized(gradient.dtype), None


class LowBitLinear(torch.nn.Linear):
    """Linear layer with weights in a low-bit format, which are not trained.

    Parameters
    ----------
    in_features, out_features : int
    low_bit : str
        Name of a format.
    bias : bool

    Examples
    --------
    >>> import torch
    >>> from bigdl.llm.low_bit import LowBitLinear
    >>> layer = torch.nn.Linear(64, 8)
    >>> small = LowBitLinear.of(layer, "sym_int8")
    >>> x = torch.rand(2, 64)
    >>> torch.allclose(small(x), layer(x), atol=0.05), small.data.dtype
    (True, torch.int8)
    """

    def __init__(self, in_features: int, out_features: int, low_bit: str, bias: bool = True):
        torch.nn.Module.__init__(self)  # without the parameter of the weight
        self.in_features, self.out_features = in_features, out_features
        self.low_bit = low_bit
        self.data: torch.Tensor
        self.scales: torch.Tensor | None
        self.offsets: torch.Tensor | None
        row = _quantized(torch.zeros(1, in_features), FORMATS[low_bit])  # all rows are alike
        for name, value in zip(("data", "scales", "offsets"), row, strict=True):
            rows = None if value is None else value.expand(out_features, *value.shape[1:]).clone()
            self.register_buffer(name, rows)
        self.bias: Any
        self.register_parameter(
            "bias", torch.nn.Parameter(torch.zeros(out_features)) if bias else None
        )

    @classmethod
    def of(cls, layer: torch.nn.Linear, low_bit: str) -> LowBitLinear:
        """Return a layer with the rounded weights of a linear layer."""
        if low_bit == MIXED:
            weight = layer.weight.detach().float()
            both = (cls.of(layer, name) for name in ("nf4", "fp4"))
            return min(
                both, key=lambda each: float((each.dequantized(weight.dtype) - weight).norm())
            )
        made = cls(layer.in_features, layer.out_features, low_bit, bias=layer.bias is not None)
        made.data, made.scales, made.offsets = _quantized(layer.weight, FORMATS[low_bit])
        made.bias = layer.bias
        return made.train(layer.training)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Dequantized copy of the weight."""
        return self.dequantized(torch.float32 if self.bias is None else self.bias.dtype)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in a floating-point type."""
        low_bit = FORMATS[self.low_bit]
        if self.scales is None:
            return self.data.to(dtype)
        if low_bit.bits == 8:
            return (self.data.float() * self.scales).to(dtype)
        codes = _unpacked(self.data, self.in_features, low_bit.bits)
        levels = low_bit.level_values.to(codes.device)
        groups = levels[codes.int()].view(*self.scales.shape, -1) * self.scales[..., None]
        if self.offsets is not None:
            groups = groups + self.offsets[..., None]
        return groups.view(self.out_features, self.in_features).to(dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.requires_grad and torch.is_grad_enabled():
            product: torch.Tensor = _LinearFunction.apply(input, self)  # type: ignore[no-untyped-call]
        else:
            product = functional.linear(input, self.dequantized(input.dtype))
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.low_bit!r}"


def _linears(
    model: torch.nn.Module, excluded: Collection[str]
) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Yield the linear layers that have a low-bit format."""
    for name, layer in model.named_modules():
        is_root = not name  # it cannot be replaced in place
        if is_root or type(layer) is not torch.nn.Linear or layer.in_features % 8:
            continue
        if not any(each == name or each in name.split(".") for each in excluded):
            yield name, layer


def _replace(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def convert_linears(
    model: torch.nn.Module, low_bit: str, excluded: Collection[str] = ()
) -> dict[str, str]:
    """Replace the linear layers of a model one by one, and return the format of each.

    Parameters
    ----------
    model : Module
        Model, which is changed.
    low_bit : str
        Name of a format.
    excluded : collection of str
        Names of layers, or parts of them, that keep their precision.

    Raises
    ------
    UsageError
        If no layer can be replaced.
    """
    check_low_bit(low_bit)
    formats = {}
    for name, layer in list(_linears(model, excluded)):
        small = LowBitLinear.of(layer, low_bit)
        _replace(model, name, small)
        formats[name] = small.low_bit
    if not formats:
        raise UsageError(
            f"{type(model).__name__} has no linear layer to convert to {low_bit}; pass a model "
            "with torch.nn.Linear layers, and fewer modules_to_not_convert",
            code="model-unsupported",
        )
    config = getattr(model, "config", None)
    if config is not None:
        # A head that shared its weights with the embeddings has private ones now.
        _untie_low_bit(model)
        setattr(config, CONFIG_KEY, low_bit)
    return formats


def _untie_low_bit(model: torch.nn.Module) -> None:
    """Remove low-bit layers from the weights that transformers ties.

    The configuration does not change, because some models scale their outputs by it.
    """
    weights = [f"{name}.weight" for name in formats_of(model)]
    for attribute in ("_tied_weights_keys", "all_tied_weights_keys"):
        tied = getattr(model, attribute, None)
        if isinstance(tied, dict):
            kept = {
                target: source
                for target, source in tied.items()
                if not any(re.match(target, weight) for weight in weights)
            }
            setattr(model, attribute, kept)


def formats_of(model: torch.nn.Module) -> dict[str, str]:
    """Return the format of each low-bit layer by its name."""
    return {
        name: layer.low_bit
        for name, layer in model.named_modules()
        if isinstance(layer, LowBitLinear)
    }


def save_weights(model: torch.nn.Module, folder: Path, low_bit: str) -> None:
    """Write the weights of a converted model and the formats of its layers."""
    safetensors = require("safetensors.torch", "llm")
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in model.state_dict().items():
        first = seen.setdefault((tensor.data_ptr(), tensor.shape), name)
        if first == name or not tensor.numel():
            tensors[name] = tensor.contiguous()
        else:
            shared[name] = first
    safetensors.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    facts = {
        CONFIG_KEY: low_bit,
        RUNTIME: PYTORCH,
        "layers": formats_of(model),
        "shared": shared,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the content of ``bigdl_config.json``.

    Raises
    ------
    UsageError
        If the folder has none, or it is damaged.
    """
    path = folder / FACTS
    if not path.is_file():
        raise UsageError(
            f"{str(folder)!r} was not written by save_low_bit; load it with "
            "from_pretrained(load_in_4bit=True), or optimize_model",
            code="file-format",
            path=str(folder),
        )
    with as_usage_error(f"{str(path)!r} is damaged", code="file-damaged", path=str(path)):
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        facts[CONFIG_KEY]
        facts.setdefault(RUNTIME, PYTORCH if "layers" in facts else OPENVINO)
    return facts


def load_weights(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Return a model with the weights that :func:`save_weights` wrote.

    Parameters
    ----------
    model : Module
        Model of the same class; its weights may be on the meta device.
    folder : Path

    Raises
    ------
    UsageError
        If the weights are of another model.
    """
    safetensors = require("safetensors.torch", "llm")
    facts = read_facts(folder)
    with as_usage_error(
        f"The weights in {str(folder)!r} do not fit {type(model).__name__}; build the model "
        "from the config.json of this folder",
        code="model-mismatch",
        path=str(folder),
    ):
        for name, low_bit in facts["layers"].items():
            old = model.get_submodule(name)
            assert isinstance(old, torch.nn.Linear)
            has_bias = old.bias is not None
            _replace(
                model, name, LowBitLinear(old.in_features, old.out_features, low_bit, has_bias)
            )
        tensors = safetensors.load_file(folder / WEIGHTS)
        for name, first in facts["shared"].items():
            tensors[name] = tensors[first]
        model.load_state_dict(tensors, strict=True, assign=True)
        _untie_low_bit(model)
    return model
