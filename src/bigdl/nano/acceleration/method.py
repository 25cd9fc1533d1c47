"""A Method: one way to make a model faster.

The life of a method: it is created once, when its framework's methods are first asked for.
:meth:`Method.missing` is called before every use and says in one sentence why the method is not
possible on this machine. :meth:`Method.build` is called with a :class:`Source`, the user's model
together with a sample of its input, and returns a new model that is called as the user's is.
Neither changes the user's model.
"""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from bigdl.common.cpu import isa_flags
from bigdl.common.errors import UsageError, first_line
from bigdl.nano.acceleration.options import BuildOptions

__all__ = ["Method", "Source"]


class Source(Protocol):
    """A user's model and a sample of its input, as a method sees them.

    A framework has one class of this kind. A network of another runtime takes and gives flat lists
    of arrays; how the user's nested arguments and results map to these is the source's knowledge.

    Attributes
    ----------
    model
        The user's model. It is not to be changed.
    """

    model: Any

    def to_openvino(self, options: BuildOptions) -> Any:
        """The model as an ``openvino.Model`` whose inputs and outputs are the flat lists."""

    def from_openvino(self, network: Any, method: str, options: BuildOptions) -> Any:
        """The accelerated model of a ``CompiledNetwork`` of this model's inputs and outputs."""

    def to_onnx(self, path: str, options: BuildOptions) -> None:
        """Write the model as an ONNX file whose inputs and outputs are the flat lists."""

    def onnx_names(self) -> list[str]:
        """Names of the inputs in the ONNX file; it may lack ones that it does not use."""

    def from_onnx(self, network: Any, method: str, options: BuildOptions) -> Any:
        """The accelerated model of an ``OnnxNetwork`` of this model's inputs and outputs."""

    def calibration_arrays(self, options: BuildOptions) -> Iterator[list]:
        """Flat lists of ndarrays, one for each batch of the calibration data."""

    def sample_arrays(self) -> list:
        """The sample as a flat list of ndarrays."""


@dataclass(frozen=True)
class Method(abc.ABC):
    """One acceleration method.

    Attributes
    ----------
    name : str
        Its public name, e.g. ``"openvino_int8"``.
    precision : str
        ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"int8"``.
    accelerator : str or None
        The runtime as ``trace`` and ``quantize`` name it: ``"openvino"``, ``"onnxruntime"``,
        ``"jit"``, or None for the framework itself.
    option : str
        What ``get_best_model`` says of it, e.g. ``"openvino + int8"``.
    default : bool
        Whether ``optimize`` tries it unasked.
    channels_last : bool
        Whether images are laid out with their channels last.
    ipex : bool
        Whether the method stands for one that used Intel's extension of PyTorch.
    """

    name: str
    precision: str = "fp32"
    accelerator: str | None = None
    option: str = ""
    default: bool = False
    channels_last: bool = False
    ipex: bool = False

    packages: tuple[str, ...] = ()
    """Modules that have to be importable."""
    extra: str = "nano"
    """The extra of the distribution that brings them."""
    isa: tuple[str, ...] = ()
    """Instruction sets of which the processor has to have one; none are needed if it is empty."""
    arguments: tuple[str, ...] = ()
    """Keywords of ``quantize`` that apply to it beyond those of its accelerator and precision."""

    @property
    def exact(self) -> bool:
        """Whether results differ from the original's by rounding of fp32 only."""
        return self.precision == "fp32"

    def get_precision(self) -> str:
        """The precision."""
        return self.precision

    def get_accelerator(self) -> str | None:
        """The runtime."""
        return self.accelerator

    def missing(self) -> str | None:
        """Why this method is not possible on this machine.

        Returns
        -------
        str or None
            One sentence; None if it is possible.
        """
        for package in self.packages:
            if not _is_installed(package):
                return f"{package} is not installed; run: pip install 'bigdl[{self.extra}]'"
        if self.isa and not isa_flags().intersection(self.isa):
            return f"the processor has none of {', '.join(self.isa)}, which {self.name} needs"
        return None

    def require(self) -> None:
        """Refuse to go on where the method is not possible.

        Raises
        ------
        UsageError
            With the sentence of :meth:`missing`.
        """
        reason = self.missing()
        if reason:
            raise UsageError(f"Method {self.name!r} cannot be used: {reason}")

    @abc.abstractmethod
    def build(self, source: Source, options: BuildOptions) -> Any:
        """Make the accelerated model.

        Parameters
        ----------
        source : Source
            The user's model and a sample of its input.
        options : BuildOptions
            What the user asked for.

        Returns
        -------
        An accelerated model of the source's framework.

        Raises
        ------
        UsageError
            If the model, an option or the data does not fit the method.
        """

    def try_out(self, call: Callable[[], Any]) -> None:
        """Call a model that was just built.

        Parameters
        ----------
        call : callable
            Calls it on the sample.

        Raises
        ------
        UsageError
            If it does not run.
        """
        try:
            call()
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"The model was converted by method {self.name!r} but does not run on the sample: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (
        ModuleNotFoundError,
        ValueError,
    ):  # a parent package is missing, or a stub in sys.modules
        return False
