"""Auto classes of transformers that load models in a low-bit format, as in BigDL 2.4."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bigdl.common.errors import UsageError, as_usage_error, require, user_stacklevel
from bigdl.llm.low_bit import (
    CONFIG_KEY,
    FACTS,
    OPENVINO,
    RUNTIME,
    WEIGHTS,
    check_low_bit,
    convert_linears,
    load_weights,
    read_facts,
)
from bigdl.llm.optimize import (
    attach_save,
    load_generation_config,
    low_memory_init,
    warn_that_embeddings_stay,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from bigdl.nano.pytorch.inference.decoders import DecoderModel

# Formats of decoders in OpenVINO: the precision, and whether weights are symmetric.
_ENGINE_FORMATS = {
    "sym_int4": ("int4", True),
    "asym_int4": ("int4", False),
    "sym_int8": ("int8", True),
}


class _LowBitAutoModel:
    """Base of the Auto classes."""

    _name: ClassVar[str]

    @classmethod
    def from_pretrained(
        cls,
        *args: object,
        load_in_4bit: bool = False,
        load_in_low_bit: str | None = None,
        optimize_model: bool = True,
        modules_to_not_convert: Collection[str] | None = None,
        replace_embedding: bool = False,
        **kwargs: object,
    ) -> torch.nn.Module:
        """Load a model of transformers and convert its weights to a low-bit format.

        Parameters
        ----------
        *args, **kwargs
            Arguments of ``from_pretrained`` of the class in transformers.
        load_in_4bit : bool
            The same as ``load_in_low_bit="sym_int4"``.
        load_in_low_bit : str, optional
            A format of :func:`bigdl.llm.optimize_model`. None loads the model of transformers.
        optimize_model : bool
            True to run a decoder in OpenVINO if it has the format (``"sym_int4"``,
            ``"asym_int4"``, ``"sym_int8"``) and `modules_to_not_convert` is empty. Pass False
            to train it with LoRA. Other models run in PyTorch.
        modules_to_not_convert : list of str, optional
            Names of layers that keep their precision.
        replace_embedding : bool
            Accepted; it has no effect.

        Returns
        -------
        Module
            The model, with a method ``save_low_bit(folder)``.

        Raises
        ------
        UsageError
            If the format is unknown, the device is not the CPU, or the folder has low-bit weights.
        """
        transformers = require("transformers", "llm")
        low_bit = load_in_low_bit or ("sym_int4" if load_in_4bit else None)
        if low_bit is not None:
            check_low_bit(low_bit, "load_in_low_bit")
        if replace_embedding:
            warn_that_embeddings_stay()
        path: Any = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        _refuse_device(kwargs.pop("device_map", None))
        if path is not None:
            _refuse_low_bit(Path(path), cls.__name__)
        if "torch_dtype" in kwargs:
            kwargs["dtype"] = kwargs.pop("torch_dtype")
        model = getattr(transformers, cls._name).from_pretrained(*args, **kwargs)
        if low_bit is None:
            unchanged: torch.nn.Module = model
            return unchanged
        if optimize_model and not modules_to_not_convert and low_bit in _ENGINE_FORMATS:
            engine = _in_engine(model, cls._name, low_bit)
            if engine is not None:
                return engine
        convert_linears(model.eval(), low_bit, modules_to_not_convert or ())
        return attach_save(model, low_bit)

    @classmethod
    def load_low_bit(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *args: object,
        optimize_model: bool = True,
        **kwargs: object,
    ) -> torch.nn.Module:
        """Load a model that ``save_low_bit`` wrote.

        Parameters
        ----------
        pretrained_model_name_or_path : str or Path
            Folder.
        *args, **kwargs
            Accepted for programs for BigDL 2.4; only ``trust_remote_code`` has an effect.
        optimize_model : bool
            Accepted; the folder has the runtime of the model.

        Raises
        ------
        UsageError
            If the folder was not written by ``save_low_bit``.
        """
        transformers = require("transformers", "llm")
        folder = Path(pretrained_model_name_or_path)
        facts = read_facts(folder)
        low_bit = facts[CONFIG_KEY]
        _refuse_device(kwargs.get("device_map"))
        if facts[RUNTIME] == OPENVINO:
            from bigdl.nano.pytorch import InferenceOptimizer

            model: Any = InferenceOptimizer.load(folder / OPENVINO)
            return _with_saved_engine(model, low_bit)
        trusted = {"trust_remote_code": kwargs.get("trust_remote_code")}
        config = transformers.AutoConfig.from_pretrained(folder, **trusted)
        with low_memory_init():
            model = getattr(transformers, cls._name).from_config(config, **trusted)
        load_generation_config(model, folder)
        return attach_save(load_weights(model, folder).eval(), low_bit)


def _refuse_low_bit(folder: Path, class_name: str) -> None:
    """Refuse a folder whose weights are in a low-bit format already."""
    if (folder / FACTS).is_file():
        advice = f"was written by save_low_bit; load it with {class_name}.load_low_bit"
    elif _is_marked(folder / "config.json"):
        advice = "has low-bit weights that this version does not read; convert the original again"
    else:
        return
    raise UsageError(f"{str(folder)!r} {advice}", code="file-format", path=str(folder))


def _is_marked(config: Path) -> bool:
    """Return True if a configuration is of a low-bit model."""
    if not config.is_file():
        return False
    with as_usage_error(f"{str(config)!r} is damaged", code="file-damaged", path=str(config)):
        return json.loads(config.read_text(encoding="utf-8")).get(CONFIG_KEY) is not None


def _refuse_device(device: object) -> None:
    if device is not None and str(device) not in ("cpu", "auto", "{'': 'cpu'}"):
        raise UsageError(
            f"device_map={device!r} is not supported: low-bit models run on the CPU; leave "
            "device_map out, or run the model of transformers on this device",
            code="unsupported",
            argument="device_map",
        )


def _in_engine(model: PreTrainedModel, auto_class: str, low_bit: str) -> torch.nn.Module | None:
    """Return a decoder in OpenVINO, or None if the model is none or cannot be converted."""
    if auto_class != "AutoModelForCausalLM" or model.config.is_encoder_decoder:
        return None
    import torch

    from bigdl.nano.acceleration import WeightOptions
    from bigdl.nano.pytorch import InferenceOptimizer

    precision, symmetric = _ENGINE_FORMATS[low_bit]
    ids = torch.arange(8).reshape(2, 4) % model.config.vocab_size
    try:
        made = InferenceOptimizer.quantize(
            model.float().eval(),
            precision,
            accelerator="openvino",
            method="weight_only",
            input_sample={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            weight_options=WeightOptions(symmetric=symmetric),
            strict_check=False,  # the check before the weights are rounded remains
        )
    except UsageError as error:
        if error.code not in ("model-unsupported", "package-missing"):
            raise
        warnings.warn(
            f"{type(model).__name__} runs in PyTorch, which is slower: {error}",
            stacklevel=user_stacklevel(),
        )
        return None
    decoder: Any = made
    decoder.nano_attach(None)  # frees the weights of the original
    return _with_saved_engine(decoder, low_bit)


def _with_saved_engine(model: DecoderModel, low_bit: str) -> torch.nn.Module:
    """Return a decoder in OpenVINO with a method ``save_low_bit``."""
    setattr(model.config, CONFIG_KEY, low_bit)
    setattr(model, "save_low_bit", functools.partial(_save_engine, model, low_bit))  # noqa: B010
    return model


def _save_engine(model: DecoderModel, low_bit: str, save_dir: str | os.PathLike) -> None:
    """Write a decoder in OpenVINO to a folder, with the files of its configuration."""
    from bigdl.nano.pytorch import InferenceOptimizer

    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    InferenceOptimizer.save(model, folder / OPENVINO)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    facts = {CONFIG_KEY: low_bit, RUNTIME: OPENVINO}
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    (folder / WEIGHTS).unlink(missing_ok=True)


class AutoModel(_LowBitAutoModel):
    """``AutoModel`` of transformers with low-bit weights.

    Examples
    --------
    >>> import transformers
    >>> from bigdl.llm.transformers import AutoModel
    >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> config = transformers.BertConfig(**sizes, intermediate_size=32, vocab_size=50)
    >>> transformers.BertModel(config).save_pretrained("bert")
    >>> model = AutoModel.from_pretrained("bert", load_in_4bit=True)
    >>> model.encoder.layer[0].output.dense
    LowBitLinear(32, 16, 'sym_int4')
    """

    _name = "AutoModel"


class AutoModelForCausalLM(_LowBitAutoModel):
    """``AutoModelForCausalLM`` of transformers with low-bit weights.

    Examples
    --------
    >>> from bigdl.llm.transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained(  # doctest: +SKIP
    ...     "SmolLM2-135M-Instruct", load_in_4bit=True
    ... )
    >>> ids = model.generate(**tokenizer("Once", return_tensors="pt"))  # doctest: +SKIP
    >>> model.save_low_bit("smollm2-4bit")  # doctest: +SKIP
    >>> model = AutoModelForCausalLM.load_low_bit("smollm2-4bit")  # doctest: +SKIP
    """

    _name = "AutoModelForCausalLM"


class AutoModelForSeq2SeqLM(_LowBitAutoModel):
    """``AutoModelForSeq2SeqLM`` of transformers with low-bit weights.

    Examples
    --------
    >>> from bigdl.llm.transformers import AutoModelForSeq2SeqLM
    >>> model = AutoModelForSeq2SeqLM.from_pretrained(  # doctest: +SKIP
    ...     "t5-small", load_in_low_bit="sym_int8"
    ... )
    """

    _name = "AutoModelForSeq2SeqLM"


class AutoModelForSpeechSeq2Seq(_LowBitAutoModel):
    """``AutoModelForSpeechSeq2Seq`` of transformers with low-bit weights, such as Whisper.

    Examples
    --------
    >>> from bigdl.llm.transformers import AutoModelForSpeechSeq2Seq
    >>> model = AutoModelForSpeechSeq2Seq.from_pretrained(  # doctest: +SKIP
    ...     "whisper-base", load_in_low_bit="sym_int8"
    ... )
    """

    _name = "AutoModelForSpeechSeq2Seq"


class AutoModelForQuestionAnswering(_LowBitAutoModel):
    """``AutoModelForQuestionAnswering`` of transformers with low-bit weights.

    Examples
    --------
    >>> from bigdl.llm.transformers import AutoModelForQuestionAnswering
    >>> model = AutoModelForQuestionAnswering.from_pretrained(  # doctest: +SKIP
    ...     "bert-squad", load_in_low_bit="sym_int8"
    ... )
    """

    _name = "AutoModelForQuestionAnswering"


class AutoModelForSequenceClassification(_LowBitAutoModel):
    """``AutoModelForSequenceClassification`` of transformers with low-bit weights.

    Examples
    --------
    >>> from bigdl.llm.transformers import AutoModelForSequenceClassification
    >>> model = AutoModelForSequenceClassification.from_pretrained(  # doctest: +SKIP
    ...     "bert-sst2", load_in_low_bit="sym_int8"
    ... )
    """

    _name = "AutoModelForSequenceClassification"


class AutoModelForMaskedLM(_LowBitAutoModel):
    """``AutoModelForMaskedLM`` of transformers with low-bit weights.

    Examples
    --------
    >>> from bigdl.llm.transformers import AutoModelForMaskedLM
    >>> model = AutoModelForMaskedLM.from_pretrained(  # doctest: +SKIP
    ...     "bert-base-uncased", load_in_low_bit="sym_int8"
    ... )
    """

    _name = "AutoModelForMaskedLM"


class AutoModelForNextSentencePrediction(_LowBitAutoModel):
    """``AutoModelForNextSentencePrediction`` of transformers with low-bit weights.

    Examples
    --------
    >>> from bigdl.llm.transformers import AutoModelForNextSentencePrediction
    >>> model = AutoModelForNextSentencePrediction.from_pretrained(  # doctest: +SKIP
    ...     "bert-base-uncased", load_in_low_bit="sym_int8"
    ... )
    """

    _name = "AutoModelForNextSentencePrediction"


class AutoModelForMultipleChoice(_LowBitAutoModel):
    """``AutoModelForMultipleChoice`` of transformers with low-bit weights.

    Examples
    --------
    >>> from bigdl.llm.transformers import AutoModelForMultipleChoice
    >>> model = AutoModelForMultipleChoice.from_pretrained(  # doctest: +SKIP
    ...     "bert-swag", load_in_low_bit="sym_int8"
    ... )
    """

    _name = "AutoModelForMultipleChoice"


class AutoModelForTokenClassification(_LowBitAutoModel):
    """``AutoModelForTokenClassification`` of transformers with low-bit weights.

    Examples
    --------
    >>> from bigdl.llm.transformers import AutoModelForTokenClassification
    >>> model = AutoModelForTokenClassification.from_pretrained(  # doctest: +SKIP
    ...     "bert-ner", load_in_low_bit="sym_int8"
    ... )
    """

    _name = "AutoModelForTokenClassification"
