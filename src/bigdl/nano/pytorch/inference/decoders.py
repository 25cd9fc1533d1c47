"""Accelerated decoders of transformers, which generate tokens with a key-value cache.

A decoder is converted with its cache as inputs and outputs, by the same methods as any model, and
compared with the original in the same way, with :class:`DecoderSource` as model source. In OpenVINO
these inputs and outputs become state variables of the network, so that keys and values are not
copied; ONNX Runtime takes and returns them at each call. ``generate`` is the method of the user's
class, which calls the accelerated forward.
"""

from __future__ import annotations

import abc
import functools
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.agreement import build_and_check
from bigdl.nano.acceleration.method import BuildOptions, Method, Probe
from bigdl.nano.acceleration.onnxruntime import OnnxNetwork, OnnxRuntimeFacade
from bigdl.nano.acceleration.structure import TENSOR, as_array, first_batches
from bigdl.nano.openvino.model import OpenVINOFacade, saved_properties
from bigdl.nano.openvino.network import CompiledNetwork
from bigdl.nano.openvino.stateful import stateful
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel, LoadOptions, is_generative
from bigdl.nano.pytorch.inference.source import (
    ForwardInputs,
    TorchSource,
    batches_of,
    evaluating,
    split_batch,
    state_restored,
)

if TYPE_CHECKING:
    from transformers import GenerationMixin
    from transformers.cache_utils import Cache

    from bigdl.nano.acceleration.method import RuntimeNetwork

# Name of the cache in forward and in its result; it differs between versions of transformers.
_CACHE_NAMES = ("cache", "past_key_values")
_INPUT_NAMES = ("input_ids", "attention_mask", "position_ids")
# Accepted values of other arguments: those that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_cache": (True, False),
    "return_dict": (True, False),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}
_FEWEST_TOKENS = 4
_KEPT = "logits_to_keep"


def _cache_in(result: object) -> Any:  # a Cache of transformers, which has no types here
    """Return the cache in a decoder's result, or None."""
    held = (getattr(result, name, None) for name in _CACHE_NAMES)
    return next((each for each in held if each is not None), None)


def _parameters(model_class: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]


def _cache_name(model_class: type) -> str:
    return next(name for name in _CACHE_NAMES if name in _parameters(model_class))


class CachedDecoder(torch.nn.Module):
    """Decoder wrapper that takes and returns the cache as tensors, for conversion.

    Parameters
    ----------
    model : Module
        A transformers model.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self._cache_name = _cache_name(type(model))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None,
        kept: torch.Tensor | None,
        past: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ) -> dict[str, Any]:
        from bigdl.nano.pytorch.inference.decoder_cache import cache_of

        cache = cache_of(past)
        others = {} if position_ids is None else {"position_ids": position_ids}
        if kept is not None:
            others[_KEPT] = kept
        result = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=True,
            return_dict=True,
            **{self._cache_name: cache},
            **others,
        )
        layers: Any = cache.layers
        return {
            "logits": result.logits,
            "present": [(each.keys, each.values) for each in layers],
        }


class DecoderInputs(NamedTuple):
    """Arguments of one call of :class:`CachedDecoder`: tokens, mask, positions and cache."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor | None
    kept: torch.Tensor | None  # indices of the new tokens that get logits
    past: list[tuple[torch.Tensor, torch.Tensor]]


class DecoderSource(TorchSource):
    """Model source of a decoder with its cache as inputs and outputs.

    Parameters
    ----------
    source : TorchSource
        Source of the user's model; its sample and data are whole sequences.

    Raises
    ------
    UsageError
        If the model's cache does not keep the keys and values of all tokens.
    """

    def __init__(self, source: TorchSource):
        from bigdl.nano.pytorch.inference.decoder_cache import holds_all

        model = source.model
        cache = _cache_in(source.result)
        if not holds_all(cache):
            raise UsageError(
                f"{type(model).__name__} has a cache that does not keep the keys and values of all "
                f"tokens ({type(cache).__name__} of {type(cache.layers[0]).__name__}), which no "
                "other runtime can hold; use precision='bf16' without an accelerator, which runs "
                "the original Python code, or pass use_cache=False in the sample, without generate",
                code="model-unsupported",
            )
        self._whole = source
        self._takes_positions = "position_ids" in _parameters(type(model))
        self.selects = _KEPT in _parameters(type(model))
        decoder = CachedDecoder(model)
        sample = self._split(*self._sequence(source.arguments))
        super().__init__(decoder, tuple(sample), data=source.data)
        self.layers = len(sample.past)

    @property
    def dynamic_axes(self) -> dict[str, list[int]]:
        """Indices of each input's dynamic dimensions: rows, tokens, or tokens that get logits."""
        axes = {"past": [0, 2], "kept": [0]}
        return {name: axes.get(name.partition(".")[0], [0, 1]) for name in self.inputs.names}

    def calibration_tensors(self, options: BuildOptions) -> Iterator[list[torch.Tensor]]:
        if self.data is None:
            next(self._whole.calibration_tensors(options))  # raises a clear error
        batches = batches_of(self._whole.model, self.data, self._whole.inputs)
        for batch in first_batches(batches, options.sample_size):
            sample = self._split(*self._sequence((batch.args, batch.kwargs)))
            yield list(map(torch.as_tensor, self.inputs.flatten(tuple(sample), {})))

    def _make_probes(self, axes: list[list[int]]) -> list[Probe]:
        """Return test inputs: sample, other values, empty cache, one more token, padded rows."""
        ids, mask = self._sequence(self._whole.arguments)
        mixed = ids.flatten().flip(0).reshape(ids.shape)
        padded = torch.ones_like(mask)
        padded[-1, :2] = 0
        rows = torch.cat([mixed, mixed[:1]])
        length = ids.shape[1]
        cases = {
            "the sample": self._split(ids, mask),
            "other values": self._split(mixed, mask),
            "a first call": self._split(rows, torch.ones_like(rows), 0),
            "one more token": self._split(mixed[:1], mask[:1], length - 1),
            "the last token's logits": self._split(ids, mask, kept=[-1]),
            "padded rows": self._split(mixed, padded, length - 1),
        }
        probes = []
        for description, inputs in cases.items():
            tensors = self.inputs.flatten(tuple(inputs), {})
            probes.append(Probe(description, tensors, self._called(tensors)))
        return probes

    def _sequence(self, arguments: tuple[tuple, dict]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a call's tokens and mask, repeated if there are too few tokens to split."""
        bound = inspect.signature(self._whole.model.forward).bind(*arguments[0], **arguments[1])
        ids = torch.as_tensor(bound.arguments["input_ids"])
        user_mask = bound.arguments.get("attention_mask")
        mask = (
            torch.ones_like(ids) if user_mask is None else torch.as_tensor(user_mask).to(ids.dtype)
        )
        times = -(-_FEWEST_TOKENS // ids.shape[1])
        return ids.repeat(1, times), mask.repeat(1, times)

    def _split(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        held: int | None = None,
        kept: list[int] | None = None,
    ) -> DecoderInputs:
        """Return the inputs of a call whose first `held` tokens are already in the cache."""
        from bigdl.nano.pytorch.inference.decoder_cache import pairs_of

        held = ids.shape[1] // 2 if held is None else held
        model = self._whole.model
        positions = positions_of(mask) if self._takes_positions else None
        count = max(held, 1)  # run one token to know the shapes of an empty cache
        named = {} if positions is None else {"position_ids": positions[:, :count]}
        with evaluating(model), state_restored(model):
            result = model(
                input_ids=ids[:, :count], attention_mask=mask[:, :count], use_cache=True, **named
            )
        pairs = [tuple(each[:, :, :held] for each in pair) for pair in pairs_of(_cache_in(result))]
        rest = None if positions is None else positions[:, held:]
        new = torch.arange(ids.shape[1] - held)
        # by default one more index than tokens, or a graph would treat both sizes as one
        indices = torch.cat([new, new[-1:]]) if kept is None else new[kept]
        return DecoderInputs(ids[:, held:], mask, rest, indices if self.selects else None, pairs)  # type: ignore[arg-type]


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Return each token's position among the tokens that are not padding, as ``generate`` does."""
    positions = mask.long().cumsum(-1) - 1
    return positions.masked_fill(mask == 0, 0)


def returns_cache(source: TorchSource) -> bool:
    """Return True for a transformers decoder that returns a cache for the sample."""
    model = source.model
    if not is_generative(model) or isinstance(model, AcceleratedModel) or not source.has_sample:
        return False
    if "input_ids" not in source.inputs.names or not set(source.inputs.names) <= set(_INPUT_NAMES):
        return False
    encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return not encoder and _cache_in(source.result) is not None


def accelerated(
    method: Method, source: TorchSource, options: BuildOptions, **keywords: bool
) -> torch.nn.Module:
    """Build the accelerated model of a source, with a growing cache if it is a decoder.

    Parameters
    ----------
    method, source, options, **keywords
        Arguments of :func:`~bigdl.nano.acceleration.agreement.build_and_check`.

    Raises
    ------
    UsageError
        If the model cannot be converted, or gives other results.
    """
    model_class = _MODELS.get(method.accelerator)
    if model_class is None or not returns_cache(source):
        return build_and_check(method, source, options, **keywords)
    if not options.output_tensors:
        raise UsageError(
            "A decoder returns tensors, which generate needs; leave output_tensors out",
            code="argument-conflict",
            argument="output_tensors",
        )
    decoder, model = DecoderSource(source), source.model
    goal = options.goal
    if goal is not None:
        score = goal.score

        def scored(candidate: object) -> float:
            original = candidate is decoder.model
            return score(model if original else model_class.of(candidate, decoder, source))

        options = replace(options, goal=replace(goal, score=scored))
    options = replace(options, dynamic_axes=decoder.dynamic_axes)
    step = build_and_check(method, decoder, options, **keywords)
    return model_class.of(step, decoder, source)


class DecoderModel(AcceleratedModel, abc.ABC):
    """Accelerated decoder: forward with a growing cache, and ``generate``.

    Attributes
    ----------
    config, generation_config
        Configurations of transformers.
    """

    nano_network: Any
    nano_class: type
    nano_layers: int

    def __init__(
        self,
        network: RuntimeNetwork,
        model_class: type,
        facts: Mapping[str, Any],
        **keywords: Any,  # of AcceleratedModel
    ):
        super().__init__(**keywords)
        self.nano_network = network
        self.nano_class = model_class
        self.nano_layers = facts["layers"]
        self.nano_cache_shape = tuple(facts["cache_shape"])  # heads, size of a head
        self.nano_selects = bool(
            facts.get("selects", False)
        )  # missing in models saved by earlier versions
        self.config, self.generation_config = facts["config"], facts["generation_config"]
        self.device, self.dtype = torch.device("cpu"), torch.float32

    @classmethod
    def of(cls, step: Any, decoder: DecoderSource, source: TorchSource) -> Self:
        """Build the decoder from the accelerated model of one decoding step."""
        model = source.model
        past = decoder.sample_tensors[-1]
        facts = {
            "layers": decoder.layers,
            "cache_shape": (past.shape[1], past.shape[3]),
            "selects": decoder.selects,
            "config": model.config,
            "generation_config": getattr(model, "generation_config", None),
        }
        network = cls.nano_network_of(step, decoder.layers)
        return cls(
            network,
            type(model),
            facts,
            inputs=source.inputs,
            outputs=TENSOR,
            method=step.nano_method,
            threads=step.thread_num,
        ).nano_attach(model)

    @classmethod
    def nano_loaded(
        cls,
        network: Any,
        model_class: type,
        facts: Mapping[str, Any],
        threads: int | None,
        meta: Mapping[str, Any],
        options: LoadOptions,
    ) -> Self:
        """Build the decoder from a network that was loaded from files."""
        return cls(
            network,
            model_class,
            facts,
            inputs=ForwardInputs.from_json(meta["inputs"]),
            outputs=TENSOR,
            method=meta["method"],
            threads=threads,
        ).nano_attach(options.model)

    @staticmethod
    @abc.abstractmethod
    def nano_network_of(step: object, layers: int) -> RuntimeNetwork:
        """Return the network of `step`, the accelerated model of one decoding step."""

    @abc.abstractmethod
    def nano_step(self, cache: Cache, inputs: list[np.ndarray]) -> np.ndarray:
        """Return the logits of new tokens and store their keys and values in the cache."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the model; its runtime applies thread count and precision."""
        return self.nano_run(args, kwargs)

    def nano_run(self, args: tuple, kwargs: dict) -> object:
        require("transformers", "nano")
        from transformers import DynamicCache
        from transformers.modeling_outputs import CausalLMOutputWithPast

        from bigdl.nano.pytorch.inference.decoder_cache import check_cache

        name = _cache_name(self.nano_class)
        arguments = self._bound(args, kwargs)
        given_cache = next(
            (arguments.pop(each) for each in _CACHE_NAMES if each in arguments), None
        )
        cache = DynamicCache() if given_cache is None else given_cache
        check_cache(cache)
        keep = arguments.pop(_KEPT, None)
        keeps_cache = arguments.get("use_cache") is not False or given_cache is not None
        as_tuple = arguments.get("return_dict") is False
        ids, mask, positions = (arguments.pop(each, None) for each in _INPUT_NAMES)
        if ids is None:
            raise UsageError(
                "An accelerated decoder needs input_ids",
                code="argument-missing",
                argument="input_ids",
            )
        for other, value in arguments.items():
            if value is not None and value not in _NEUTRAL.get(other, ()):
                raise UsageError(
                    "An accelerated decoder takes input_ids, attention_mask, position_ids and a "
                    f"cache, not {other}; leave it out, or use the original",
                    code="unsupported",
                    argument=other,
                )
        inputs = self._inputs(torch.as_tensor(ids), mask, positions, cache.get_seq_length())
        kept = _kept(keep, inputs[0].shape[1])
        if self.nano_selects:
            inputs.append(kept)
        logits = torch.from_numpy(self.nano_step(cache, inputs))
        if not self.nano_selects:
            logits = logits[:, kept]
        if as_tuple:
            return (logits, cache) if keeps_cache else (logits,)
        held = {name: cache} if keeps_cache else {}
        return CausalLMOutputWithPast(logits=logits, **held)  # type: ignore[arg-type]

    def _bound(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Return a call's positional and keyword arguments by parameter name."""
        names = [name for name in _parameters(self.nano_class) if name != "self"]
        if len(args) > len(names):
            raise UsageError(
                f"The model takes at most {len(names)} arguments by position", code="model-input"
            )
        return dict(zip(names, args, strict=False)) | kwargs

    def _inputs(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        held: int,
    ) -> list[np.ndarray]:
        """Return a call's tokens, mask and positions as a list of arrays, without the cache."""
        rows, new = ids.shape
        if mask is None:
            mask = torch.ones(rows, held + new, dtype=torch.long)
        if mask.ndim != 2 or mask.shape[1] != held + new:
            raise UsageError(
                f"attention_mask has the shape {list(mask.shape)}, but {held} tokens are in the "
                f"cache and {new} are new: it must be [{rows}, {held + new}]",
                code="model-input",
                argument="attention_mask",
            )
        arrays = [as_array(ids), as_array(mask.long())]
        if "position_ids" in _parameters(self.nano_class):
            if positions is None:
                positions = torch.arange(held, held + new)[None]
            arrays.append(as_array(positions.expand(rows, -1).contiguous()))
        return arrays

    def generate(self, *args: Any, **kwargs: Any) -> object:
        """Generate tokens; accepts all arguments of the original model's ``generate``.

        Parameters
        ----------
        *args, **kwargs
            Arguments of ``transformers.GenerationMixin.generate``.
        """
        return _generator(self).generate(*args, **kwargs)

    def nano_facts(self) -> dict[str, Any]:
        """Return the decoder's metadata for a saved directory."""
        generation = self.generation_config
        return {
            "decoder": self.nano_class.__name__,
            "layers": self.nano_layers,
            "cache_shape": list(self.nano_cache_shape),
            "selects": self.nano_selects,
            "config": self.config.to_json_string(use_diff=False),
            "generation_config": None if generation is None else generation.to_json_string(),
        }


def _kept(keep: object, new: int) -> np.ndarray:
    """Return the indices of the new tokens for which `keep` requests logits."""
    indices = np.arange(new)
    if keep is None:
        return indices
    if isinstance(keep, int):
        return indices[max(new - keep, 0) if keep else 0 :]
    return indices[keep if isinstance(keep, slice) else np.asarray(keep)]


def _refuse_compression(compression: str) -> None:
    if compression != "fp32":
        raise UsageError(
            f"compression={compression!r} does not apply to an accelerated decoder; leave it out, "
            "or use precision='int4', or 'int8' with method='weight_only', for smaller weights",
            code="argument-conflict",
            argument="compression",
        )


def _generates(model_class: type) -> bool:
    return any(each.__name__ == "GenerationMixin" for each in model_class.__mro__)


def _loaded_facts(meta: Mapping[str, Any], options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    """Return the class and the metadata of a saved decoder."""
    name = meta["decoder"]["decoder"]
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"{name} is a decoder of transformers, which is not installed; run: pip install "
            "transformers",
            code="package-missing",
            package="transformers",
        ) from None
    known: Any = getattr(transformers, name, None)
    model_class: Any = known if options.model is None else type(options.model)
    if not isinstance(model_class, type) or not _generates(model_class):
        raise UsageError(
            f"{name} is not a decoder of transformers; pass the original as model",
            code="model-type",
        )
    facts = dict(meta["decoder"])
    config: Any = model_class
    facts["config"] = config.config_class.from_dict(json.loads(facts["config"]))
    text = facts["generation_config"]
    generation = transformers.GenerationConfig
    facts["generation_config"] = None if text is None else generation.from_dict(json.loads(text))
    return model_class, facts


class OpenVINODecoderModel(OpenVINOFacade, DecoderModel):
    """Decoder in OpenVINO that keeps its cache in state variables of the network."""

    @staticmethod
    def nano_network_of(step: Any, layers: int) -> CompiledNetwork:  # step: its model
        compiled = step.nano_network
        inputs, outputs = len(compiled.input_names), len(compiled.output_names)
        count = 2 * layers
        pairs = [(inputs - count + index, outputs - count + index) for index in range(count)]
        return _state_network(
            stateful(compiled.network, pairs),
            compiled.device,
            compiled.precision,
            compiled.thread_num,
            compiled.additional_config,
        )

    def nano_step(self, cache: Cache, inputs: list[np.ndarray]) -> np.ndarray:
        from bigdl.nano.pytorch.inference.decoder_cache import state_of

        state = state_of(cache, self.nano_network, self.nano_layers)
        return state.infer(inputs, inputs[0].shape[1])[0]

    def nano_arrays_of(self, call: object) -> list[np.ndarray]:
        raise UsageError(
            "A decoder has no list of arrays for a call: its cache is in the network",
            code="unsupported",
        )

    def async_predict(self, input_data: Iterable[Any], num_requests: int = 0) -> list:
        """Run the model on many inputs concurrently; see :class:`OpenVINOFacade`."""

        def run(call: object) -> object:
            batch = split_batch(self, call, self.nano_inputs)
            return self(*batch.args, **batch.kwargs)

        with ThreadPoolExecutor(num_requests or 1, thread_name_prefix="bigdl-openvino") as threads:
            return list(threads.map(run, input_data))

    def reshape(self, shapes: object) -> tuple[bool, str | None]:
        """Return False and an error message: the shapes of a decoder are always dynamic."""
        return False, "A decoder takes any number of rows and tokens; its shapes are not changed"

    def save_to(self, directory: Path, compression: str = "fp32") -> dict[str, Any]:
        _refuse_compression(compression)
        return {**super().save_to(directory), "shapes": None, "decoder": self.nano_facts()}

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        loaded = _loaded_facts(meta, options)
        if options.shapes is not None:
            raise UsageError(
                "shapes does not apply to a decoder, which takes any; leave it out",
                code="argument-conflict",
                argument="shapes",
            )
        config, threads = saved_properties(meta)
        if options.cache_dir is not None:
            config["CACHE_DIR"] = str(options.cache_dir)
        network = _state_network(
            directory / meta["xml_path"],
            options.device or meta["device"],
            meta["precision"],
            threads,
            config,
        )
        return cls.nano_loaded(network, *loaded, threads, meta, options)


def _state_network(
    network: CompiledNetwork,
    device: str,
    precision: str,
    threads: int | None,
    config: Mapping[str, Any],
) -> CompiledNetwork:
    # By default OpenVINO stores keys and values in 8 bits, which changes generated tokens.
    held = {} if precision == "bf16" or device != "CPU" else {"KV_CACHE_PRECISION": "f32"}
    return CompiledNetwork(
        network, device, precision=precision, thread_num=threads, config=held | dict(config)
    )


class ONNXRuntimeDecoderModel(OnnxRuntimeFacade, DecoderModel):
    """Decoder in ONNX Runtime that takes and returns the cache in each call."""

    @staticmethod
    def nano_network_of(step: Any, layers: int) -> OnnxNetwork:  # step: its model
        return step.nano_network

    def nano_step(self, cache: Cache, inputs: list[np.ndarray]) -> np.ndarray:
        from bigdl.nano.pytorch.inference.decoder_cache import fill, pairs_of

        pairs = pairs_of(cache)
        if pairs:
            past = [as_array(each) for pair in pairs for each in pair]
        else:
            heads, size = self.nano_cache_shape
            empty = np.zeros((len(inputs[0]), heads, 0, size), np.float32)
            past = [empty] * (2 * self.nano_layers)
        logits, *present = self.nano_network.infer([*inputs, *past])
        tensors = list(map(torch.from_numpy, present))
        fill(cache, zip(tensors[::2], tensors[1::2], strict=True))
        return logits

    def save_to(self, directory: Path, compression: str = "fp32") -> dict[str, Any]:
        _refuse_compression(compression)
        return {**super().save_to(directory), "decoder": self.nano_facts()}

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        loaded = _loaded_facts(meta, options)
        chosen = {name: getattr(options, name) for name in ("device", "cache_dir", "shapes")}
        network = cls.load_network(directory, meta, **chosen)
        return cls.nano_loaded(network, *loaded, network.thread_num, meta, options)


_MODELS: Mapping[str | None, type[DecoderModel]] = {
    "openvino": OpenVINODecoderModel,
    "onnxruntime": ONNXRuntimeDecoderModel,
}


@functools.cache
def _generator_class(model_class: type) -> type:
    """Return a subclass of the user's class without weights, with an accelerated forward."""

    @functools.wraps(model_class.forward)  # type: ignore[attr-defined]
    def forward(self: object, *args: object, **kwargs: object) -> object:
        return vars(self)["accelerated"](*args, **kwargs)

    members = {
        "forward": forward,
        "device": property(lambda self: vars(self)["accelerated"].device),
        "dtype": property(lambda self: vars(self)["accelerated"].dtype),
    }
    return type(model_class.__name__, (model_class,), members)


def _generator(model: DecoderModel) -> GenerationMixin:
    """Return an object of the user's class that generates tokens with an accelerated model."""
    generator_class: Any = _generator_class(model.nano_class)
    generator = generator_class.__new__(generator_class)
    torch.nn.Module.__init__(generator)
    generator.eval()
    # in the dict, so that it is not a submodule
    vars(generator).update(
        accelerated=model, config=model.config, generation_config=model.generation_config
    )
    return generator
