"""LoRA on frozen low-bit weights, with the names of `bigdl.llm.transformers.qlora` of 2.4."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

import peft
import torch
from peft.tuners.lora import Linear as LoraLinear

from bigdl.common.errors import UsageError
from bigdl.llm.low_bit import LowBitLinear, formats_of

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

__all__ = ["LoraLowBitLinear", "PeftModel", "get_peft_model", "prepare_model_for_kbit_training"]


class LoraLowBitLinear(LoraLinear):
    """LoRA adapter of a low-bit layer; :func:`get_peft_model` creates it.

    Examples
    --------
    >>> import peft, torch
    >>> from bigdl.llm import optimize_model
    >>> from bigdl.llm.transformers.qlora import get_peft_model
    >>> model = optimize_model(torch.nn.Sequential(torch.nn.Linear(64, 8)), low_bit="nf4")
    >>> model = get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"]))
    >>> type(model.base_model.model[0]).__name__
    'LoraLowBitLinear'
    """

    def merge(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise UsageError: a sum of weights has no exact low-bit format."""
        raise UsageError(
            "An adapter cannot be merged into low-bit weights; load the original without "
            "load_in_low_bit, then PeftModel.from_pretrained(...).merge_and_unload() of peft",
            code="unsupported",
        )


def _registered(model: torch.nn.Module, config: PeftConfig) -> PeftConfig:
    """Return the configuration, which creates adapters of low-bit layers."""
    if not formats_of(model):
        raise UsageError(
            f"{type(model).__name__} has no low-bit layers to train adapters on; load it with "
            "from_pretrained(load_in_low_bit='nf4', optimize_model=False)",
            code="model-type",
        )
    if not isinstance(config, peft.LoraConfig):
        raise UsageError(
            f"Low-bit layers take a LoraConfig of peft, not {type(config).__name__}",
            code="argument-type",
            argument="peft_config",
        )
    config._register_custom_module({LowBitLinear: LoraLowBitLinear})
    return config


def get_peft_model(
    model: torch.nn.Module, peft_config: PeftConfig, adapter_name: str = "default", **kwargs: bool
) -> peft.PeftModel:
    """Return a model with trainable LoRA adapters on its frozen low-bit layers.

    Parameters
    ----------
    model : Module
        Model of ``from_pretrained(load_in_low_bit=..., optimize_model=False)``.
    peft_config : peft.LoraConfig
    adapter_name : str
    **kwargs
        Further arguments of ``peft.get_peft_model``.

    Raises
    ------
    UsageError
        If the model has no low-bit layers, or the configuration is not of LoRA.

    Examples
    --------
    >>> import peft, torch
    >>> from bigdl.llm import optimize_model
    >>> from bigdl.llm.transformers.qlora import get_peft_model
    >>> model = optimize_model(torch.nn.Sequential(torch.nn.Linear(64, 8)), low_bit="nf4")
    >>> model = get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"]))
    >>> model.get_nb_trainable_parameters()[0]  # 4 * (64 + 8)
    288
    """
    config = _registered(model, peft_config)
    return peft.get_peft_model(model, config, adapter_name, **kwargs)  # type: ignore[call-overload,no-any-return]


def prepare_model_for_kbit_training(
    model: PreTrainedModel, use_gradient_checkpointing: bool = True
) -> PreTrainedModel:
    """Freeze a low-bit model and prepare it for training of adapters.

    Parameters
    ----------
    model : Module
        A model of transformers with low-bit layers.
    use_gradient_checkpointing : bool
        True to compute activations again in the backward pass, which takes less memory.

    Examples
    --------
    >>> from bigdl.llm.transformers.qlora import prepare_model_for_kbit_training
    >>> model = prepare_model_for_kbit_training(model)  # doctest: +SKIP
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    if use_gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    return model


class PeftModel:
    """``PeftModel`` of peft for low-bit models.

    Examples
    --------
    >>> from bigdl.llm.transformers.qlora import PeftModel
    >>> model = PeftModel.from_pretrained(model, "adapter")  # doctest: +SKIP
    """

    @staticmethod
    def from_pretrained(
        model: torch.nn.Module,
        model_id: str | os.PathLike,
        adapter_name: str = "default",
        is_trainable: bool = False,
        *,
        config: PeftConfig | None = None,
        **kwargs: bool,
    ) -> peft.PeftModel:
        """Load an adapter onto a low-bit model.

        Parameters
        ----------
        model : Module
        model_id : str or Path
            Folder of the adapter.
        adapter_name : str
        is_trainable : bool
            True to train the adapter further.
        config : peft.LoraConfig, optional
            Default: that of the adapter.
        **kwargs
            Further arguments of ``peft.PeftModel.from_pretrained``.
        """
        config = config or peft.PeftConfig.from_pretrained(os.fspath(model_id))
        config.inference_mode = not is_trainable
        return peft.PeftModel.from_pretrained(
            model,
            model_id,
            adapter_name,
            is_trainable,
            config=_registered(model, config),
            **kwargs,  # type: ignore[arg-type]
        )
