"""TorchInductor with a private cache directory.

By default TorchInductor stores and loads compiled libraries in a temporary directory with a
predictable name. On a shared machine another user could create it first. BigDL uses
``~/.cache/bigdl/inductor`` instead, unless the program sets ``TORCHINDUCTOR_CACHE_DIR``. The
environment is restored afterwards.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from bigdl.common.environment import EnvContext
from bigdl.common.private_folders import private_cache
from bigdl.common.program_state import SharedChange

T = TypeVar("T")

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TRITON = "TRITON_CACHE_DIR"


def inductor_cache() -> SharedChange:
    """Return a context manager that gives TorchInductor a private cache directory.

    The directory applies to all threads of the process.
    """
    return _cache


def _use_private_cache(stack: ExitStack) -> None:
    # TorchInductor, or an import of Dynamo, sets the variable to this default
    default = os.path.join(tempfile.gettempdir(), "torchinductor_")
    if not os.environ.get(_VARIABLE, default).startswith(default):
        return
    directory = private_cache("inductor")
    variables: dict[str, object] = {_VARIABLE: directory}
    if os.environ.get(_TRITON, default).startswith(default):
        variables[_TRITON] = directory / "triton"
    stack.enter_context(EnvContext(variables))
    from torch._inductor import codecache

    headers = directory / "precompiled_headers"
    for name, path in {"_HEADER_DIR": headers, "_HEADER_LOCK_DIR": headers / "locks"}.items():
        if hasattr(codecache, name):  # not affected by the variable
            stack.callback(setattr, codecache, name, getattr(codecache, name))
            setattr(codecache, name, str(path))


_cache = SharedChange(_use_private_cache)


def compiled(function: Callable, *, dynamic: bool | None = None) -> Callable:
    """Apply ``torch.compile`` to a function, with graphs compiled in :func:`inductor_cache`."""
    with inductor_cache():  # this imports Dynamo, which uses the directory, too
        return torch.compile(function, dynamic=dynamic, backend=_compile_graph)


def _compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
) -> object:
    """Compile a graph with TorchInductor, and its backward pass on first use."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    with inductor_cache():
        inner = partial(_compile_part, compile_fx_inner)
        return compile_fx(graph, inputs, inner_compile=inner, **options)


def _compile_part(compile_inner: Callable[..., T], *args: object, **options: object) -> T:
    with inductor_cache():
        return compile_inner(*args, **options)
