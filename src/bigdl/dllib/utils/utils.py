"""Questions of programs about their Python environment and machine."""

import os
import socket
import sys

from bigdl.common.errors import UsageError

__all__ = ["detect_conda_env_name", "detect_python_location", "get_node_ip"]


def detect_conda_env_name() -> str:
    """Name of the conda environment that this Python runs in.

    Raises
    ------
    UsageError
        If it runs in none.
    """
    if not os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        raise UsageError(
            f"This Python ({sys.executable}) runs in no conda environment; activate one first"
        )
    active = os.environ.get("CONDA_PREFIX", "")
    if os.path.realpath(active) == os.path.realpath(sys.prefix):
        name = os.environ.get("CONDA_DEFAULT_ENV", "")
        if name:
            return name
    if os.path.basename(os.path.dirname(sys.prefix)) == "envs":
        return os.path.basename(sys.prefix)
    return "base"


def detect_python_location() -> str:
    """Path of the Python interpreter that runs this."""
    return sys.executable


def get_node_ip() -> str:
    """The address of this machine that others reach, or ``127.0.0.1`` without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # a datagram socket sends nothing by this
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
