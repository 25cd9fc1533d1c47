"""Third-party programs for the test clusters, which are not part of the project."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent
MISSING = 3
"""Exit status of a cluster that cannot run on this machine."""


def missing(reason: str) -> NoReturn:
    """Exit because the cluster cannot run on this machine."""
    print(reason, file=sys.stderr)
    raise SystemExit(MISSING)


def find(name: str, fetch: Callable[[Path], None]) -> Path:
    """Return the folder of binaries, which are downloaded on first use.

    Parameters
    ----------
    name : str
        A folder in that of the variable ``BIGDL_CLUSTERS``, which is taken if it is there, or else
        in the user's cache.
    fetch : callable
        Fills a folder; raises an error where it cannot.

    Raises
    ------
    SystemExit
        With the status `MISSING`, if they are in neither and cannot be fetched.
    """
    given = os.environ.get("BIGDL_CLUSTERS")
    if given and (Path(given) / name).is_dir():
        return Path(given, name)
    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "bigdl-clusters", name)
    if not kept.is_dir():
        part = kept.with_name(kept.name + f".{os.getpid()}")
        part.mkdir(parents=True)
        try:
            fetch(part)
            part.rename(kept)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(part, ignore_errors=True)
            missing(
                f"{name} is not here and cannot be fetched ({error}); let BIGDL_CLUSTERS name a "
                "folder that holds it"
            )
    return kept


def by_maven(project: Path, folder: Path) -> None:
    """Copy the dependency JARs of a Maven project."""
    command = ["mvn", "-q", "-B", "-f", str(project), "dependency:copy-dependencies"]
    subprocess.run([*command, f"-DoutputDirectory={folder}"], check=True, timeout=600)
