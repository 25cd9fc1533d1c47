"""Methods that run a model in ONNX Runtime.

They know no framework: a source writes its model as an ONNX file and makes an accelerated model of
the network that it became.
"""

from __future__ import annotations

import abc
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.common.environment import scratch_home
from bigdl.common.errors import UsageError, one_line
from bigdl.nano.acceleration.accuracy import keep_accuracy
from bigdl.nano.acceleration.method import Method, Source
from bigdl.nano.acceleration.onnx_network import OnnxFile, OnnxNetwork, runtime_error
from bigdl.nano.acceleration.options import BuildOptions

__all__ = ["ONNXRUNTIME", "OnnxRuntimeMethod"]


@dataclass(frozen=True)
class OnnxRuntimeMethod(Method):
    """ONNX Runtime in the precision of the model's operators."""

    accelerator: str | None = "onnxruntime"
    packages: tuple[str, ...] = ("onnx", "onnxruntime", "onnxscript")

    def build(self, source: Source, options: BuildOptions) -> Any:
        return self.model_of(exported(source, options), source, options)

    def model_of(self, file: OnnxFile, source: Source, options: BuildOptions) -> Any:
        """The accelerated model of an ONNX file: in a session, and handed to the framework."""
        network = OnnxNetwork(
            file,
            source.onnx_names(),
            threads=options.threads,
            session_options=options.onnx.session_options,
        )
        return source.from_onnx(network, self.name, options)


def exported(source: Source, options: BuildOptions) -> OnnxFile:
    """A source's model as an ONNX file."""
    file = OnnxFile()
    source.to_onnx(str(file.path), options)
    return file


@dataclass(frozen=True)
class QuantizedMethod(OnnxRuntimeMethod, abc.ABC):
    """ONNX Runtime with 8-bit integers.

    With an accuracy goal, nodes are left in floating point, those first whose quantization brings
    the largest error into the network.
    """

    precision: str = "int8"

    def build(self, source: Source, options: BuildOptions) -> Any:
        self.check(options)
        original = OnnxNetwork(exported(source, options), source.onnx_names(), threads=None)
        with _Workplace(original, self.feeds(source, original, options)) as work:

            def build(excluded: tuple[str, ...] = ()):
                return self.model_of(self.quantized(work, excluded, options), source, options)

            goal = options.calibration.goal
            if goal is None:
                return build()
            sample = original.feed(source.sample_arrays())
            return keep_accuracy(build, lambda: work.rank(sample), goal, source.model)

    def check(self, options: BuildOptions) -> None:
        """Refuse what this way of quantization does not have."""
        if options.calibration.smooth:
            raise UsageError(
                f"Method {self.name!r} has no smooth quantization; use accelerator='onnxruntime' "
                "with method='nncf', or leave smooth out"
            )

    def feeds(self, source: Source, network: OnnxNetwork, options: BuildOptions) -> list[dict]:
        """Calibration batches by the names of the network's inputs."""
        return [network.feed(arrays) for arrays in source.calibration_arrays(options)]

    def quantized(
        self, work: _Workplace, excluded: tuple[str, ...], options: BuildOptions
    ) -> OnnxFile:
        """The model in int8 but for some nodes."""
        work.quantized = file = OnnxFile()
        try:
            self.quantize(work, file.path, excluded, options)
        except Exception as error:
            said = runtime_error(error)
            if said is error:
                said = UsageError(
                    f"The network cannot be quantized by method {self.name!r}: {one_line(error)}"
                )
            raise said from error
        return file

    @abc.abstractmethod
    def quantize(
        self, work: _Workplace, target: Path, excluded: Collection[str], options: BuildOptions
    ) -> None:
        """Write the quantized graph."""


@dataclass(frozen=True)
class StaticMethod(QuantizedMethod):
    """Weights and activations, by ONNX Runtime's own quantizer."""

    def quantize(self, work, target, excluded, options):
        from bigdl.nano.acceleration.onnx_quantization import quantize_statically

        quantize_statically(
            work.source, target, work.feeds, excluded, ranges=work.ranges, external=work.external
        )


@dataclass(frozen=True)
class DynamicMethod(QuantizedMethod):
    """Weights, and activations at each call; it needs no calibration data."""

    def feeds(self, source, network, options):
        return []

    def quantize(self, work, target, excluded, options):
        from bigdl.nano.acceleration.onnx_quantization import quantize_dynamically

        quantize_dynamically(work.source, target, excluded, external=work.external)


@dataclass(frozen=True)
class NNCFMethod(QuantizedMethod):
    """Weights and activations, by NNCF, with corrected biases and smoothed outliers."""

    packages: tuple[str, ...] = ("onnx", "onnxruntime", "onnxscript", "nncf")

    def check(self, options: BuildOptions) -> None:
        """Takes everything."""

    def quantize(self, work, target, excluded, options):
        from bigdl.nano.acceleration.onnx_quantization import quantize_with_nncf

        quantize_with_nncf(
            work.source, target, work.feeds, excluded, smooth=options.calibration.smooth
        )


class _Workplace:
    """Files that are made on the way to a quantized model, while the context lasts.

    Attributes
    ----------
    source : Path
        The graph in floating point, ready for quantizers.
    feeds : list of dict of str to ndarray
        Calibration batches.
    ranges : Path
        Where the ranges of activations are kept from one trial to the next.
    quantized : OnnxFile or None
        The latest result.
    """

    def __init__(self, original: OnnxNetwork, feeds: Sequence[dict[str, np.ndarray]]):
        self.feeds = feeds
        self.external = original.file.external
        self.quantized: OnnxFile | None = None
        self._original = original
        self._folder = tempfile.TemporaryDirectory(prefix="bigdl-int8-", dir=scratch_home())
        self.ranges = Path(self._folder.name, "ranges.json")

    def __enter__(self) -> _Workplace:
        return self

    def __exit__(self, *exception) -> None:
        self._folder.cleanup()

    @cached_property
    def source(self) -> Path:
        from bigdl.nano.acceleration.onnx_graph import prepare_for_quantization

        path = Path(self._folder.name, "source.onnx")
        prepare_for_quantization(self._original.file.path, path)
        return path

    def rank(self, sample: dict[str, np.ndarray]) -> list[str]:
        """Quantized nodes, the most harmful one first."""
        from bigdl.nano.acceleration.onnx_quantization import rank_nodes

        feed = self.feeds[0] if self.feeds else sample
        return rank_nodes(self.source, self.quantized.path, feed)


ONNXRUNTIME = [
    OnnxRuntimeMethod("onnxruntime_fp32", option="onnxruntime", default=True),
    StaticMethod("onnxruntime_int8_qlinear", option="inc + onnxruntime + qlinear", default=True),
    DynamicMethod("onnxruntime_int8_integer", option="inc + onnxruntime + integer"),
    NNCFMethod("onnxruntime_int8_nncf", option="onnxruntime + int8 + nncf"),
]
