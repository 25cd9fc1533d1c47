"""Start a Ray on this machine or connect to one, and leave nothing behind.

A Ray that is started here listens on one address only (loopback unless other machines shall join),
has no dashboard and sends no usage statistics; who wants to connect needs its token.  It dies with
this process: a small one beside it (:mod:`bigdl.orca.cluster._ray_head_main`) sees to that where
this one is killed.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from bigdl.common.environment import EnvContext, set_variables
from bigdl.common.errors import UsageError, require
from bigdl.orca.cluster.spark import user_import_path

__all__ = [
    "LOOPBACK",
    "LaunchedRay",
    "check_ray_arguments",
    "set_environment",
    "shared_environment",
]

logger = logging.getLogger("bigdl.orca")

LOOPBACK = "127.0.0.1"
_END_S = 10.0  # seconds that Ray's processes get to end by themselves
_LEAST_STORE = 100 << 20
_LONGEST_BASE = 20  # bytes
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # the workers of an engine take no CPUs while they wait, and see what their node has
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's name for "this machine only"
_KEEPER = Path(__file__).with_name("_ray_head_main.py")
_MARK = "BIGDL_RAY"  # a variable of all processes of a Ray that was started here
TOKEN = "RAY_AUTH_TOKEN"
_token = secrets.token_hex(32)  # one for this process: Ray reads it once


class LaunchedRay:
    """A Ray that this process is connected to.

    Attributes
    ----------
    address : str
        Where other nodes and processes can join.
    info : dict
        What Ray says of itself.
    """

    def __init__(
        self,
        context,
        environment: dict[str, str | None],
        processes: list[psutil.Process],
        directory: str | None,
        keeper: subprocess.Popen | None = None,
    ):
        import ray

        self.address = ray.get_runtime_context().gcs_address
        self.info = dict(getattr(context, "address_info", None) or {})
        self._environment, self._directory = environment, directory
        self._processes, self._keeper = processes, keeper

    @classmethod
    def start(
        cls,
        cores: int,
        *,
        host: str | None = LOOPBACK,
        object_store_memory: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> LaunchedRay:
        """Start a Ray of one node on this machine.

        Parameters
        ----------
        cores : int
            CPUs that Ray gives away here.
        host : str, optional
            Address at which other machines join; None is one that Ray finds.
        object_store_memory : int, optional
            Bytes; default: what Ray takes, but not more than there is shared memory for.
        options : dict, optional
            Further arguments of ``ray.init``.
        """
        require("ray", "ray")
        # the names of sockets may have 107 bytes, of which Ray takes up to 64 below its directory
        base = tempfile.gettempdir()
        base = base if len(base) <= _LONGEST_BASE else "/tmp"
        directory = tempfile.mkdtemp(prefix="bigdl-ray-", dir=base)
        loopback = _ON_LOOPBACK if host == LOOPBACK else {}
        others = _children()
        debugger = {"PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT")}  # Ray takes it over
        before = {**set_environment({**ENVIRONMENT, **loopback, **_authentication()}), **debugger}
        keeper = _start_keeper(directory)
        try:
            options = {
                "include_dashboard": False,
                "namespace": "bigdl",
                "logging_level": logging.WARNING,
                **(options or {}),
                "num_cpus": cores,
                "object_store_memory": object_store_memory or _store_size(),
                **({"_node_ip_address": host} if host else {}),
                "_temp_dir": directory,
            }
            with EnvContext({_MARK: directory, "PYTHONPATH": _import_path()}):
                context = _init(**options)
            ours = [p for p in _children() if p not in others]
            return cls(context, before, ours, directory, keeper)
        except BaseException:
            _end([p for p in _children() if p not in others])
            _stop_keeper(keeper)
            set_environment(before)
            shutil.rmtree(directory, ignore_errors=True)
            raise

    @classmethod
    def connect(cls, address: str, options: Mapping[str, Any] | None = None) -> LaunchedRay:
        """Connect to a Ray that runs already."""
        options = {"namespace": "bigdl", "logging_level": logging.WARNING, **(options or {})}
        return cls(_init(address=address, **options), {}, [], None)

    def stop(self) -> None:
        """Disconnect; of a Ray that was started here no process and no file is left."""
        import ray

        processes = [p for each in self._processes for p in (each, *_descendants(each))]
        with contextlib.suppress(Exception):
            ray.shutdown()
        if self._directory:
            _end(processes)
            _stop_keeper(self._keeper)
            set_environment(self._environment)
            shutil.rmtree(self._directory, ignore_errors=True)


def check_ray_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for ``ray.init``, of which Ray itself would only say that it does not know them."""
    ray = require("ray", "ray")
    known = inspect.signature(inspect.unwrap(ray.init)).parameters
    private = ("_redis_password", "_redis_username", "_system_config", "_metrics_export_port")
    for name in options:
        if name not in known and name not in private:
            raise UsageError(
                f'init_orca_context has no argument {name!r} with runtime="ray"; besides cores, '
                "num_nodes, address and object_store_memory it takes those of ray.init"
            )
    return dict(options)


def _init(**options):
    ray = require("ray", "ray")
    try:
        return ray.init(**options)
    except UsageError:
        raise
    except Exception as error:
        where = f" at {options['address']}" if options.get("address") else ""
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"Ray{where} cannot be started or reached: {reason}") from error


def _import_path() -> str:
    """What lets other processes import what this one can."""
    return os.pathsep.join([*user_import_path(), *filter(None, [os.environ.get("PYTHONPATH")])])


def _authentication() -> dict[str, str]:
    """A token of our own, where the user has chosen nothing."""
    if any(os.environ.get(name) for name in (TOKEN, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")):
        return {}
    return {"RAY_AUTH_MODE": "token", TOKEN: _token}


def shared_environment() -> dict[str, str]:
    """The variables that other processes need to join the Ray of this one, its token too."""
    names = (*ENVIRONMENT, *_ON_LOOPBACK, TOKEN, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
    return {name: os.environ[name] for name in names if name in os.environ}


def set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables, or unset those that are None; returns what they were.

    Ray reads some of them when it is imported only, so it is told.
    """
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config

    before = set_variables(values)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    (loopback,) = _ON_LOOPBACK
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(loopback) != "0"
    return before


def _store_size() -> int:
    """Bytes of the object store: as Ray's own default, but within the shared memory."""
    from bigdl.common.memory import available_memory

    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    wanted = int(0.3 * available_memory())
    return max(_LEAST_STORE, min(wanted, int(0.9 * shared)) if shared else wanted)


def _start_keeper(directory: str) -> subprocess.Popen:
    """The process that outlives this one for as long as it takes to end its Ray."""
    with open("/proc/self/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    order = {
        "driver": [os.getpid(), started],
        "directory": directory,
        "mark": f"{_MARK}={directory}",
    }
    keeper = subprocess.Popen(
        [sys.executable, str(_KEEPER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    with keeper.stdin as line:
        line.write(json.dumps(order) + "\n")
    return keeper


def _stop_keeper(keeper: subprocess.Popen | None) -> None:
    if keeper is not None:
        keeper.terminate()
        keeper.wait()


def _children() -> list[psutil.Process]:
    """Processes of Ray below this one."""
    return [p for p in psutil.Process().children() if _is_rays(p)]


def _is_rays(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(f"{os.sep}ray{os.sep}" in part for part in process.cmdline()[:3])
    return False


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _end(processes: list[psutil.Process]) -> None:
    """Wait for processes to end, then end them."""
    _, left = psutil.wait_procs(processes, timeout=_END_S)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if left:
        logger.warning("Ray's processes did not end within %g s and were killed", _END_S)
        psutil.wait_procs(left, timeout=_END_S)
