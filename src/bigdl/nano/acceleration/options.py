"""Options of methods, one typed object for each subject.

``trace`` and ``quantize`` have dozens of keywords, most of which belong to one runtime.
:mod:`~bigdl.nano.acceleration.keywords` sorts them into these objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigdl.common.errors import UsageError

__all__ = [
    "AccuracyGoal",
    "BuildOptions",
    "Calibration",
    "JitOptions",
    "OnnxOptions",
    "OpenVINOOptions",
]


@dataclass(frozen=True)
class OnnxOptions:
    """Options of ONNX Runtime and of the export to ONNX.

    Attributes
    ----------
    session_options : onnxruntime.SessionOptions, optional
        Taken as they are, but for the thread counts where ``threads`` is given.
    simplify : bool
        True to simplify the exported graph.
    export : mapping
        Further keywords of ``torch.onnx.export``.
    """

    session_options: Any = None
    simplify: bool = True
    export: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenVINOOptions:
    """Options of OpenVINO.

    Attributes
    ----------
    device : str
        ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"``.
    config : mapping
        Properties for ``compile_model``; they win over the method's own.
    convert : mapping
        Keywords of the conversion: ``mean_value``, ``scale_values``, ``layout``, ``input``,
        ``input_shape``, ``data_type``.
    """

    device: str = "CPU"
    config: Mapping[str, Any] = field(default_factory=dict)
    convert: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JitOptions:
    """Options of TorchScript.

    Attributes
    ----------
    method : str or None
        ``"trace"``, ``"script"``, or None for the first that works.
    strict : bool
        Passed to ``torch.jit.trace``.
    """

    method: str | None = None
    strict: bool = True


@dataclass(frozen=True)
class AccuracyGoal:
    """The accuracy that a quantized model has to keep.

    Attributes
    ----------
    score : callable
        Called with a model, returns its accuracy as a float.
    higher_is_better : bool
    relative : float or None
        Largest drop as a fraction of the original's score, e.g. 0.01.
    absolute : float or None
        Largest drop in units of the score.
    max_trials : int or None
        How many quantized models are built and scored at most.
    timeout : float or None
        Seconds after which no further one is tried; 0 and None set no limit.
    """

    score: Callable[[Any], float]
    higher_is_better: bool = True
    relative: float | None = 0.01
    absolute: float | None = None
    max_trials: int | None = None
    timeout: float | None = None

    @classmethod
    def of(
        cls,
        score: Callable[[Any], float] | None,
        criterion: Mapping | None,
        max_trials: int | None = None,
        timeout: float | None = None,
    ) -> AccuracyGoal | None:
        """Return the goal that a user asks for; None if there is nothing to score with.

        Parameters
        ----------
        score : callable or None
            What `metric` or `eval_func` mean.
        criterion : mapping or None
            ``{"relative": 0.01}`` by default.
        max_trials, timeout
            As of the attributes.

        Raises
        ------
        UsageError
            If the criterion is not of a known form, or stands alone.
        """
        if score is None:
            if criterion is not None:
                raise UsageError(
                    "accuracy_criterion needs a metric or an eval_func to measure the accuracy with"
                )
            return None
        criterion = dict(criterion or {"relative": 0.01})
        higher = criterion.pop("higher_is_better", True)
        if set(criterion) not in ({"relative"}, {"absolute"}):
            raise UsageError(
                "accuracy_criterion must be {'relative': 0.01} or {'absolute': 0.5}, with "
                f"'higher_is_better' if you like, not {criterion}"
            )
        relative, absolute = criterion.get("relative"), criterion.get("absolute")
        return cls(score, bool(higher), relative, absolute, max_trials, timeout or None)

    def drop(self, original: float, score: float) -> float:
        """Return by how much a score is worse than the original's; negative if it is better."""
        return original - score if self.higher_is_better else score - original

    def allowed(self, original: float) -> float:
        """Return the largest drop that is accepted, in units of the score."""
        if self.absolute is not None:
            return self.absolute
        return abs(original) * (0.01 if self.relative is None else self.relative)

    def met(self, original: float, score: float) -> bool:
        """Return True if a score is good enough."""
        return self.drop(original, score) <= self.allowed(original)


@dataclass(frozen=True)
class Calibration:
    """Data and settings of a quantization to int8.

    Attributes
    ----------
    data
        DataLoader, tensor, tuple or dict; what the framework's Source takes.
    sample_size : int
        Number of samples (rows, not batches) that are used at most.
    approach : str
        ``"static"`` or ``"dynamic"``.
    smooth : bool or None
        Smooth quantization (Xiao et al., 2022), which moves the outliers of activations of
        transformers into the weights; None where the model has attention.
    goal : AccuracyGoal or None
        With a goal, layers that cost too much accuracy are left unquantized.
    """

    data: Any = None
    sample_size: int = 100
    approach: str = "static"
    smooth: bool | None = None
    goal: AccuracyGoal | None = None


@dataclass(frozen=True)
class BuildOptions:
    """All options of a method.

    Attributes
    ----------
    threads : int or None
        Number of threads of the runtime; None leaves it to the runtime.
    streams : int or None
        Number of requests that OpenVINO runs at a time.
    dynamic_axes : bool or dict
        True: the first dimension of every input may change. A dict names other ones.
    output_tensors : bool
        Tensors of the framework, or ndarrays.
    inplace : bool
        True to convert the user's module itself instead of a copy.
    """

    threads: int | None = None
    streams: int | None = None
    dynamic_axes: bool | Mapping[str, Any] = True
    output_tensors: bool = True
    inplace: bool = False
    onnx: OnnxOptions = OnnxOptions()
    openvino: OpenVINOOptions = OpenVINOOptions()
    jit: JitOptions = JitOptions()
    calibration: Calibration = Calibration()
