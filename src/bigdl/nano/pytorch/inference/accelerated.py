"""Models that run in another way or in another runtime and still look like the user's.

The life of an accelerated model: a method builds it and sets its ``nano_source`` to the user's
module. ``save`` asks it for its files and for the facts that go into the directory's
``nano_model_meta.yml``; ``load`` finds the class by its name in that file and calls
:meth:`AcceleratedModel.load_from`. A loaded model has no source unless the user gives one.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.context import InferenceContext, Settings, active_settings
from bigdl.nano.pytorch.inference.inputs import ForwardInputs
from bigdl.nano.pytorch.inference.structure import TENSOR, Structure

__all__ = ["AcceleratedModel", "NetworkModel", "ask_for_original"]

_OF_EVERY_MODULE = frozenset(dir(torch.nn.Module)) | frozenset(vars(torch.nn.Module()))


class AcceleratedModel(torch.nn.Module, abc.ABC):
    """A model that is always in evaluation mode and passes unknown attributes on to the original.

    Its own attributes begin with ``nano_``, but for those that users know by name, so that they do
    not hide attributes of the user's module.

    Attributes
    ----------
    nano_method : str or None
        Name of the method that built it.
    nano_source : Module or None
        The user's module, which is not a submodule: its parameters are not this model's.
    inference_settings : Settings
        What it needs around it: ``get_context`` reads this.
    """

    nano_classes: ClassVar[dict[str, type[AcceleratedModel]]] = {}
    """Every class by its name, which stands in saved directories as ``ModelType``."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        AcceleratedModel.nano_classes[cls.__name__] = cls

    def __init__(self, *, method: str | None = None, threads: int | None = None):
        super().__init__()
        self.nano_method = method
        self.thread_num = threads
        self.__dict__["nano_source"] = None
        self.training = False

    @property
    def inference_settings(self) -> Settings:
        return Settings(threads=self.thread_num)

    def nano_attach(self, source: torch.nn.Module | None) -> AcceleratedModel:
        """Set the module to which unknown attributes are passed on; returns itself."""
        self.__dict__["nano_source"] = source
        return self

    def forward(self, *args, **kwargs):
        """As the user's model; outside of ``get_context`` it applies its own settings."""
        if active_settings() is not None:
            return self.nano_run(args, kwargs)
        with InferenceContext(self.inference_settings):
            return self.nano_run(args, kwargs)

    @abc.abstractmethod
    def nano_run(self, args: tuple, kwargs: dict) -> Any:
        """One call of the model within its settings."""

    def train(self, mode: bool = True) -> AcceleratedModel:
        """Stays in evaluation mode: what was folded or quantized cannot be trained."""
        return self

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            source = self.__dict__.get("nano_source")
            if source is not None and name not in _OF_EVERY_MODULE:
                try:
                    return getattr(source, name)
                except AttributeError:
                    pass
            raise AttributeError(
                f"{self._attribute_owner()!r} object has no attribute {name!r}"
            ) from None

    def _attribute_owner(self) -> str:
        return type(self).__name__

    @abc.abstractmethod
    def save_to(self, directory: Path, compression: str) -> dict:
        """Write this model's files.

        Parameters
        ----------
        directory : Path
            An empty directory.
        compression : str
            ``"fp32"`` or ``"bf16"``: how weights are stored.

        Returns
        -------
        dict
            What :meth:`load_from` needs to know, of JSON's types only.
        """

    @classmethod
    @abc.abstractmethod
    def load_from(cls, directory: Path, meta: Mapping, **options) -> AcceleratedModel:
        """Read what :meth:`save_to` wrote.

        Parameters
        ----------
        directory : Path
        meta : mapping
            What ``save_to`` returned.
        **options
            ``model``, ``input_sample``, ``inplace``, ``device``, ``cache_dir`` and ``shapes`` of
            ``InferenceOptimizer.load``.
        """


class NetworkModel(AcceleratedModel):
    """A model whose network takes and gives flat lists of arrays, in a runtime of its own.

    Parameters
    ----------
    inputs : ForwardInputs
    outputs : Structure
    output_tensors : bool
        Tensors, or ndarrays.
    method, threads
        As of :class:`AcceleratedModel`.
    """

    def __init__(
        self,
        inputs: ForwardInputs,
        outputs: Structure,
        *,
        output_tensors: bool = True,
        method: str | None = None,
        threads: int | None = None,
    ):
        super().__init__(method=method, threads=threads)
        self.nano_inputs = inputs
        self.nano_outputs = outputs
        self.output_tensors = output_tensors

    @property
    def forward_args(self) -> list[str]:
        """Names of the network's inputs."""
        return list(self.nano_inputs.names)

    def forward(self, *args, **kwargs):
        """As the user's model; its threads and its precision are those of its own runtime."""
        return self.nano_run(args, kwargs)

    def nano_run(self, args: tuple, kwargs: dict) -> Any:
        return self.nano_from_arrays(self.nano_infer(self.nano_to_arrays(args, kwargs)))

    def nano_to_arrays(self, args: tuple, kwargs: dict) -> list[np.ndarray]:
        """The flat list of arrays of a call."""
        return [_as_array(leaf) for leaf in self.nano_inputs.flatten(args, kwargs)]

    def nano_from_arrays(self, results: list) -> Any:
        """What the user's model would return, from the flat list of the network's results."""
        if self.output_tensors:
            results = [torch.from_numpy(np.asarray(each, order="C")) for each in results]
        if self.nano_outputs.kind == "tensor":
            return results[0]
        return self.nano_outputs.rebuild(results)

    @abc.abstractmethod
    def nano_infer(self, arrays: list) -> list:
        """Run the network: a flat list of ndarrays in, a flat list of ndarrays out.

        The results are the caller's: the next call must not change them.
        """

    def nano_describe(self) -> dict:
        """Facts of the wrapper for the saved directory."""
        return {
            "inputs": self.nano_inputs.to_json(),
            "outputs": self.nano_outputs.to_json(),
            "output_tensors": self.output_tensors,
            "method": self.nano_method,
            "thread_num": self.thread_num,
        }

    @staticmethod
    def nano_facts_of(meta: Mapping, names: Sequence[str], outputs: int, directory: Path) -> dict:
        """Keywords of the constructor from what :meth:`nano_describe` returned.

        A directory of BigDL 2 says nothing of inputs and outputs: they are those of the network.

        Parameters
        ----------
        meta : mapping
        names : sequence of str
            The network's inputs.
        outputs : int
            Number of its outputs.
        directory : Path
            Where `meta` is from.
        """
        facts = {
            "output_tensors": meta.get("output_tensors", True),
            "method": meta.get("method"),
            "threads": meta.get("thread_num"),
        }
        if "inputs" in meta:
            return {
                "inputs": ForwardInputs.from_json(meta["inputs"]),
                "outputs": Structure.from_json(meta["outputs"]),
                **facts,
            }
        if outputs > 1:
            warnings.warn(
                f"{directory} was written by BigDL 2, whose description of nested results is a "
                "pickle and is not read: the model returns a tuple; save it again from the "
                "original model",
                stacklevel=2,
            )
        return {
            "inputs": ForwardInputs(tuple(names), dict.fromkeys(names, TENSOR)),
            "outputs": TENSOR if outputs == 1 else Structure("tuple", (TENSOR,) * outputs),
            **facts,
        }


def ask_for_original(model: Any, input_sample: Any) -> None:
    """Refuse to load a compressed model without what it was made from.

    Raises
    ------
    UsageError
    """
    for name, value in (("model", model), ("input_sample", input_sample)):
        if value is None:
            raise UsageError(
                f"You must pass {name} when loading this model which was saved with compression "
                "precision."
            )


def _as_array(leaf) -> np.ndarray:
    """The memory of a tensor as an ndarray, without a copy where that is possible."""
    if isinstance(leaf, np.ndarray):
        return leaf
    leaf = leaf.detach()
    if leaf.dtype is torch.bfloat16:
        leaf = leaf.float()
    return leaf.cpu().numpy()
