"""Embeddings for LangChain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from langchain_core.embeddings import Embeddings

from bigdl.common.dropped import refuse_name

if TYPE_CHECKING:
    from bigdl.llm.model import TextModel

__all__ = ["TransformersEmbeddings"]

_NATIVE = (
    "BigdlNativeEmbeddings",
    "LlamaEmbeddings",
    "BloomEmbeddings",
    "GptneoxEmbeddings",
    "StarcoderEmbeddings",
)


class TransformersEmbeddings(Embeddings):
    """Embeddings of texts by an encoder, for LangChain.

    Parameters
    ----------
    model : bigdl.llm.TextModel
        Encoder.

    Examples
    --------
    >>> from bigdl.llm.langchain.embeddings import TransformersEmbeddings  # doctest: +SKIP
    >>> TransformersEmbeddings.from_model_id("all-MiniLM-L6-v2").embed_query("a cat")
    ... # doctest: +SKIP
    """

    def __init__(self, model: TextModel):
        self.model = model

    @classmethod
    def from_model_id(
        cls, model_id: str, model_kwargs: Mapping[str, Any] | None = None, **kwargs: object
    ) -> Self:
        """Load an encoder in fp32; its files say how it pools.

        Parameters
        ----------
        model_id : str
            Folder, or id on the Hugging Face hub.
        model_kwargs : mapping, optional
            ``precision="int8"`` has an effect; other arguments are accepted.
        **kwargs
            Accepted; they have no effect.
        """
        from bigdl.llm.model import TextModel

        precision = str((model_kwargs or {}).get("precision", "auto"))
        return cls(TextModel(model_id, precision, task="embed"))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the embedding of each text.

        Parameters
        ----------
        texts : list of str
        """
        import pandas as pd

        from bigdl.llm.functions import embed

        if not texts:
            return []
        frame = embed(pd.DataFrame({"text": texts}), "text", model=self.model, on_error="raise")
        return [list(map(float, each)) for each in frame["embedding"]]

    def embed_query(self, text: str) -> list[float]:
        """Return the embedding of a text.

        Parameters
        ----------
        text : str
        """
        return self.embed_documents([text])[0]


def __getattr__(name: str) -> object:
    if name in _NATIVE:
        refuse_name(__name__, name, "it ran native GGML files; use TransformersEmbeddings")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
