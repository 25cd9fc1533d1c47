"""Low-bit weights for any PyTorch model: `bigdl.llm.optimize` of BigDL 2.4."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError, require, user_stacklevel

if TYPE_CHECKING:
    import torch

__all__ = ["load_low_bit", "low_memory_init", "optimize_model"]


def optimize_model(
    model: torch.nn.Module,
    low_bit: str = "sym_int4",
    optimize_llm: bool = True,
    modules_to_not_convert: Collection[str] | None = None,
    replace_embedding: bool = False,
) -> torch.nn.Module:
    """Convert the linear layers of a model to a low-bit format, in place.

    Parameters
    ----------
    model : Module
        A model of transformers or of another library.
    low_bit : str
        ``"sym_int4"``, ``"asym_int4"``, ``"sym_int5"``, ``"asym_int5"``, ``"sym_int8"``, ``"nf4"``,
        ``"fp4"``, ``"mixed_4bit"``, ``"fp8"``, ``"fp16"`` or ``"bf16"``.
    optimize_llm : bool
        Accepted; it has no effect. ``InferenceOptimizer.quantize`` of :mod:`bigdl.nano.pytorch`
        converts a decoder to a faster runtime.
    modules_to_not_convert : list of str, optional
        Names of layers that keep their precision, such as ``"lm_head"``.
    replace_embedding : bool
        Accepted; it has no effect.

    Returns
    -------
    Module
        The model, which has a method ``save_low_bit(folder)`` now.

    Raises
    ------
    UsageError
        If the format is unknown, or the model has no linear layer.

    Examples
    --------
    >>> import torch
    >>> from bigdl.llm import optimize_model
    >>> model = optimize_model(torch.nn.Sequential(torch.nn.Linear(64, 8)), low_bit="nf4")
    >>> model[0]
    LowBitLinear(64, 8, 'nf4')
    """
    torch = require("torch", "llm")
    from bigdl.llm.low_bit import convert_linears

    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"optimize_model takes a torch.nn.Module, not {type(model).__name__}",
            code="model-type",
        )
    if replace_embedding:
        warn_that_embeddings_stay()
    convert_linears(model, low_bit, modules_to_not_convert or ())
    return attach_save(model, low_bit)


def warn_that_embeddings_stay() -> None:
    """Warn that ``replace_embedding=True`` has no effect."""
    warnings.warn(
        "replace_embedding has no effect: embeddings keep their precision",
        stacklevel=user_stacklevel(),
    )


def attach_save(model: torch.nn.Module, low_bit: str) -> torch.nn.Module:
    """Return a model of low-bit layers with a method ``save_low_bit``."""
    setattr(model, "save_low_bit", functools.partial(_save, model, low_bit))  # noqa: B010
    return model


def _save(model: torch.nn.Module, low_bit: str, save_dir: str | os.PathLike) -> None:
    """Write a low-bit model to a folder."""
    from bigdl.llm.low_bit import FACTS, OPENVINO, RUNTIME, read_facts, save_weights

    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / FACTS).is_file():
        if read_facts(folder)[RUNTIME] == OPENVINO:
            shutil.rmtree(folder / OPENVINO, ignore_errors=True)
        (folder / "generation_config.json").unlink(missing_ok=True)
    save_weights(model, folder, low_bit)
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)


def load_low_bit(model: torch.nn.Module, model_path: str | os.PathLike) -> torch.nn.Module:
    """Load weights that ``save_low_bit`` wrote into a model of the same class.

    Parameters
    ----------
    model : Module
        The model; build it within :func:`low_memory_init`, so that no weights are allocated.
    model_path : str or Path

    Raises
    ------
    UsageError
        If the folder was not written by ``save_low_bit``, or has weights of another model.

    Examples
    --------
    >>> import torch
    >>> from bigdl.llm.optimize import load_low_bit, low_memory_init, optimize_model
    >>> optimize_model(torch.nn.Sequential(torch.nn.Linear(64, 8))).save_low_bit("small")
    >>> with low_memory_init():
    ...     model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    >>> load_low_bit(model, "small")[0]
    LowBitLinear(64, 8, 'sym_int4')
    """
    from bigdl.llm.low_bit import CONFIG_KEY, OPENVINO, RUNTIME, load_weights, read_facts

    folder = Path(model_path)
    facts = read_facts(folder)
    if facts[RUNTIME] == OPENVINO:
        raise UsageError(
            f"{str(folder)!r} has a decoder in OpenVINO; load it with "
            "AutoModelForCausalLM.load_low_bit",
            code="file-format",
            path=str(folder),
        )
    model = load_weights(model, folder)
    load_generation_config(model, folder)
    return attach_save(model, facts[CONFIG_KEY])


def load_generation_config(model: torch.nn.Module, folder: Path) -> None:
    """Give a model of transformers the generation options of its folder, if it has any."""
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        transformers = require("transformers", "llm")
        options = transformers.GenerationConfig.from_pretrained(folder)
        setattr(model, "generation_config", options)  # noqa: B010


@contextmanager
def low_memory_init() -> Iterator[None]:
    """Context manager in which models are built without memory for their weights.

    ``from_pretrained`` of transformers then reads only the configuration. Load the weights with
    :func:`load_low_bit`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.llm.optimize import low_memory_init
    >>> with low_memory_init():
    ...     model = torch.nn.Linear(4, 4)
    >>> model.weight.is_meta
    True
    """
    accelerate = require("accelerate", "llm")
    transformers = require("transformers", "llm")
    from bigdl.nano.attribute_patch import AttributePatch

    def from_config(
        cls: Callable[[object], torch.nn.Module],
        path: str | os.PathLike,
        *args: object,
        config: object = None,
        **kwargs: object,
    ) -> torch.nn.Module:
        trusted = {"trust_remote_code": kwargs.get("trust_remote_code")}
        config = config or transformers.AutoConfig.from_pretrained(path, **trusted)
        return cls(config).eval()

    patch = AttributePatch()
    patch.set(transformers.PreTrainedModel, "from_pretrained", classmethod(from_config))
    try:
        with accelerate.init_empty_weights(include_buffers=False):
            yield
    finally:
        patch.undo()
