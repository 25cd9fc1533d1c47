"""State of a program that no call of ours may change, taken and compared.

``unchanged`` is put around a call; what differs at its end is an AssertionError by name.
Packages that were not imported before have no state to compare, so a program imports first what it
would have imported itself.
"""

import asyncio
import contextlib
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import warnings


def _of_thread():
    """Numbers of threads that a thread computes with: OpenMP keeps one for each."""
    state = {"affinity": sorted(os.sched_getaffinity(0))}
    if torch := sys.modules.get("torch"):
        state["torch"] = torch.get_num_threads()
        state["grad"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        state["dtype"] = str(torch.get_default_dtype())
        state["autocast"] = torch.is_autocast_enabled("cpu")
    if numpy := sys.modules.get("numpy"):
        state["numpy errors"] = numpy.geterr()
    if threadpoolctl := sys.modules.get("threadpoolctl"):
        state["pools"] = {
            os.path.basename(pool["filepath"]): pool["num_threads"]
            for pool in threadpoolctl.threadpool_info()
        }
    return state


def _of_new_thread():
    found = {}
    thread = threading.Thread(target=lambda: found.update(_of_thread()))
    thread.start()
    thread.join()
    return found


def _logger(logger):
    return {
        "level": logger.level,
        "handlers": [
            (id(each), each.level)
            for each in logger.handlers
            if not isinstance(each, logging.NullHandler)
        ],
        "filters": [id(each) for each in logger.filters],
        "propagate": logger.propagate,
        "disabled": logger.disabled,
    }


def _loggers():
    named = logging.root.manager.loggerDict.items()
    # torch has one for its own traces
    every = {
        n: each for n, each in named if isinstance(each, logging.Logger) and n[:7] != "torch._"
    }
    return {name: _logger(each) for name, each in sorted({"root": logging.root, **every}.items())}


def _of_package(entry):
    """Whether a filter concerns the warnings of one package, which its import has set up."""
    action, message, category, module, _ = entry
    is_own = category.__module__ not in ("builtins", "warnings")
    return (is_own or message is not None or module is not None) and action != "error"


def _random():
    state = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = kind, keys.tobytes(), *rest
    if torch := sys.modules.get("torch"):
        state["torch"] = torch.get_rng_state().numpy().tobytes()
    if tensorflow := sys.modules.get("tensorflow"):
        with contextlib.suppress(Exception):
            state["tensorflow"] = tensorflow.random.get_global_generator().state.numpy().tobytes()
    if keras := sys.modules.get("keras"):
        with contextlib.suppress(Exception):
            state["keras"] = keras.utils.get_random_seed()
    return state


def _torch():
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    import torch.multiprocessing

    return {
        "interop": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "anomaly": torch.is_anomaly_enabled(),
        "device": str(torch.get_default_device()),
        "load": torch.load,
        "classes": [torch.nn.Module.__call__, torch.nn.Module.__setattr__, torch.Tensor.to],
    }


def _modules():
    state = {}
    if keras := sys.modules.get("keras"):
        with contextlib.suppress(AttributeError):
            config = keras.config
            state["keras"] = config.floatx(), config.dtype_policy().name, config.image_data_format()
            state["keras bars"] = config.is_interactive_logging_enabled()
    if tensorflow := sys.modules.get("tensorflow"):
        with contextlib.suppress(AttributeError):
            threading_ = tensorflow.config.threading
            state["tensorflow"] = (
                threading_.get_inter_op_parallelism_threads(),
                threading_.get_intra_op_parallelism_threads(),
                tensorflow.config.functions_run_eagerly(),
            )
    if cv2 := sys.modules.get("cv2"):
        state["cv2"] = cv2.getNumThreads()
    if pandas := sys.modules.get("pandas"):
        names = ("display.max_rows", "mode.string_storage", "future.infer_string")
        state["pandas"] = [pandas.get_option(name) for name in names]
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.get_printoptions()
    if matplotlib := sys.modules.get("matplotlib"):
        state["matplotlib"] = dict(matplotlib.rcParams)
    if pyarrow := sys.modules.get("pyarrow"):
        state["pyarrow"] = pyarrow.cpu_count(), pyarrow.io_thread_count()
    if optuna := sys.modules.get("optuna"):
        state["optuna"] = optuna.logging.get_verbosity()
    return state


def snapshot():
    """Return what is global in this process, as a dict of dicts."""
    limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    mask = os.umask(0o022)
    os.umask(mask)
    return {
        "loggers": _loggers(),
        "logging": {
            "disable": logging.root.manager.disable,
            "class": logging.getLoggerClass(),
            "records": logging.getLogRecordFactory(),
            "last": logging.lastResort,
        },
        "signals": {
            each.name: signal.getsignal(each)
            for each in signal.valid_signals()
            if isinstance(each, signal.Signals)
        },
        "this thread": _of_thread(),
        "later threads": _of_new_thread(),
        "environment": dict(os.environ),
        "random numbers": _random(),
        "warnings": {
            "filters": [each for each in warnings.filters if not _of_package(each)],
            "show": warnings.showwarning,
            "format": warnings.formatwarning,
        },
        "hooks": {
            "except": sys.excepthook,
            "thread": threading.excepthook,
            "unraisable": sys.unraisablehook,
            "display": sys.displayhook,
            "breakpoint": sys.breakpointhook,
            "trace": sys.gettrace(),
            "profile": sys.getprofile(),
            "faults": faulthandler.is_enabled(),
        },
        "process": {
            "start method": multiprocessing.get_start_method(allow_none=True),
            "folder": os.getcwd(),
            "mask": mask,
            "path": list(sys.path),
            "arguments": list(sys.argv),
            "streams": (sys.stdin, sys.stdout, sys.stderr),
            "locale": locale.setlocale(locale.LC_ALL),
            "temporary": tempfile.tempdir or tempfile.gettempdir(),
            "recursion": sys.getrecursionlimit(),
            "switch": sys.getswitchinterval(),
            "garbage": (gc.isenabled(), gc.get_threshold()),
            "timeout": socket.getdefaulttimeout(),
            "nice": os.nice(0),
            "events": type(asyncio.get_event_loop_policy()) if sys.version_info < (3, 14) else None,
            "limits": {name: resource.getrlimit(kind) for name, kind in limits.items()},
        },
        "torch": _torch(),
        "modules": _modules(),
    }


def differences(before, after, allowed=()):
    """Return a line for everything that was there before and is another now.

    Parameters
    ----------
    allowed : sequence of str
        Begins of lines that are documented, such as ``"environment: RAY_"``.
    """
    lines = []
    for section, values in before.items():
        for name, value in values.items():
            now = after[section].get(name, "nothing")
            if name == "pools":  # what was loaded since then has a number of its own
                now = {pool: now.get(pool) for pool in value}
            if now != value:
                lines.append(f"{section}: {name}: {_shown(value, now)}")
    # what may only be added by name: a new logger or module has a state of its own
    for section in ("environment", "signals"):
        for name in sorted(after[section].keys() - before[section].keys()):
            lines.append(f"{section}: {name}: nothing -> {after[section][name]!r:.200}")
    return [line for line in lines if not line.startswith(tuple(allowed))]


def _shown(before, now):
    if isinstance(before, dict) and isinstance(now, dict):
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return "; ".join(
            f"{name} {before.get(name)!r:.80} -> {now.get(name)!r:.80}" for name in names
        )
    if isinstance(before, list) and isinstance(now, list):
        gone = [each for each in before if each not in now]
        added = [each for each in now if each not in before]
        return f"gone {gone!r:.200}, added {added!r:.200}"
    return f"{before!r:.80} -> {now!r:.80}"


@contextlib.contextmanager
def unchanged(allowed=()):
    """Assert that what runs inside leaves the program as it was."""
    before = snapshot()
    yield
    lines = differences(before, snapshot(), allowed)
    assert not lines, "\n".join(lines)
