"""The checks of :mod:`bigdl.common.checks`, under the import path of BigDL 2.x."""

from bigdl.common.checks import invalidInputError, invalidOperationError

__all__ = ["invalidInputError", "invalidOperationError"]
