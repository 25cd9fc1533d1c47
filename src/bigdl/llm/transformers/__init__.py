"""Models of transformers in low-bit formats, with the names of `bigdl.llm.transformers` of 2.4."""

from typing import Any

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


def ggml_convert_low_bit(model: Any, qtype: str, *args: object, **kwargs: Any) -> Any:
    """Convert the linear layers of a model to a low-bit format, in place.

    Parameters
    ----------
    model : Module
    qtype : str
        Name of a format; see :func:`bigdl.llm.optimize_model`.
    *args
        Accepted; they have no effect.
    **kwargs
        ``modules_to_not_convert`` has an effect.
    """
    from bigdl.llm.low_bit import convert_linears

    convert_linears(model, qtype, kwargs.get("modules_to_not_convert") or ())
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
