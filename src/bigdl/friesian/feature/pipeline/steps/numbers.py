"""NumPy on arrays of Arrow whose nulls stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["by_numpy", "doubles"]


def by_numpy(
    values: pa.Array, function: Callable[[np.ndarray], np.ndarray], kind: pa.DataType
) -> pa.Array:
    """`function` of the numbers in an array, null where a number is null.

    The function sees 0 in the place of nulls; a result may be infinite or NaN.
    """
    import numpy as np
    import pyarrow as pa

    if not values.null_count:
        with np.errstate(all="ignore"):
            return pa.array(function(values.to_numpy(zero_copy_only=False)), kind)
    mask = values.is_null().to_numpy(zero_copy_only=False)
    filled = values.fill_null(pa.scalar(0, values.type)).to_numpy(zero_copy_only=False)
    with np.errstate(all="ignore"):
        return pa.array(function(filled), kind, mask=mask)


def doubles(values: pa.Array) -> pa.Array:
    """Numbers as double, whole ones that are too long rounded."""
    import pyarrow as pa

    return values.cast(pa.float64(), safe=False)
