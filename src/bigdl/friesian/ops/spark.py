"""Functions of Spark, imported when one is used: rows are served where there is no Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["F"]

if TYPE_CHECKING:
    from pyspark.sql import functions as F
else:

    class _Functions:
        def __getattr__(self, name: str) -> Any:
            from pyspark.sql import functions

            return getattr(functions, name)

    F = _Functions()
