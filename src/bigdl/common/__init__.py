"""Helpers of all rooms: errors, checks, cores and threads, memory, storage.

``bigdl`` itself is a namespace, which other distributions may share, so it has no file to hold its
version; the first room that is imported gives it one.
"""

import sys
from typing import Any

from bigdl.common.dropped import explain_imports


def _of_namespace(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("bigdl")
    raise AttributeError(f"module 'bigdl' has no attribute {name!r}")


sys.modules["bigdl"].__getattr__ = _of_namespace  # type: ignore[method-assign]

explain_imports()
