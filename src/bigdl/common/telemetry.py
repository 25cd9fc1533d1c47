"""Opt-out from the usage statistics of dependencies while BigDL uses them.

Some packages that BigDL calls send usage statistics to their makers unless they are configured not
to. Users of BigDL have not agreed to that, so BigDL turns it off in its process. Environment
variables do this during the import of a package, which is when the package reads them. The
package's API does it where the program imported the package before. No file is written. Variables
that the user has set stay. ``BIGDL_DEPENDENCY_TELEMETRY=1`` leaves all dependencies as they are.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

SWITCH = "BIGDL_DEPENDENCY_TELEMETRY"
"""Environment variable that leaves the telemetry settings of dependencies unchanged."""

OPT_OUT = {
    "ENABLE_RUNTIME_UPTIME_TELEMETRY": "0",  # TensorFlow
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "ORT_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables that turn off the telemetry of dependencies."""


def is_allowed() -> bool:
    """Return True if the user allows the telemetry of dependencies."""
    return os.environ.get(SWITCH) == "1"


def opt_out_variables() -> dict[str, str]:
    """Return the environment variables that turn off the telemetry of dependencies."""
    if is_allowed():
        return {}
    return {name: value for name, value in OPT_OUT.items() if name not in os.environ}


_lock = threading.Lock()
_importing = 0
_added: set[str] = set()


@contextlib.contextmanager
def imported_without_telemetry(package: str) -> Iterator[None]:
    """Context manager for importing `package` with its telemetry turned off.

    This includes the packages that it imports. The variables are unset again when no thread
    imports any more.
    """
    global _importing
    with _lock:
        if not _importing:
            variables = opt_out_variables()
            os.environ.update(variables)
            _added.update(variables)
        _importing += 1
    try:
        if package in ("openvino", "nncf") and not is_allowed():
            _stop_openvino()
        yield
    finally:
        with _lock:
            _importing -= 1
            if not _importing:
                for name in _added:
                    os.environ.pop(name, None)
                _added.clear()


def turn_off(package: str) -> None:
    """Turn off the telemetry of an imported `package`."""
    if package in _stops and package not in _stopped and not is_allowed():
        _stops[package]()
        _stopped.add(package)


def _stop_openvino() -> None:
    """Turn off the telemetry object that OpenVINO and NNCF share."""
    with contextlib.suppress(ImportError, AttributeError):
        from openvino_telemetry.main import Telemetry
        from openvino_telemetry.utils.opt_in_checker import ConsentCheckResult, OptInChecker

        OptInChecker.check = _always_declining(OptInChecker.check, ConsentCheckResult.DECLINED)
        instance = vars(Telemetry).get("_SingletonMetaClass__single_instance")
        if instance is not None:
            instance.consent = False


def _always_declining(check: Callable[..., Any], declined: object) -> Callable[..., Any]:
    """Return a consent check that always declines, to replace `check`."""
    if hasattr(check, "bigdl_original"):
        return check

    def decline(self: object, *args: object, **kwargs: object) -> object:
        return declined

    decline.bigdl_original = check  # type: ignore[attr-defined]
    return decline


def _stop_onnxruntime() -> None:
    with contextlib.suppress(AttributeError):
        sys.modules["onnxruntime"].disable_telemetry_events()


def _stop_mlflow() -> None:
    if "MLFLOW_DISABLE_TELEMETRY" in os.environ:  # the user has decided
        return
    with contextlib.suppress(ImportError, AttributeError):
        from mlflow.telemetry import client

        client._set_telemetry_client(None)


def _stop_hugging_face() -> None:
    if "HF_HUB_DISABLE_TELEMETRY" in os.environ:
        return
    with contextlib.suppress(ImportError, AttributeError):
        from huggingface_hub import constants

        constants.HF_HUB_DISABLE_TELEMETRY = True


_stops: dict[str, Callable[[], None]] = {
    "mlflow": _stop_mlflow,
    "nncf": _stop_openvino,
    "onnxruntime": _stop_onnxruntime,
    "openvino": _stop_openvino,
    "transformers": _stop_hugging_face,
}
_stopped: set[str] = set()
