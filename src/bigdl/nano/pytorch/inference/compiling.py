"""TorchInductor with its cache in a directory of the user's.

By itself it keeps compiled libraries, and loads them again, in a temporary directory whose name is
known beforehand: on a shared machine another user can make it first.  What BigDL compiles is kept
in ``~/.cache/bigdl/inductor``, unless the program has chosen a directory by
``TORCHINDUCTOR_CACHE_DIR``.  The environment is the program's again when that is done.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from bigdl.common.environment import EnvContext
from bigdl.common.private_folders import private_cache
from bigdl.common.program_state import SharedChange

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TRITON = "TRITON_CACHE_DIR"


def inductor_cache() -> SharedChange:
    """Let TorchInductor use the user's own cache, in all threads, until the last one leaves."""
    return _cache


def _use_own_cache(stack: ExitStack) -> None:
    # TorchInductor sets the variable itself where it, or an import of Dynamo, has needed it
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
    for name, place in {"_HEADER_DIR": headers, "_HEADER_LOCK_DIR": headers / "locks"}.items():
        if hasattr(codecache, name):  # follows no variable
            stack.callback(setattr, codecache, name, getattr(codecache, name))
            setattr(codecache, name, str(place))


_cache = SharedChange(_use_own_cache)


def compiled(function: Callable, *, dynamic: bool | None = None) -> Callable:
    """Return ``torch.compile(function)``, whose graphs are compiled in :func:`inductor_cache`."""
    with inductor_cache():  # Dynamo, which this imports, looks there, too
        return torch.compile(function, dynamic=dynamic, backend=_compile_graph)


def _compile_graph(graph: Any, inputs: Any, **options: Any) -> object:
    """Compile a graph by TorchInductor, and its backward pass when that is needed first."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    with inductor_cache():
        inner = partial(_compile_part, compile_fx_inner)
        return compile_fx(graph, inputs, inner_compile=inner, **options)


def _compile_part(compile_inner: Callable, *args: object, **options: object) -> Any:
    with inductor_cache():
        return compile_inner(*args, **options)
