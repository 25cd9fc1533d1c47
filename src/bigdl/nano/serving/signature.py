"""Inputs and outputs of a served model: names, types and shapes of its tensors.

Types are NumPy dtypes; messages use the datatype names of the Open Inference Protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Signature", "TensorSpec"]

_DATATYPES = {
    "BOOL": np.dtype(bool),
    **{f"UINT{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "BYTES": np.dtype(object),
}
_NAMES = {dtype: name for name, dtype in _DATATYPES.items()}
# NumPy has no bfloat16: inputs are read as float32, which holds all values; outputs never use it.
_DATATYPES["BF16"] = np.dtype("f4")
_SPEC = re.compile(r"\s*([^:\s][^:]*?)\s*:\s*([A-Za-z0-9]+)\s*\[([-\d,\s?]*)\]\s*(?:;|$)")


def dtype_of(datatype: str) -> np.dtype:
    """Return the NumPy dtype for a datatype of the protocol.

    Raises
    ------
    UsageError
        If the datatype is unknown.
    """
    if datatype not in _DATATYPES:
        raise UsageError(
            f"There is no datatype {datatype!r}; use one of {', '.join(_DATATYPES)}",
            code="argument-value",
            allowed=list(_DATATYPES),
        )
    return _DATATYPES[datatype]


def datatype_of(dtype: np.dtype) -> str:
    """Return the protocol's datatype for a NumPy dtype; strings and objects are ``BYTES``.

    Raises
    ------
    UsageError
        If the protocol has no such type, e.g. complex numbers or dates.
    """
    if dtype.kind in "SU":
        return "BYTES"
    if dtype not in _NAMES:
        raise UsageError(
            f"Tensors of {dtype} cannot be sent; convert them to one of "
            f"{', '.join(_NAMES.values())}",
            code="data-dtype",
        )
    return _NAMES[dtype]


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and shape of one input or output of a model.

    Attributes
    ----------
    name : str
    dtype : numpy.dtype
        ``object`` for strings.
    shape : tuple of int
        -1 for a dynamic dimension; the first dimension is the batch.

    Examples
    --------
    >>> from bigdl.nano.serving import TensorSpec
    >>> spec = TensorSpec.parsed("image: FP32[-1, 3, 32, 32]")[0]
    >>> spec.name, spec.datatype, spec.shape
    ('image', 'FP32', (-1, 3, 32, 32))
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def datatype(self) -> str:
        """Datatype in the Open Inference Protocol."""
        return datatype_of(self.dtype)

    def __str__(self) -> str:
        return f"{self.name}: {self.datatype}{list(self.shape)}"

    @classmethod
    def parsed(cls, text: str) -> list[TensorSpec]:
        """Parse tensor specs from text such as ``"x: FP32[-1,4]; mask: BOOL[-1]"``.

        Raises
        ------
        UsageError
            If the text is not of this form.
        """
        specs, end = [], 0
        while end < len(text):
            match = _SPEC.match(text, end)
            if match is None:
                raise UsageError(
                    f"Tensors are described as 'x: FP32[-1,4]; mask: BOOL[-1]', not as {text!r}",
                    code="argument-value",
                    argument="inputs",
                )
            sizes = [size.strip() for size in match[3].split(",") if size.strip()]
            shape = tuple(-1 if size == "?" else int(size) for size in sizes)
            specs.append(cls(match[1], dtype_of(match[2].upper()), shape))
            end = match.end()
        return specs

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if arrays of this shape are allowed."""
        return len(shape) == len(self.shape) and all(
            expected in (-1, size) for expected, size in zip(self.shape, shape, strict=True)
        )

    def checked(self, value: ArrayLike) -> np.ndarray:
        """Convert a value to an array of this type and shape.

        Raises
        ------
        UsageError
            If it cannot be converted without loss, or has another shape.
        """
        array = np.asarray(value)
        if array.dtype != self.dtype:
            array = self._cast(array)
        self.check_shape(array.shape)
        return array

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise a UsageError if a shape is not allowed.

        Raises
        ------
        UsageError
        """
        if not self.fits(shape):
            raise UsageError(
                f"Input {self.name!r} has the shape {list(self.shape)}, where -1 is any size, but "
                f"{list(shape)} was given",
                code="model-input",
                argument=self.name,
            )

    def _cast(self, array: np.ndarray) -> np.ndarray:
        expected = self.dtype
        if expected.kind == "O" or np.can_cast(array.dtype, expected, "same_kind"):
            cast = array.astype(expected)
            if expected.kind not in "iu" or np.array_equal(cast, array):
                return cast
        raise UsageError(
            f"Input {self.name!r} is of type {self.datatype}, and {array.dtype} cannot be "
            "converted to it without loss",
            code="model-input",
            argument=self.name,
        )


def check_rows(rows: int, most_rows: int | None) -> None:
    """Raise a UsageError if there are no rows, or more than allowed.

    Raises
    ------
    UsageError
    """
    if not rows:
        raise UsageError("The inputs hold no row; give at least one", code="data-empty")
    if most_rows is not None and rows > most_rows:
        raise UsageError(
            f"The inputs hold {rows} rows, but a request may have {most_rows} at most",
            code="request-limit",
        )


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model, in the model's order.

    Attributes
    ----------
    inputs, outputs : tuple of TensorSpec

    Examples
    --------
    >>> from bigdl.nano.serving import Signature, TensorSpec
    >>> ids, score = TensorSpec.parsed("ids: INT64[-1]; score: FP32[-1]")
    >>> Signature((ids,), (score,)).arrays({"ids": [1, 2, 3]})
    [array([1, 2, 3])]
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def has_rows(self) -> bool:
        """True if the first dimension of every input and output is dynamic."""
        return bool(self.inputs) and all(
            spec.shape and spec.shape[0] == -1 for spec in (*self.inputs, *self.outputs)
        )

    def renamed(self, names: Iterable[str] | None) -> Signature:
        """Return a signature with the inputs renamed to `names`, in order.

        Raises
        ------
        UsageError
            If the number of names differs from that of the inputs, or a name occurs twice.
        """
        if names is None:
            return self
        names = list(names)
        if len(names) != len(self.inputs) or len(set(names)) < len(names):
            raise UsageError(
                f"The model has {len(self.inputs)} inputs and needs a different name for each, "
                f"but got {names}",
                code="argument-value",
            )
        pairs = zip(names, self.inputs, strict=True)
        inputs = tuple(TensorSpec(name, spec.dtype, spec.shape) for name, spec in pairs)
        return Signature(inputs, self.outputs)

    def arrays(
        self, inputs: Mapping[str, ArrayLike] | ArrayLike, most_rows: int | None = None
    ) -> list[np.ndarray]:
        """Return named inputs as checked arrays in the model's order.

        Parameters
        ----------
        inputs : mapping of str to array_like, or array_like
            Inputs by name, or an array if the model has one input.
        most_rows : int, optional
            Largest number of rows.

        Raises
        ------
        UsageError
            If an input is missing, unknown or of another type or shape, or if the numbers of rows
            differ.
        """
        if not isinstance(inputs, Mapping):
            inputs = {self.inputs[0].name: inputs} if len(self.inputs) == 1 else {}
        if len(inputs) != len(self.inputs) or any(s.name not in inputs for s in self.inputs):
            expected = ", ".join(spec.name for spec in self.inputs)
            listed = ", ".join(map(str, inputs)) or "none by name"
            raise UsageError(
                f"The model takes the inputs {expected}, but got {listed}", code="model-input"
            )
        arrays = [spec.checked(inputs[spec.name]) for spec in self.inputs]
        if self.has_rows:
            counts = {len(each) for each in arrays}
            if len(counts) > 1:
                listed = ", ".join(
                    f"{spec.name} {len(each)}"
                    for spec, each in zip(self.inputs, arrays, strict=True)
                )
                raise UsageError(
                    f"All inputs must have the same number of rows, but got {listed}",
                    code="data-shape",
                )
            check_rows(counts.pop(), most_rows)
        return arrays
