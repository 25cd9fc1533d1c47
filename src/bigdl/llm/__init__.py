"""Language models on tables: embeddings, prompts, classification and ranking of text columns."""

from bigdl.llm.convert_model import llm_convert
from bigdl.llm.functions import classify, embed, prompt, rank, register
from bigdl.llm.model import TextModel
from bigdl.llm.optimize import optimize_model

__all__ = [
    "TextModel",
    "classify",
    "embed",
    "llm_convert",
    "optimize_model",
    "prompt",
    "rank",
    "register",
]
