"""Where a process puts files that are gone when it ends.

A process that may be killed is given a directory by the one that would kill it, which removes what
is left there; all others use the system's directory for temporary files.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["VARIABLE", "scratch_directory", "scratch_home"]

VARIABLE = "BIGDL_SCRATCH_DIR"
"""Environment variable that names the directory."""


def scratch_home() -> str | None:
    """The directory for such files, as the `dir` of :mod:`tempfile`'s functions."""
    return os.environ.get(VARIABLE) or None


def scratch_directory(prefix: str) -> Path:
    """A new, empty directory, which the caller removes.

    Parameters
    ----------
    prefix : str
        Begin of its name.

    Returns
    -------
    Path
    """
    return Path(tempfile.mkdtemp(prefix=prefix, dir=scratch_home()))
