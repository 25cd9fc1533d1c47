"""Base classes to write and register custom operators.

:meth:`FeatureTable.with_operator` runs an operator and :meth:`FeaturePipeline.with_operator`
records it. :class:`bigdl.testing.operators.OperatorContract` has the tests that it must pass.
"""

from bigdl.friesian.ops.column_types import Field
from bigdl.friesian.ops.operator import (
    Function,
    NumberFunction,
    Operator,
    OutputColumn,
    register_operator,
)

__all__ = [
    "Field",
    "Function",
    "NumberFunction",
    "Operator",
    "OutputColumn",
    "register_operator",
]
