"""Language models for LangChain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from langchain_core.language_models.llms import LLM

from bigdl.common.dropped import refuse_name
from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

__all__ = ["TransformersLLM", "TransformersPipelineLLM"]

_NATIVE = ("BigdlNativeLLM", "LlamaLLM", "BloomLLM", "GptneoxLLM", "StarcoderLLM", "ChatGLMLLM")


class TransformersLLM(LLM):
    """Language model of transformers in a low-bit format, for LangChain.

    Attributes
    ----------
    model_id : str
        Folder, or id on the Hugging Face hub.
    model_kwargs : dict or None
        Arguments of ``from_pretrained``, and of ``generate`` (``max_length``, ``temperature``).
    model, tokenizer
        Model and tokenizer.
    streaming : bool
        Accepted; the text is returned when it is complete.

    Examples
    --------
    >>> from bigdl.llm.langchain.llms import TransformersLLM  # doctest: +SKIP
    >>> llm = TransformersLLM.from_model_id("SmolLM2", model_kwargs={"max_length": 64})
    ... # doctest: +SKIP
    >>> llm.invoke("The capital of France is")  # doctest: +SKIP
    """

    model_id: str
    model_kwargs: dict[str, Any] | None = None
    model: Any
    tokenizer: Any
    streaming: bool = True

    @classmethod
    def from_model_id(
        cls, model_id: str, model_kwargs: Mapping[str, Any] | None = None, **kwargs: object
    ) -> Self:
        """Load a model with 4-bit weights and its tokenizer.

        Parameters
        ----------
        model_id : str
        model_kwargs : mapping, optional
        **kwargs
            Further attributes of a language model of LangChain.
        """
        from bigdl.llm.transformers import AutoModelForCausalLM

        options = dict(model_kwargs or {})
        if not {"load_in_4bit", "load_in_low_bit"} & set(options):
            options["load_in_4bit"] = True
        return cls._loaded(AutoModelForCausalLM.from_pretrained, model_id, options, kwargs)

    @classmethod
    def from_model_id_low_bit(
        cls, model_id: str, model_kwargs: Mapping[str, Any] | None = None, **kwargs: object
    ) -> Self:
        """Load a model that ``save_low_bit`` wrote; its folder also has the tokenizer.

        Parameters
        ----------
        model_id : str
        model_kwargs : mapping, optional
        **kwargs
            Further attributes of a language model of LangChain.
        """
        from bigdl.llm.transformers import AutoModelForCausalLM

        return cls._loaded(AutoModelForCausalLM.load_low_bit, model_id, model_kwargs or {}, kwargs)

    @classmethod
    def _loaded(
        cls,
        load: Callable[..., torch.nn.Module],
        model_id: str,
        options: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> Self:
        """Return a language model, of which `options` are for loading or for ``generate``."""
        loading = dict(options)
        generation = {name: loading.pop(name) for name in _GENERATION if name in loading}
        model = load(model_id, **loading)
        transformers = require("transformers", "llm")
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_id)
        return cls(
            model_id=model_id, model=model, tokenizer=tokenizer, model_kwargs=generation, **others
        )

    @property
    def _llm_type(self) -> str:
        return "BigDL-llm"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {"model_id": self.model_id, "model_kwargs": self.model_kwargs}

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: object = None,
        **kwargs: object,
    ) -> str:
        """Return the completion of a prompt, without the stop string that ends it."""
        inputs = self.tokenizer([prompt], return_tensors="pt")
        inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        options = _without_zero_temperature({**(self.model_kwargs or {}), **kwargs})
        if stop:
            count = inputs["input_ids"].shape[1]
            options["stopping_criteria"] = [_stops(self.tokenizer, stop, count)]
        ids = self.model.generate(**inputs, **options)[0]
        new = ids[inputs["input_ids"].shape[1] :]
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        return _until(text, stop or ())


class TransformersPipelineLLM(TransformersLLM):
    """The same, by the task of a pipeline of transformers."""

    @classmethod
    def from_model_id(  # type: ignore[override]
        cls,
        model_id: str,
        task: str = "text-generation",
        model_kwargs: Mapping[str, Any] | None = None,
        pipeline_kwargs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> Self:
        """Load a model with 4-bit weights for text generation.

        Parameters
        ----------
        model_id : str
        task : {"text-generation"}
        model_kwargs, pipeline_kwargs : mapping, optional
        **kwargs
            Further attributes of a language model of LangChain.

        Raises
        ------
        UsageError
            If the task is another one.
        """
        if task != "text-generation":
            raise UsageError(
                f"task={task!r} is not supported; pass task='text-generation', or the model of "
                "AutoModelForSeq2SeqLM.from_pretrained to HuggingFacePipeline of LangChain",
                code="unsupported",
                argument="task",
            )
        options = {**(model_kwargs or {}), **(pipeline_kwargs or {})}
        return super().from_model_id(model_id, options, **kwargs)


_GENERATION = (
    *("do_sample", "max_length", "max_new_tokens", "min_new_tokens", "num_beams"),
    *("repetition_penalty", "temperature", "top_k", "top_p"),
)


def _without_zero_temperature(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of ``generate`` in which greedy search replaces a temperature of 0."""
    if options.get("temperature") != 0:
        return options
    others = {name: value for name, value in options.items() if name != "temperature"}
    return {**others, "do_sample": False}


def _stops(
    tokenizer: PreTrainedTokenizerFast, stop: Sequence[str], count: int
) -> Callable[..., torch.Tensor]:
    """Return a criterion that ends when the text after `count` tokens has a stop string."""
    import torch

    def has_stop(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        texts = tokenizer.batch_decode(ids[:, count:], skip_special_tokens=True)
        return torch.tensor([any(each in text for each in stop) for text in texts])

    return has_stop


def _until(text: str, stop: Sequence[str]) -> str:
    ends = [at for each in stop if (at := text.find(each)) >= 0]
    return text[: min(ends)] if ends else text


def __getattr__(name: str) -> object:
    if name in _NATIVE:
        refuse_name(__name__, name, "it ran native GGML files; use TransformersLLM")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
