"""Isolated Python environment of MXNet, created once per user and machine."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle

from bigdl.common.checks import check_supported
from bigdl.common.errors import UsageError
from bigdl.common.platform.files import lock
from bigdl.common.platform.processes import has_parent_death_signal
from bigdl.common.private_folders import cache_directory

PACKAGES = (
    "mxnet==1.9.1",
    "numpy==1.23.5",  # the last version with np.bool, which mxnet uses
    "graphviz==0.8.4",
    "requests==2.31.0",
    "charset-normalizer==3.3.2",
    "idna==3.4",
    "urllib3==2.0.7",
    "certifi==2024.2.2",
    f"cloudpickle=={cloudpickle.__version__}",
)
"""All installed packages; cloudpickle has the caller's version, since it ships the functions."""
_INSTEAD = "or move the model to bigdl.orca.learn.pytorch or bigdl.orca.learn.tf2"


def isolated_python() -> str:
    """Return the interpreter of the environment, creating the environment if necessary.

    Raises
    ------
    UsageError
        If it cannot be created.
    """
    check_supported("MXNet", has_parent_death_signal())
    if sys.version_info[:2] != (3, 11):
        raise UsageError(
            "MXNet's last release needs Python 3.11, but this is Python "
            f"{sys.version_info.major}.{sys.version_info.minor}; run the program with Python 3.11, "
            + _INSTEAD,
            code="version-unsupported",
            package="mxnet",
        )
    name = hashlib.sha256("\n".join((sys.base_prefix, *PACKAGES)).encode()).hexdigest()[:12]
    home = cache_directory("mxnet") / name
    python = home / "bin" / "python"
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{home}.lock", "w") as file:
        lock(file.fileno())  # released at the end of the block or of the process
        if not (home / "complete").exists() or not python.exists():
            _make(home, python)
    return str(python)


def _make(home: Path, python: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    install = ["install", "--quiet", "--no-deps", "--only-binary=:all:", *PACKAGES]
    for command in ([sys.executable, "-m", "venv", home], [python, "-Im", "pip", *install]):
        made = subprocess.run([str(each) for each in command], capture_output=True, text=True)
        if made.returncode:
            output = (made.stderr or made.stdout).strip().splitlines() or ["no message"]
            reason = next((line for line in output if line.startswith("ERROR")), output[-1])
            raise UsageError(
                f"The MXNet environment could not be created in {home} ({reason}); let pip find "
                f"{PACKAGES[0]} and {PACKAGES[1]}, e.g. with PIP_INDEX_URL or PIP_FIND_LINKS, "
                + _INSTEAD,
                code="package-missing",
                package="mxnet",
            )
    (home / "complete").touch()
