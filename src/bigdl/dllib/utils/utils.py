"""Information about the Python environment and the machine."""

import os
import sys

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.submit import local_address

__all__ = ["detect_conda_env_name", "detect_python_location", "get_node_ip"]


def detect_conda_env_name() -> str:
    """Return the name of the conda environment of this Python.

    Raises
    ------
    UsageError
        If this Python does not run in a conda environment.

    Examples
    --------
    >>> from bigdl.common.errors import UsageError
    >>> from bigdl.dllib.utils.utils import detect_conda_env_name
    >>> try:
    ...     name = detect_conda_env_name()
    ... except UsageError as error:  # e.g. in a venv
    ...     name = None
    """
    if not os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        raise UsageError(
            f"This Python ({sys.executable}) runs in no conda environment; activate one first",
            code="state",
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
    """Return the path of the running Python interpreter.

    Examples
    --------
    >>> import os
    >>> from bigdl.dllib.utils.utils import detect_python_location
    >>> os.access(detect_python_location(), os.X_OK)
    True
    """
    return sys.executable


def get_node_ip() -> str:
    """Return the network address of this machine, or ``127.0.0.1`` without a network.

    Examples
    --------
    >>> import ipaddress
    >>> from bigdl.dllib.utils.utils import get_node_ip
    >>> ipaddress.ip_address(get_node_ip()).version
    4
    """
    return local_address()
