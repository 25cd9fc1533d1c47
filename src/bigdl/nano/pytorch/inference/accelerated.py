"""Base classes of accelerated PyTorch models, and context managers for threads and precision.

Life cycle of an accelerated model: a method builds it and sets its ``nano_source`` to the user's
module. ``save`` calls its ``save_to``, which writes files and returns the content of
``nano_model_meta.yml``. ``load`` finds the class by its name in that file and calls
:meth:`AcceleratedModel.load_from`. A loaded model has no source unless the user passes one.
:class:`InferenceContext` applies the model's settings: threads and precision.
"""

from __future__ import annotations

import abc
import copy
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch

from bigdl.common.cpu import thread_scope
from bigdl.common.errors import UsageError, as_usage_error, first_line, user_stacklevel
from bigdl.nano.acceleration.method import BuildOptions, RuntimeNetwork
from bigdl.nano.acceleration.saved import SavedModel
from bigdl.nano.acceleration.structure import TENSOR, Structure, as_array, flatten
from bigdl.nano.pytorch.inference.source import ForwardInputs, TorchSource

_local = threading.local()


@dataclass(frozen=True)
class Settings:
    """Thread count and precision of one model.

    Attributes
    ----------
    threads : int or None
        Number of PyTorch threads; None does not change it.
    bf16 : bool
        True to run under autocast to bfloat16.
    """

    threads: int | None = None
    bf16: bool = False


class InferenceContext:
    """Context manager that disables gradients and sets a model's thread count and precision.

    Contexts can be nested and reused. On exit each restores the previous settings.

    Parameters
    ----------
    settings : Settings
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self._entered: list[ExitStack] = []

    @property
    def thread_num(self) -> int | None:
        """Number of threads inside the context; None if the number is not changed."""
        return self.settings.threads

    def __enter__(self) -> InferenceContext:
        with ExitStack() as stack:
            # a thread scope takes a millisecond, longer than a small model
            if self.settings.threads not in (None, torch.get_num_threads()):
                stack.enter_context(thread_scope(self.settings.threads))
            # not inference mode, whose results can neither be changed nor used in training
            stack.enter_context(torch.no_grad())
            if self.settings.bf16:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            # models called inside must not enter another context
            stack.callback(setattr, _local, "settings", active_settings())
            _local.settings = self.settings
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exception) -> None:
        self._entered.pop().close()


def active_settings() -> Settings | None:
    """Return the settings of this thread's innermost context, or None."""
    return getattr(_local, "settings", None)


# Settings of users' modules, on which no attribute is set.
_of_plain_modules: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def remember_settings(model: torch.nn.Module, settings: Settings) -> None:
    """Store the settings of a user's module for :func:`settings_of`."""
    _of_plain_modules[model] = settings


def settings_of(model: torch.nn.Module) -> Settings:
    """Return a model's settings, or the defaults if none were set."""
    return getattr(model, "inference_settings", None) or _of_plain_modules.get(model, Settings())


def context_of(model: torch.nn.Module, *models: torch.nn.Module) -> InferenceContext:
    """Return a context manager that disables gradients and sets the models' threads and precision.

    Parameters
    ----------
    model, *models : Module
        Modules, or lists or tuples of modules. The largest thread count applies to all, and bf16 if
        one of them uses it; if the models differ, a warning is given.

    Raises
    ------
    UsageError
        If there is no model, or an argument is not a module.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> model, x = torch.nn.Linear(4, 2), torch.rand(3, 4)
    >>> fast = InferenceOptimizer.quantize(model, precision="bf16", input_sample=x, thread_num=1)
    >>> with InferenceOptimizer.get_context(fast):
    ...     fast(x).requires_grad, torch.get_num_threads()
    (False, 1)
    """
    nested = (model, *models)
    flat = [m for each in nested for m in (each if isinstance(each, (list, tuple)) else [each])]
    for each in flat:
        if not isinstance(each, torch.nn.Module):
            raise UsageError(
                f"get_context takes models, but got a {type(each).__name__}", code="model-type"
            )
    if not flat:
        raise UsageError(
            "get_context takes at least one model, but got none", code="argument-missing"
        )
    settings = [settings_of(each) for each in flat]
    threads = {each.threads for each in settings}
    chosen = max((count for count in threads if count is not None), default=None)
    if len(threads) > 1:
        warnings.warn(
            f"The models have different numbers of threads "
            f"({', '.join(str(each.threads) for each in settings)}); {chosen} is used for all",
            stacklevel=user_stacklevel(),
        )
    bf16 = any(each.bf16 for each in settings)
    if bf16 and not all(each.bf16 for each in settings):
        warnings.warn(
            "Some of the models run in bf16 and some do not; all run in bf16 in this context",
            stacklevel=user_stacklevel(),
        )
    return InferenceContext(Settings(chosen, bf16))


def save_weights(module: torch.nn.Module, path: Path, compression: str = "fp32") -> None:
    """Save a module's state dict; ``compression="bf16"`` stores fp32 tensors as bfloat16."""
    state = module.state_dict()
    if compression == "bf16":
        state = {key: _to_bfloat16(value) for key, value in state.items()}
    torch.save(state, path)


def _to_bfloat16(value):
    fp32 = torch.is_tensor(value) and value.dtype is torch.float32
    return value.bfloat16() if fp32 else value


def load_weights(module: torch.nn.Module, path: Path) -> torch.nn.Module:
    """Load a state dict from a file into a module in place and return the module.

    Raises
    ------
    UsageError
        If the weights do not fit the module.
    """
    failure = f"{str(path)!r} holds no weights that torch can read without running code"
    with as_usage_error(failure, text=first_line, code="file-damaged", path=str(path)):
        state = torch.load(path, map_location="cpu", weights_only=True)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        # A LightningModule that wraps a plain module has the same weights one level deeper.
        inner = getattr(module, "model", None)
        if not isinstance(inner, torch.nn.Module):
            raise UsageError(
                f"The saved weights do not fit {type(module).__name__}: {error}",
                code="model-mismatch",
            ) from None
        load_weights(inner, path)
    return module


_OF_EVERY_MODULE = frozenset(dir(torch.nn.Module)) | frozenset(vars(torch.nn.Module()))


def is_generative(model: torch.nn.Module | None) -> bool:
    """Return True for a transformers model that generates tokens."""
    return any(cls.__name__ == "GenerationMixin" for cls in type(model).__mro__)


@dataclass(frozen=True)
class LoadOptions:
    """Arguments of ``InferenceOptimizer.load`` except the directory."""

    model: torch.nn.Module | None = None
    input_sample: Any = None
    inplace: bool = False
    device: str | None = None
    cache_dir: str | None = None
    shapes: str | None = None


def _in_float32(result: object) -> object:
    """Convert bfloat16 tensors in a nested result to float32, the original model's dtype."""
    leaves, structure = flatten(result)
    if not any(torch.is_tensor(x) and x.dtype is torch.bfloat16 for x in leaves):
        return result
    return structure.rebuild(
        x.float() if torch.is_tensor(x) and x.dtype is torch.bfloat16 else x for x in leaves
    )


class AcceleratedModel(SavedModel, torch.nn.Module, abc.ABC):
    """Base class of accelerated models: they stay in eval mode and have the original's attributes.

    Names of private attributes start with ``nano_``, so that they do not hide attributes of the
    user's module. Documented attributes have ordinary names.

    Attributes
    ----------
    nano_method : str or None
        Name of the method that built it.
    nano_source : Module or None
        The user's module. It is not a submodule, so its parameters are not this model's.
    nano_inputs : ForwardInputs or None
    nano_outputs : Structure or None
        Structure of the result, if the runtime uses flat lists.
    inference_settings : Settings
        Threads and precision that ``get_context`` applies.
    """

    def __init__(
        self,
        inputs: object = None,
        outputs: object = None,
        *,
        method: str | None = None,
        threads: int | None = None,
    ):
        super().__init__()
        self.nano_inputs = inputs
        self.nano_outputs = outputs
        self.nano_method = method
        self.thread_num = threads
        self.__dict__["nano_source"] = None
        self.training = False

    @property
    def inference_settings(self) -> Settings:
        return Settings(threads=self.thread_num)

    @property
    def nano_code(self) -> torch.nn.Module | None:
        """Module whose Python code the model runs; None if it runs a graph."""
        return None

    def nano_attach(self, source: torch.nn.Module | None) -> Self:
        """Set the original module, which provides unknown attributes; return this model."""
        self.__dict__["nano_source"] = source
        return self

    def forward(self, *args, **kwargs):
        """Run the model, with its settings unless a context of ``get_context`` is active."""
        if active_settings() is not None:
            return self.nano_run(args, kwargs)
        settings = self.inference_settings
        with InferenceContext(settings):
            result = self.nano_run(args, kwargs)
        return _in_float32(result) if settings.bf16 and not self.nano_is_bf16 else result

    @property
    def nano_is_bf16(self) -> bool:
        """True if the original model has bfloat16 parameters and therefore bfloat16 results."""
        source = self.__dict__.get("nano_source")
        return source is not None and any(
            each.dtype is torch.bfloat16 for each in source.parameters()
        )

    @abc.abstractmethod
    def nano_run(self, args: tuple, kwargs: dict) -> object:
        """Run the model once, after its thread count and precision have been set."""

    def train(self, mode: bool = True) -> AcceleratedModel:
        """Stay in evaluation mode, since folded or quantized weights cannot be trained."""
        return self

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            source = self.__dict__.get("nano_source")
            if source is not None and name not in _OF_EVERY_MODULE and hasattr(source, name):
                if name == "generate" and is_generative(source):
                    return partial(self.nano_generate, source)
                return getattr(source, name)
            raise AttributeError(
                f"{self._attribute_owner()!r} object has no attribute {name!r}"
            ) from None

    def nano_generate(self, source: torch.nn.Module, *args: object, **kwargs: object) -> object:
        """Generate tokens with the accelerated code of a transformers model.

        Raises
        ------
        UsageError
            If this model is a graph, which has no growing key-value cache.
        """
        code = self.nano_code
        if not is_generative(code):
            raise UsageError(
                f"generate of {type(source).__name__} needs a cache that grows with each token, "
                f"which a model of method {self.nano_method!r} does not have; call generate of the "
                "original, convert it for OpenVINO or ONNX Runtime without use_cache=False, or use "
                "quantize(precision='bf16'), which runs the original Python code",
                code="unsupported",
                method=self.nano_method,
            )
        with InferenceContext(self.inference_settings):
            return cast("Any", code).generate(*args, **kwargs)

    def _attribute_owner(self) -> str:
        return type(self).__name__

    @abc.abstractmethod
    def save_to(self, directory: Path, compression: str) -> dict:
        """Write this model's files and return its metadata.

        Parameters
        ----------
        directory : Path
            Empty directory for the files.
        compression : str
            Storage format of weights: ``"fp32"`` or ``"bf16"``.

        Returns
        -------
        dict
            Metadata for :meth:`load_from`, with JSON types only.
        """

    @classmethod
    @abc.abstractmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        """Load a model that :meth:`save_to` wrote.

        Parameters
        ----------
        directory : Path
        meta : mapping
            Metadata from ``save_to``.
        options : LoadOptions
        """


def module_with_weights(file: Path, options: LoadOptions) -> torch.nn.Module:
    """Load weights from a file into the original module or a copy of it.

    Raises
    ------
    UsageError
        If the original or the file is missing, or the weights do not fit the original.
    """
    if options.model is None:
        raise UsageError(
            "You must pass model when loading this model: its directory holds weights only",
            code="argument-missing",
            argument="model",
        )
    if not file.exists():
        raise UsageError(
            f"File {file.name} is required to load model.", code="path-missing", path=str(file)
        )
    return load_weights(options.model if options.inplace else copy.deepcopy(options.model), file)


class NetworkModel(AcceleratedModel):
    """Thread-safe accelerated model that runs a network in another runtime.

    Parameters
    ----------
    network
        Its ``infer`` takes and returns lists of ndarrays. The caller owns the results: the next
        call must not change them.
    inputs : ForwardInputs
    outputs : Structure
    output_tensors : bool
        True to return tensors, False for ndarrays.
    **keywords
        Keywords of :class:`AcceleratedModel`.
    """

    def __init__(
        self,
        network: RuntimeNetwork,
        inputs: ForwardInputs,
        outputs: Structure,
        *,
        output_tensors: bool = True,
        **keywords: Any,
    ):
        super().__init__(inputs, outputs, **keywords)
        self.nano_network: Any = network  # the runtime's facade declares its class
        self.output_tensors = output_tensors

    @classmethod
    def of(
        cls, source: TorchSource, network: RuntimeNetwork, method: str, options: BuildOptions
    ) -> Self:
        """Build the accelerated model of a model source from its converted network."""
        model = cls(
            network,
            source.inputs,
            source.outputs,
            output_tensors=options.output_tensors,
            method=method,
            threads=network.thread_num,
        )
        original = source.model
        return model.nano_attach(
            original.nano_source if isinstance(original, AcceleratedModel) else original
        )

    def forward(self, *args, **kwargs):
        """Run the network; its runtime applies thread count and precision."""
        return self.nano_run(args, kwargs)

    def nano_run(self, args: tuple, kwargs: dict) -> object:
        return self.nano_result_of(self.nano_network.infer(self.nano_to_arrays(args, kwargs)))

    def nano_to_arrays(self, args: tuple, kwargs: dict) -> list[np.ndarray]:
        """Convert the arguments of a call to a flat list of arrays."""
        return list(map(as_array, self.nano_inputs.flatten(args, kwargs)))

    def nano_result_of(self, results: list) -> object:
        """Convert the network's flat outputs to a result nested like the original model's."""
        if self.output_tensors:
            results = [torch.from_numpy(np.asarray(each, order="C")) for each in results]
        return self.nano_outputs.rebuild(results)

    def nano_describe(self) -> dict[str, Any]:
        return {**super().nano_describe(), "output_tensors": self.output_tensors}

    load_network: ClassVar[Callable[..., Any]]
    """Loads the network of a saved directory."""

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        """Load a saved model; for a model of BigDL 2, read the signature from the network."""
        chosen = {name: getattr(options, name) for name in ("device", "cache_dir", "shapes")}
        network = cls.load_network(directory, meta, **chosen)
        outputs = len(network.output_names)
        if "inputs" in meta:
            inputs = ForwardInputs.from_json(meta["inputs"])
            structure = Structure.from_json(meta["outputs"])
        else:
            names = tuple(network.input_names)
            inputs = ForwardInputs(names, dict.fromkeys(names, TENSOR))
            structure = TENSOR if outputs == 1 else Structure("tuple", (TENSOR,) * outputs)
            if outputs > 1:
                warnings.warn(
                    "The directory was written by BigDL 2, whose description of nested results is "
                    "a pickle and is not read: the model returns a tuple; save it again from the "
                    "original model",
                    stacklevel=user_stacklevel(),
                )
        return cls(
            network,
            inputs,
            structure,
            output_tensors=meta.get("output_tensors", True),
            method=meta.get("method"),
            threads=network.thread_num,
        ).nano_attach(options.model)


def require_original(options: LoadOptions) -> tuple[torch.nn.Module, Any]:
    """Return the original model and its sample, which are required to load a compressed model.

    Raises
    ------
    UsageError
        If one of them is missing.
    """
    for name in ("model", "input_sample"):
        if getattr(options, name) is None:
            raise UsageError(
                f"You must pass {name} when loading this model which was saved with compression "
                "precision.",
                code="argument-missing",
                argument=name,
            )
    return cast("torch.nn.Module", options.model), options.input_sample
