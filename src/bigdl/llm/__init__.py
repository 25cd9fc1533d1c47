"""Language models on tables: embeddings, prompts, classification and ranking of text columns."""

from bigdl.llm.functions import classify, embed, prompt, rank, register
from bigdl.llm.model import TextModel

__all__ = ["TextModel", "classify", "embed", "prompt", "rank", "register"]
