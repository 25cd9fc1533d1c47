"""Which packages are installed, and in which version; nothing is imported to find out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable

from packaging.version import Version

__all__ = ["compare_version"]


def compare_version(
    package: str,
    op: Callable[[Version, Version], bool],
    version: str,
    use_base_version: bool = False,
) -> bool:
    """Compare the installed version of a package with a given one.

    Parameters
    ----------
    package : str
        Name of its module, or of its distribution.
    op : callable
        A function of :mod:`operator`, e.g. ``operator.ge``: installed version on the left.
    version : str
    use_base_version : bool
        Whether suffixes of the installed version, as in ``2.0.0rc1+cpu``, are left out.

    Returns
    -------
    bool
        False if the package is not installed.
    """
    installed = _installed_version(package)
    if installed is None:
        return False
    found = Version(installed)
    return op(Version(found.base_version) if use_base_version else found, Version(version))


def _installed_version(package: str) -> str | None:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        owners = importlib.metadata.packages_distributions().get(package)
        return importlib.metadata.version(owners[0]) if owners else None


def _inc_checker() -> bool:
    """Whether Intel Neural Compressor is installed."""
    return _is_installed("neural_compressor")


def _ipex_checker() -> bool:
    """Whether IPEX is installed for the torch that is; importing it beside another one fails."""
    ipex, torch = _installed_version("intel_extension_for_pytorch"), _installed_version("torch")
    if ipex is None or torch is None:
        return False
    return Version(ipex).release[:2] == Version(torch).release[:2]


def _onnxruntime_checker() -> bool:
    """Whether ONNX Runtime is installed."""
    return _is_installed("onnxruntime")


def _openvino_checker() -> bool:
    """Whether OpenVINO is installed."""
    return _is_installed("openvino")


def _is_installed(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None
