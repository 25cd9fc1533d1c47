"""Methods that stay with PyTorch's own operators, one call after the other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigdl.common.cpu import isa_flags
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.context import Settings, remember_settings
from bigdl.nano.pytorch.inference.layout import apply_layouts, layouts_of, module_to_channels_last
from bigdl.nano.pytorch.inference.source import TorchSource
from bigdl.nano.pytorch.inference.weights import load_weights, save_weights

__all__ = ["EAGER", "BF16Model"]

_BF16_SETS = ("avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert")
# What autocast runs in bf16: with weights in bf16 it need not cast them at each call.
_LOWERED = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)


class BF16Model(AcceleratedModel):
    """A copy of a module that runs under autocast to bfloat16.

    Weights of linear and convolutional layers are stored in bfloat16, which is what autocast casts
    them to at every call; all others stay in fp32. Results are the same as with autocast alone.

    Attributes
    ----------
    nano_module : Module
        The copy.
    channels_last : bool
    channels_last_available : list of str
        The layout of each input.
    """

    def __init__(self, module, *, channels_last=False, layouts=(), threads=None, method="bf16"):
        super().__init__(method=method, threads=threads)
        self.nano_module = module.eval()
        self.channels_last = channels_last
        self.channels_last_available = list(layouts)

    @classmethod
    def convert(cls, module: torch.nn.Module, channels_last: bool = False, **keywords) -> BF16Model:
        """Convert a module in place."""
        for part in module.modules():
            # exact classes: a subclass may use its weights in another way
            if type(part) in _LOWERED:
                part.to(torch.bfloat16)
        if channels_last:
            module_to_channels_last(module)
        return cls(module, channels_last=channels_last, **keywords)

    @property
    def inference_settings(self) -> Settings:
        return Settings(threads=self.thread_num, bf16=True)

    def nano_run(self, args: tuple, kwargs: dict) -> Any:
        if self.channels_last:
            args, kwargs = apply_layouts(args), apply_layouts(kwargs)
        if torch.is_autocast_enabled("cpu"):
            return self.nano_module(*args, **kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            return self.nano_module(*args, **kwargs)

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
    def load_from(cls, directory: Path, meta: Mapping, *, model=None, inplace=False, **_):
        if model is None:
            raise UsageError(
                "You must pass model when loading a bf16 model: its directory holds weights only"
            )
        module = load_weights(
            model if inplace else copy.deepcopy(model), directory / meta["checkpoint"]
        )
        converted = cls.convert(
            module,
            channels_last=meta["channels_last"],
            layouts=meta.get("channels_last_available", ()),
            threads=meta["thread_num"],
            method=meta.get("method", "bf16"),
        )
        return converted.nano_attach(model)


@dataclass(frozen=True)
class OriginalMethod(Method):
    """The user's model as it is."""

    def build(self, source: TorchSource, options: BuildOptions):
        remember_settings(source.model, Settings(threads=options.threads))
        return source.model


@dataclass(frozen=True)
class AutocastMethod(Method):
    """Autocast to bfloat16."""

    def build(self, source: TorchSource, options: BuildOptions) -> BF16Model:
        if not isa_flags().intersection(_BF16_SETS):
            warnings.warn(
                "This processor has no instructions for bfloat16, so bf16 may be slower than fp32",
                stacklevel=2,
            )
        module = source.model if options.inplace else copy.deepcopy(source.model)
        return BF16Model.convert(
            module,
            channels_last=self.channels_last,
            layouts=layouts_of(source.sample_tensors) if source.has_sample else (),
            threads=options.threads,
            method=self.name,
        ).nano_attach(source.model)


EAGER = [
    OriginalMethod("original", option="original", default=True),
    AutocastMethod("bf16", precision="bf16", option="bf16", default=True),
    AutocastMethod(
        "bf16_channels_last",
        precision="bf16",
        option="bf16 + channels_last",
        channels_last=True,
    ),
]
