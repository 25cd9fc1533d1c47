"""Precisions of accelerated models, and options of weight-only quantization.

A :class:`Precision` equals its name, so functions accept either. :data:`PRECISIONS` maps names to
precisions. A new precision needs an entry in that table and methods that produce it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bigdl.common.checks import check_choice, check_integer, check_number


@dataclass(frozen=True, eq=False, repr=False)
class Precision(str):
    """Number format of a model, or of its weights in weight-only quantization.

    Attributes
    ----------
    name : str
        Name in the public interface.
    bits : int
        Bits per number.
    error_bound : float
        Largest difference of one tensor of an accelerated model's result from the original's, in
        the Euclidean norm: ``|actual - expected| / |expected|``. A result smaller than those of the
        other samples (logits near zero) is compared with their median size. For integers and
        booleans, the share of elements that differ.
    rounding : float
        Relative size of weight noise used to test a model's sensitivity to rounding.
    colour : str
        Colour in charts of search results.
    deviation_bound : float
        Largest rounding difference on the sample of a search, relative to the largest value.
        Infinite for integers, whose accuracy only a metric can judge.
    quantized : bool
        True for scaled integers; a metric may then exclude single layers.
    needs_calibration : bool
        True if the scales depend on calibration data.
    hints : mapping of str to str
        OpenVINO properties on a CPU. By default OpenVINO computes fp32 networks in bf16 if the
        processor has bf16 instructions, which is slower without AMX.

    Examples
    --------
    >>> from bigdl.nano.acceleration import PRECISIONS
    >>> int4 = PRECISIONS["int4"]
    >>> int4.bits, int4.needs_calibration, int4 == "int4"
    (4, False, True)
    """

    name: str
    bits: int
    error_bound: float
    rounding: float
    colour: str
    deviation_bound: float = math.inf
    quantized: bool = False
    needs_calibration: bool = False
    hints: Mapping[str, str] = field(
        default_factory=lambda: {"INFERENCE_PRECISION_HINT": "f32"}, kw_only=True
    )

    def __new__(cls, name: str, *_: object, **__: object) -> "Precision":
        return super().__new__(cls, name)


INT8 = Precision("int8", 8, 0.3, 2.0**-7, "#ff725c", quantized=True, needs_calibration=True)
BF16 = Precision(
    "bf16", 16, 5e-2, 2.0**-8, "#efb118", 0.25, hints={"INFERENCE_PRECISION_HINT": "bf16"}
)
FP16 = Precision("fp16", 16, 1e-2, 2.0**-11, "#6cc5b0", 0.25)
# Weight-only, in groups of 128: results of eleven networks (MLPs, encoders, BERT; 3 to 20 layers)
# differed from the original's by 0.01 to 0.15, and by 0.02 to 0.21 with this noise on weights. The
# largest difference over seven inputs of a small layer is below 0.33 for 99.9 % of random layers.
INT4 = Precision("int4", 4, 0.35, 2.0**-4, "#9c6b4e", quantized=True)
FP32 = Precision("fp32", 32, 1e-4, 2.0**-22, "#4269d0", 1e-2)

PRECISIONS: Mapping[str, Precision] = {each.name: each for each in (INT8, BF16, FP16, INT4, FP32)}
"""All precisions by name, in the order in which messages list them."""


@dataclass(frozen=True)
class WeightOptions:
    """Options of weight-only quantization; activations stay in floating point.

    Attributes
    ----------
    group_size : int or None
        Weights of a row that share one scale. If a row length is not divisible by it, its groups
        are smaller. Smaller groups are more accurate and take more memory: with 16-bit scales,
        groups of 128 take 4.1 bits per weight, groups of 32 take 4.5. None: one scale per row.
    symmetric : bool
        False to store a zero point with each scale, which is more accurate and slower.
    int8_ratio : float
        Share of weights stored in 8 bits; weights that lose most in 4 bits come first. Embeddings
        and the last layer are always in 8 bits.
    awq : bool
        Scale channels by the size of their activations before rounding (Lin et al., 2023).
    scale_estimation : bool
        Choose scales by the error of each layer's output. This and `awq` take longer and need
        calibration data.

    Raises
    ------
    UsageError
        If a value is out of range.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.acceleration import WeightOptions
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
    >>> options = WeightOptions(group_size=32)
    >>> small = InferenceOptimizer.quantize(
    ...     model, "int4", input_sample=torch.rand(8, 64), weight_options=options
    ... )
    >>> small.nano_network.precision
    'int4'
    """

    group_size: int | None = 128
    symmetric: bool = True
    int8_ratio: float = 0.0
    awq: bool = False
    scale_estimation: bool = False

    def __post_init__(self) -> None:
        if self.group_size is not None:
            check_integer("group_size", self.group_size, 1)
        check_number("int8_ratio", self.int8_ratio, 0.0, below=1.0)
        for name in ("symmetric", "awq", "scale_estimation"):
            check_choice(name, getattr(self, name), (True, False))

    @property
    def needs_calibration(self) -> bool:
        """True if calibration data are needed."""
        return self.awq or self.scale_estimation
