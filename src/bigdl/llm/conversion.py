"""Conversion of Hugging Face models to OpenVINO networks, for encoders, classifiers and decoders.

The result is a folder with ``openvino_model.xml`` and the tokenizer, which is loaded without
PyTorch. A network of an encoder pools and normalizes as the model's files say, so that its
output is one vector for each text.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import LazyModule, UsageError, as_usage_error, require
from bigdl.llm.facts import CLASSIFY, EMBED, GENERATE, NETWORK

if TYPE_CHECKING:
    import openvino as ov
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast
else:
    ov = LazyModule("openvino", "llm")

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_CALIBRATION_TEXTS = 128
_GROUPS = (128, 64, 32)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty dict if it does not exist."""
    if not path.exists():
        return {}
    with as_usage_error(f"{str(path)!r} is not valid JSON", code="file-damaged", path=str(path)):
        return json.loads(path.read_text(encoding="utf-8"))


def task_of(folder: Path) -> str:
    """Return the task of the model in a Hugging Face folder.

    Raises
    ------
    UsageError
        If the folder has no model, or a model that this package cannot run.
    """
    if (folder / "modules.json").exists():
        return EMBED
    config = read_json(folder / "config.json")
    classes = config.get("architectures") or []
    if not config:
        raise UsageError(
            f"{str(folder)!r} has no config.json; pass a folder with the files of a Hugging Face "
            "model, a GGUF file, or a folder that TextModel.save wrote",
            code="model-type",
            path=str(folder),
        )
    for name in classes:
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            return GENERATE
        if name.endswith("ForSequenceClassification"):
            return CLASSIFY
    if config.get("is_encoder_decoder"):
        raise UsageError(
            f"{', '.join(classes)} has an encoder and a decoder, which is not supported; pass a "
            "decoder, an encoder or a sequence classifier",
            code="model-unsupported",
            path=str(folder),
        )
    return EMBED


# -- encoders and classifiers ----------------------------------------------------------------------


def convert_encoder(
    folder: Path, target: Path, task: str, precision: str, texts: Sequence[str] | None
) -> dict[str, Any]:
    """Convert an encoder or a classifier, and return its facts.

    Parameters
    ----------
    folder : Path
        Hugging Face folder.
    target : Path
        Existing folder for the network and the tokenizer.
    task : str
    precision : str
        ``"fp32"`` or ``"int8"``.
    texts : sequence of str, optional
        Texts to calibrate int8 activations with.
    """
    transformers = require("transformers", "llm")
    require("torch", "llm")
    from bigdl.llm.encoder import TextTokenizer
    from bigdl.nano.acceleration.method import BuildOptions
    from bigdl.nano.openvino.network import write_network
    from bigdl.nano.pytorch.inference.network_models import to_openvino
    from bigdl.nano.pytorch.inference.source import TorchSource

    model_class = transformers.AutoModelForSequenceClassification
    with (
        quiet_loading(),
        as_usage_error(f"The model in {str(folder)!r} cannot be loaded", code="model-unsupported"),
    ):
        if task == EMBED:
            model_class = transformers.AutoModel
        model = model_class.from_pretrained(folder, dtype="float32").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    facts = _encoder_facts(folder, model, tokenizer)
    steps = pooling_steps(folder) if task == EMBED else []
    if task == CLASSIFY:
        labels = model.config.id2label
        facts["labels"] = [str(labels[index]) for index in range(model.config.num_labels)]
    tokenizer.backend_tokenizer.save(str(target / "tokenizer.json"))
    names = [name for name in _INPUTS if name in tokenizer.model_input_names]
    facts["inputs"] = names
    module = text_module(model, steps)
    texts_of_sample = ["a text", "a longer text with several words"]
    sample = TextTokenizer(target, facts).arrays(texts_of_sample, names)
    torch = require("torch", "llm")
    arguments = {name: torch.from_numpy(array) for name, array in sample.items()}
    network = to_openvino(
        TorchSource(module, arguments),
        BuildOptions(dynamic_axes={name: [0, 1] for name in names}),
    )
    if precision == "int8":
        batches = TextTokenizer(target, facts).batches(calibration_texts(texts), names)
        network = _quantized(network, batches)
    facts["dimension"] = int(network.outputs[0].partial_shape[1].get_length())
    write_network(network, target / NETWORK)
    return facts


def _encoder_facts(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    sentence = read_json(folder / "sentence_bert_config.json")
    limits = [
        sentence.get("max_seq_length"),
        tokenizer.model_max_length if tokenizer.model_max_length < 10**6 else None,
        getattr(model.config, "max_position_embeddings", None),
    ]
    prompts = read_json(folder / "config_sentence_transformers.json")
    prefix = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name") or "", "")
    return {
        "max_length": int(next((each for each in limits if each), 512)),
        "pad_token": int(tokenizer.pad_token_id or 0),
        "lower": bool(sentence.get("do_lower_case")),
        "prefix": prefix,
    }


def calibration_texts(texts: Sequence[str] | None) -> list[str]:
    """Return texts for calibration: the given ones, or English paragraphs of Python's manual."""
    if texts is not None:
        if not texts or not all(isinstance(each, str) for each in texts):
            raise UsageError(
                "calibration must be a non-empty list of strings, got "
                f"{type(texts).__name__} of {len(texts)} values",
                code="argument-value",
                argument="calibration",
            )
        return list(texts)
    from pydoc_data.topics import topics

    paragraphs = (p for topic in topics.values() for p in topic.split("\n\n"))
    chosen = [" ".join(p.split()) for p in paragraphs if 40 <= len(p) <= 600]
    return chosen[:: max(1, len(chosen) // _CALIBRATION_TEXTS)][:_CALIBRATION_TEXTS]


def _quantized(network: ov.Model, batches: list[dict[str, np.ndarray]]) -> ov.Model:
    nncf = require("nncf", "llm")
    from bigdl.nano.acceleration.quiet import quiet
    from bigdl.nano.openvino.quantization import kept_signal_stack

    with quiet(), kept_signal_stack():
        return nncf.quantize(
            network,
            nncf.Dataset(batches),
            preset=nncf.QuantizationPreset.MIXED,
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(batches),
        )


def pooling_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the steps after the encoder: pooling, dense layers and normalization."""
    steps: list[dict[str, Any]] = []
    for module in read_modules(folder):
        name = str(module["type"]).rpartition(".")[2]
        config = read_json(folder / str(module["path"]) / "config.json")
        if name == "Pooling":
            modes = [mode for key, mode in _POOLINGS.items() if config.get(key)]
            named = config.get("pooling_mode")
            modes = [named] if isinstance(named, str) else named or modes or ["mean"]
            for mode in modes:
                if mode not in _POOLINGS.values():
                    raise UsageError(
                        f"{str(folder)!r} pools by {mode!r}, which is not supported; supported: "
                        f"{', '.join(_POOLINGS.values())}",
                        code="model-unsupported",
                        path=str(folder),
                    )
            steps.append({"step": "pool", "modes": list(modes)})
        elif name == "Dense":
            steps.append({"step": "dense", "folder": folder / str(module["path"]), **config})
        elif name == "Normalize":
            steps.append({"step": "normalize"})
        elif name != "Transformer":
            raise UsageError(
                f"{str(folder)!r} has a module {name!r} in modules.json, which is not supported; "
                "supported: Transformer, Pooling, Dense, Normalize",
                code="model-unsupported",
                path=str(folder),
            )
    return steps or [{"step": "pool", "modes": ["mean"]}]


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of ``modules.json``, or an empty list."""
    content: Any = read_json(folder / "modules.json")
    return list(content)


def text_module(model: PreTrainedModel, steps: list[dict[str, Any]]) -> torch.nn.Module:
    """Return a module that maps token arrays to one vector, or the logits, of each text."""
    import torch

    dense = [_dense_layer(step) for step in steps if step["step"] == "dense"]

    class TextModule(torch.nn.Module):
        """Encoder or classifier with one output."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.dense = torch.nn.ModuleList(dense)

        def forward(
            self,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            token_type_ids: torch.Tensor | None = None,
        ) -> torch.Tensor:
            types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            result = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
            if not steps:
                return result.logits
            value, layers = result.last_hidden_state, iter(self.dense)
            for step in steps:
                if step["step"] == "pool":
                    parts = [_pooled(value, attention_mask, mode) for mode in step["modes"]]
                    value = torch.cat(parts, 1)
                elif step["step"] == "dense":
                    value = next(layers)(value)
                else:
                    value = torch.nn.functional.normalize(value, p=2.0, dim=1)
            return value

    return TextModule().eval()


def _pooled(value: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    import torch

    weights = mask.unsqueeze(-1).to(value.dtype)
    if mode == "cls":
        return value[:, 0]
    if mode == "max":
        return value.masked_fill(weights == 0, torch.finfo(value.dtype).min).max(1).values
    if mode == "lasttoken":
        last = (mask.sum(1) - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, value.shape[-1])
        return value.gather(1, last).squeeze(1)
    if mode == "weightedmean":
        weights = weights * weights.cumsum(1)
    total = (value * weights).sum(1)
    count = weights.sum(1).clamp(min=1e-9)
    return total / (count.sqrt() if mode == "mean_sqrt_len" else count)


def _dense_layer(step: dict[str, Any]) -> torch.nn.Module:
    import torch
    from safetensors.torch import load_file

    path = step["folder"] / "model.safetensors"
    activation = str(step.get("activation_function", "Identity")).rpartition(".")[2]
    with as_usage_error(f"{str(path)!r} cannot be read", code="file-damaged", path=str(path)):
        weights = load_file(path)
    layer = torch.nn.Linear(
        int(step["in_features"]), int(step["out_features"]), bias="linear.bias" in weights
    )
    layer.load_state_dict({name.removeprefix("linear."): w for name, w in weights.items()})
    return torch.nn.Sequential(layer, getattr(torch.nn, activation)())


# -- decoders --------------------------------------------------------------------------------------


def convert_decoder(folder: Path, target: Path, precision: str) -> dict[str, Any]:
    """Convert a decoder to a network with paged attention, and return its facts.

    Parameters
    ----------
    folder : Path
        Hugging Face folder.
    target : Path
        Existing folder for the network, the tokenizer and the settings of the model.
    precision : str
        ``"fp32"``, ``"int8"`` or ``"int4"``.
    """
    transformers = require("transformers", "llm")
    torch = require("torch", "llm")
    openvino_tokenizers = require("openvino_tokenizers", "llm")
    from bigdl.nano.acceleration.method import BuildOptions
    from bigdl.nano.acceleration.quiet import quiet
    from bigdl.nano.openvino.stateful import ROWS, stateful
    from bigdl.nano.pytorch.inference.decoders import DecoderSource
    from bigdl.nano.pytorch.inference.network_models import to_openvino
    from bigdl.nano.pytorch.inference.source import TorchSource

    with (
        quiet(),
        as_usage_error(f"The model in {str(folder)!r} cannot be loaded", code="model-unsupported"),
    ):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    limit = int(getattr(model.config, "max_position_embeddings", 0) or 2048)
    ids = torch.arange(8).reshape(2, 4)
    source = DecoderSource(
        TorchSource(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    )
    if not source.selects:
        raise UsageError(
            f"{type(model).__name__} has no argument logits_to_keep, so it cannot be converted",
            code="model-unsupported",
            path=str(folder),
        )
    network = to_openvino(source, BuildOptions(dynamic_axes=source.dynamic_axes))
    network, count = _last_logits(network), 2 * source.layers
    del model, source
    inputs, outputs = len(network.inputs), len(network.outputs)
    pairs = [(inputs - count + i, outputs - count + i) for i in range(count)]
    network = stateful(network, pairs)
    # Names that the pass for paged attention and the pipeline look for.
    network.input(ROWS).get_tensor().set_names({"beam_idx"})
    network.outputs[0].get_tensor().set_names({"logits"})
    for port in network.inputs:
        port.get_node().set_friendly_name(port.get_any_name())
    network = _compressed(network, precision)
    ov.save_model(network, target / NETWORK, compress_to_fp16=False)
    del network
    with (
        quiet(),
        as_usage_error(
            f"The tokenizer in {str(folder)!r} cannot be converted", code="model-unsupported"
        ),
    ):
        pair = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    for part, name in zip(
        pair, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True
    ):
        ov.save_model(part, target / name)
    tokenizer.save_pretrained(target)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            shutil.copyfile(folder / name, target / name)
    return {"max_length": limit}


def _last_logits(network: ov.Model) -> ov.Model:
    """Return a network without the input that selects the tokens that get logits."""
    from openvino import opset13

    kept = next(each for each in network.get_parameters() if "kept" in each.output(0).get_names())
    ids = network.inputs[0]
    # The indices of all tokens: the pass for paged attention keeps the last one of each sequence.
    count = opset13.gather(opset13.shape_of(ids), opset13.constant(1, np.int64), 0)
    indices = opset13.range(
        opset13.constant(0, np.int64), count, opset13.constant(1, np.int64), output_type="i64"
    )
    kept.output(0).replace(indices.output(0))
    network.remove_parameter(kept)
    network.validate_nodes_and_infer_types()
    return network


def _compressed(network: ov.Model, precision: str) -> ov.Model:
    """Return a network with int8 or int4 weights."""
    if precision == "fp32":
        return network
    nncf = require("nncf", "llm")
    from bigdl.nano.acceleration.quiet import quiet
    from bigdl.nano.openvino.quantization import kept_signal_stack

    modes = nncf.CompressWeightsMode
    options: dict[str, Any] = {"mode": modes.INT8_ASYM}
    if precision == "int4":
        options = {"mode": modes.INT4_ASYM, "group_size": _group_size(network), "ratio": 1.0}
    with quiet(), kept_signal_stack():
        return nncf.compress_weights(network, **options)


def _group_size(network: ov.Model) -> int:
    """Return the largest usual group size that divides the rows of all weights; -1 if none does."""
    shapes = [
        op.input_value(1).get_partial_shape()
        for op in network.get_ops()
        if op.get_type_name() == "MatMul"
    ]
    lengths = {shape[1].get_length() for shape in shapes if len(shape) == 2 and shape.is_static}
    return next((size for size in _GROUPS if all(n % size == 0 for n in lengths)), -1)


def link_gguf(file: Path, target: Path) -> dict[str, Any]:
    """Put a GGUF file into a folder, and return its facts."""
    name = "model.gguf"
    shutil.copyfile(file, target / name)
    with as_usage_error(f"{str(file)!r} is not a GGUF file", code="file-damaged", path=str(file)):
        return {"max_length": _context_length(file), "file": name}


_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


def _context_length(file: Path) -> int:
    """Return the context length in the metadata of a GGUF file."""
    with file.open("rb") as stream:

        def number(size: int) -> int:
            content = stream.read(size)
            if len(content) < size:
                raise ValueError("the file is truncated")
            return int.from_bytes(content, "little")

        def skip(type_: int) -> None:
            if type_ == _GGUF_ARRAY:
                inner, count = number(4), number(8)
                if inner in _GGUF_SIZES:
                    stream.seek(_GGUF_SIZES[inner] * count, os.SEEK_CUR)
                else:
                    for _ in range(count):
                        skip(inner)
            else:
                stream.seek(number(8) if type_ == _GGUF_STRING else _GGUF_SIZES[type_], os.SEEK_CUR)

        if stream.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        number(12)  # version, number of tensors
        for _ in range(number(8)):
            key = stream.read(number(8))
            type_ = number(4)
            if key.endswith(b".context_length"):
                return number(_GGUF_SIZES[type_])
            skip(type_)
    raise ValueError("it has no context length")


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Context manager without the progress bars and notes of transformers."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()
