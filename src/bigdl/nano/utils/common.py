"""Helpers of Nano for all frameworks, under the names of BigDL 2.x.

Importing this module has no side effects.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import importlib.util
import inspect
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from packaging.version import Version

from bigdl.common.checks import invalidInputError, invalidOperationError
from bigdl.common.cpu import THREAD_VARIABLES, isa_flags, schedule_workers, usable_cores
from bigdl.common.environment import EnvContext, ipex_fits
from bigdl.common.errors import WorkerError, user_stacklevel
from bigdl.common.missing import installed_version
from bigdl.nano.lazy_names import public_names
from bigdl.runtime.launch import launch

P = ParamSpec("P")
T = TypeVar("T")
_WARM_UP = 2
_PROBE = 3  # runs after which a call that is much slower than the baseline is stopped
_MUCH_SLOWER = 4
_TRIMMED = 0.1  # fraction of the runs to ignore at each end
_suggestions: dict[str, None] = {}


class CPUInfo:
    """Instruction sets of this machine's processor, read at construction.

    Attributes
    ----------
    flags : frozenset of str
        All instruction sets, as Linux spells them (see :func:`bigdl.common.cpu.isa_flags`).
    has_avx, has_avx2, has_avx512 : bool
        256-bit vectors of floats, of integers, and 512-bit vectors.
    has_vnni : bool
        Dot products of int8 in one instruction, on 512-bit or 256-bit vectors.
    has_amx : bool
        Matrix products of tiles.
    has_bf16 : bool
        Products of bfloat16 in hardware, in vectors or tiles. Without tiles they may be slower than
        those of float32.

    Examples
    --------
    >>> from bigdl.nano.utils.common import CPUInfo
    >>> cpu = CPUInfo()
    >>> cpu.has_avx2 or not cpu.has_avx512
    True
    """

    def __init__(self) -> None:
        self.flags = isa_flags()
        self.has_avx = self._has("avx")
        self.has_avx2 = self._has("avx2")
        self.has_avx512 = self._has("avx512f")
        self.has_vnni = self._has("avx512_vnni", "avx_vnni")
        self.has_amx = self._has("amx_tile")
        self.has_bf16 = self._has("avx512_bf16", "amx_bf16", "bf16")

    def _has(self, *names: str) -> bool:
        return not self.flags.isdisjoint(names)


def _avx2_checker() -> bool:
    return CPUInfo().has_avx2


def _avx512_checker() -> bool:
    return CPUInfo().has_avx512


def _bf16_checker() -> bool:
    return CPUInfo().has_bf16


def compare_version(
    package: str,
    op: Callable[[Version, Version], bool],
    version: str,
    use_base_version: bool = False,
) -> bool:
    """Compare the installed version of a package with another version.

    Parameters
    ----------
    package : str
        Name of the module or distribution.
    op : callable
        A function of :mod:`operator`, e.g. ``operator.ge``: installed version on the left.
    version : str
    use_base_version : bool
        Ignore suffixes of the installed version, as in ``2.0.0rc1+cpu``.

    Returns
    -------
    bool
        False if the package is not installed.

    Examples
    --------
    >>> import operator
    >>> from bigdl.nano.utils.common import compare_version
    >>> compare_version("torch", operator.ge, "2.0")
    True
    >>> compare_version("a-package-that-is-not-installed", operator.ge, "2.0")
    False
    """
    installed = _installed_version(package)
    if installed is None:
        return False
    parsed = Version(installed)
    return op(Version(parsed.base_version) if use_base_version else parsed, Version(version))


def _installed_version(package: str) -> str | None:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    version = installed_version(package)
    if version is None:
        owners = importlib.metadata.packages_distributions().get(package)
        version = installed_version(owners[0]) if owners else None
    return version


def _is_installed(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


_inc_checker = functools.partial(_is_installed, "neural_compressor")
_onnxruntime_checker = functools.partial(_is_installed, "onnxruntime")
_openvino_checker = functools.partial(_is_installed, "openvino")
_ipex_checker = ipex_fits


def get_affinity_core_num() -> int:
    """Return the number of logical cores on which this process may run.

    Examples
    --------
    >>> from bigdl.nano.utils.common import get_affinity_core_num
    >>> get_affinity_core_num() >= 1
    True
    """
    return len(usable_cores())


def schedule_processors(
    num_workers: int, cores_per_worker: int | None = None
) -> list[dict[str, str]]:
    """Return one environment per worker that makes Intel's OpenMP pin the worker to its cores.

    GNU's OpenMP, which PyTorch's wheels include, only reads ``OMP_NUM_THREADS``;
    :func:`bigdl.runtime.launch.launch` pins its workers with any OpenMP runtime.

    Parameters
    ----------
    num_workers : int
    cores_per_worker : int, optional
        As in :func:`schedule_workers`.

    Returns
    -------
    list of dict
        A copy of this process's environment for each worker, with ``KMP_AFFINITY``,
        ``OMP_NUM_THREADS`` and ``PROCESS_IDX``.

    Raises
    ------
    UsageError
        If `num_workers` or `cores_per_worker` does not fit the machine.

    Examples
    --------
    >>> from bigdl.nano.utils.common import schedule_processors
    >>> environment, = schedule_processors(num_workers=1, cores_per_worker=1)
    >>> environment["OMP_NUM_THREADS"], environment["KMP_AFFINITY"]
    ('1', 'granularity=fine,proclist=[...],explicit')
    """
    return [
        dict(os.environ)
        | {
            "KMP_AFFINITY": f"granularity=fine,proclist=[{','.join(map(str, cores))}],explicit",
            "OMP_NUM_THREADS": str(len(cores)),
            "PROCESS_IDX": str(index),
        }
        for index, cores in enumerate(schedule_workers(num_workers, cores_per_worker))
    ]


def spawn_new_process(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function to run each call in a new process with extra environment variables.

    Libraries read variables such as ``OMP_NUM_THREADS`` when they load, so changes need a new
    process. Arguments and results are sent with ``cloudpickle``.

    Parameters
    ----------
    func : callable
        It may be defined in a script or a notebook.

    Returns
    -------
    callable
        `func` with one more keyword, ``env_var``: a mapping of environment variables to add. The
        call raises an exception of `func` with the traceback of the new process as a note, or a
        WorkerError if the exception cannot be pickled.

    Examples
    --------
    >>> import os
    >>> from bigdl.nano.utils.common import spawn_new_process
    >>> def thread_setting():
    ...     return os.environ["OMP_NUM_THREADS"]
    >>> spawn_new_process(thread_setting)(env_var={"OMP_NUM_THREADS": "1"})
    '1'
    """

    @functools.wraps(func)
    def call_in_new_process(
        *args: Any, env_var: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> T:
        # Pass on this process's thread variables, which launch would otherwise set by itself.
        variables = {name: os.environ.get(name) for name in THREAD_VARIABLES} | dict(env_var or {})
        env = {name: None if value is None else str(value) for name, value in variables.items()}
        try:
            return launch(lambda rank: func(*args, **kwargs), 1, cores=[usable_cores()], env=env)[0]
        except WorkerError as error:
            raise error.as_original("In the new process") from None

    return call_in_new_process


def get_default_args(func: Callable) -> dict[str, Any]:
    """Return the defaults of a function's parameters by parameter name.

    Parameters
    ----------
    func : callable

    Returns
    -------
    dict

    Examples
    --------
    >>> from bigdl.nano.utils.common import get_default_args
    >>> def fit(data, epochs=1, rate=0.1): ...
    >>> get_default_args(fit)
    {'epochs': 1, 'rate': 0.1}
    """
    return {
        name: parameter.default
        for name, parameter in inspect.signature(func).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def deprecated(
    func_name: str = "", message: str = ""
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that makes a function emit a DeprecationWarning at each call.

    Parameters
    ----------
    func_name : str, optional
        Name of the function in the warning. Default: its qualified name.
    message : str, optional
        Advice on the replacement.

    Returns
    -------
    callable

    Examples
    --------
    >>> import warnings
    >>> from bigdl.nano.utils.common import deprecated
    >>> @deprecated(message="Use quantize.")
    ... def pot():
    ...     return 1
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     pot()
    1
    >>> print(caught[0].message)
    pot is deprecated. Use quantize.
    """

    def decorate(func: Callable[P, T]) -> Callable[P, T]:
        text = f"{func_name or func.__qualname__} is deprecated. {message}".rstrip()

        @functools.wraps(func)
        def warn_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
            warnings.warn(text, DeprecationWarning, stacklevel=user_stacklevel())
            return func(*args, **kwargs)

        return warn_and_call

    return decorate


def _flatten(nested: object, out_list: list) -> list:
    """Append the leaves of nested lists, tuples and mappings to `out_list`, in order."""
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    if isinstance(nested, list | tuple):
        for item in nested:
            _flatten(item, out_list)
    else:
        out_list.append(nested)
    return out_list


def latency_calculate_helper(
    iterrun: int,
    baseline_time: float,
    func: Callable[..., Any],
    model: object,
    input_sample: object,
    *args: object,
) -> tuple[float, bool]:
    """Return the trimmed mean duration of ``func(model, input_sample, *args)``.

    Parameters
    ----------
    iterrun : int
        Number of timed runs, after two warm-up runs.
    baseline_time : float
        Duration of the call without acceleration, in seconds.
    func : callable
    model, input_sample, *args
        Arguments of `func`.

    Returns
    -------
    latency : float
        Mean duration in milliseconds, without the fastest and slowest tenth of the runs.
    complete : bool
        False if it stopped after three runs, which took more than four times the baseline.

    Examples
    --------
    >>> from bigdl.nano.utils.common import latency_calculate_helper
    >>> milliseconds, complete = latency_calculate_helper(
    ...     10, 60.0, lambda model, x: model(x), sorted, [3, 1, 2]
    ... )
    >>> milliseconds < 60_000, complete
    (True, True)
    """
    for _ in range(_WARM_UP):
        func(model, input_sample, *args)
    durations: list[float] = []
    for _ in range(max(1, iterrun)):
        start = time.perf_counter()
        func(model, input_sample, *args)
        durations.append(time.perf_counter() - start)
        if len(durations) == _PROBE and sum(durations) > _PROBE * _MUCH_SLOWER * baseline_time:
            return statistics.fmean(durations) * 1000, False
    durations.sort()
    cut = int(len(durations) * _TRIMMED)
    return statistics.fmean(durations[cut : len(durations) - cut]) * 1000, True


def register_suggestion(msg: str) -> None:
    """Register advice to print at the end of the program; duplicates are ignored.

    Parameters
    ----------
    msg : str

    Examples
    --------
    >>> from bigdl.nano.utils.common import output_suggestions, register_suggestion
    >>> register_suggestion("batches of 32 would be faster")  # shown when the program ends
    >>> output_suggestions()  # or now, on stderr
    """
    atexit.unregister(output_suggestions)  # register it only once
    atexit.register(output_suggestions)
    _suggestions[msg] = None


def output_suggestions() -> None:
    """Print the registered advice to stderr and clear it.

    Examples
    --------
    >>> from bigdl.nano.utils.common import output_suggestions, register_suggestion
    >>> register_suggestion("batches of 32 would be faster")
    >>> output_suggestions()  # on stderr: bigdl.nano suggests: batches of 32 would be faster
    """
    for suggestion in _suggestions:
        print(f"bigdl.nano suggests: {suggestion}", file=sys.stderr)
    _suggestions.clear()


__all__ = [
    "EnvContext",
    "invalidInputError",
    "invalidOperationError",
    "schedule_workers",
    *public_names(__name__),
]
