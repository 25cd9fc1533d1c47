"""BigDL 2.x's import path of the checks in :mod:`bigdl.common.checks`."""

from bigdl.common.checks import invalidInputError, invalidOperationError

__all__ = ["invalidInputError", "invalidOperationError"]
