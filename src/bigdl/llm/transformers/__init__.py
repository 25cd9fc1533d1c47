"""Models of transformers in low-bit formats, with the names of `bigdl.llm.transformers` of 2.4."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from bigdl.common.dropped import refuse_name
from bigdl.llm.transformers.model import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForMultipleChoice",
    "AutoModelForNextSentencePrediction",
    "AutoModelForQuestionAnswering",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForTokenClassification",
    "ggml_convert_low_bit",
]

_NATIVE = (
    "BigdlNativeForCausalLM",
    "LlamaForCausalLM",
    "ChatGLMForCausalLM",
    "GptneoxForCausalLM",
    "BloomForCausalLM",
    "StarcoderForCausalLM",
)


def ggml_convert_low_bit(
    model: torch.nn.Module,
    qtype: str,
    *args: object,
    modules_to_not_convert: Collection[str] | None = None,
    **kwargs: object,
) -> torch.nn.Module:
    """Convert the linear layers of a model to a low-bit format, in place.

    Parameters
    ----------
    model : Module
    qtype : str
        Name of a format; see :func:`bigdl.llm.optimize_model`.
    *args, **kwargs
        Accepted; they have no effect.
    modules_to_not_convert : list of str, optional
        Names of layers that keep their precision.

    Examples
    --------
    >>> import torch
    >>> from bigdl.llm.transformers import ggml_convert_low_bit
    >>> ggml_convert_low_bit(torch.nn.Sequential(torch.nn.Linear(64, 8)), "fp8")[0]
    LowBitLinear(64, 8, 'fp8')
    """
    from bigdl.llm.low_bit import convert_linears

    convert_linears(model, qtype, modules_to_not_convert or ())
    return model


def __getattr__(name: str) -> object:
    if name in _NATIVE:
        refuse_name(
            __name__,
            name,
            "it ran native GGML files; use AutoModelForCausalLM.from_pretrained("
            "load_in_4bit=True), or TextModel of bigdl.llm, which also opens GGUF files",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
