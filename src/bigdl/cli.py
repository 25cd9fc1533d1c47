"""The command ``bigdl``: installation check, demo and version."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from bigdl.common.cpu import core_count, isa_flags, processor_name
from bigdl.common.errors import BigDLError
from bigdl.common.memory import available_memory
from bigdl.common.missing import installed_version
from bigdl.common.platform.cores import processor_type
from bigdl.common.platform.memory import preloaded_allocator
from bigdl.common.timeouts import PYTHON_ANSWER_S

__all__ = ["Finding", "diagnose", "main"]

_ISA = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI (fast int8)",
    "avx_vnni": "VNNI (fast int8)",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
    "amx_int8": "AMX int8",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "bf16",
    "i8mm": "int8 matrix products",
}
_CLUSTER_VARIABLES = (
    "SPARK_HOME",
    "HADOOP_CONF_DIR",
    "YARN_CONF_DIR",
    "KUBECONFIG",
    "PYSPARK_PYTHON",
    "PYSPARK_DRIVER_PYTHON",
    "SPARK_REMOTE",
    "RAY_ADDRESS",
)
_EXTRAS = {
    "orca": "Estimators on Spark or local processes",
    "ray": "Estimators on Ray",
    "nano": "faster PyTorch and Lightning on one machine",
    "tf": "Keras",
    "automl": "hyper-parameter search",
    "friesian": "features, models and serving for recommenders",
    "serving": "model serving over HTTP and gRPC",
    "connect": "Spark Connect",
    "data": "TableLoader for any training loop",
    "java": "Java for Spark",
    "xgboost": "boosted trees",
    "delta": "Delta Lake tables",
    "iceberg": "Iceberg tables",
    "mlflow": "MLflow models and runs",
}


@dataclass(frozen=True)
class Finding:
    """One result line of ``bigdl doctor``.

    Attributes
    ----------
    subject : str
        Subject of the check, such as ``"Java"``.
    text : str
        Result of the check; for a problem also the remedy.
    is_problem : bool
        Whether BigDL cannot run like this.
    """

    subject: str
    text: str
    is_problem: bool = False


def diagnose() -> Iterator[Finding]:
    """Yield a finding for each component of the installation and for each problem.

    Yields
    ------
    Finding

    Examples
    --------
    >>> from bigdl.cli import diagnose
    >>> [finding.subject for finding in diagnose()][:3]
    ['BigDL', 'Python', 'processor']
    """
    yield Finding("BigDL", f"{importlib.metadata.version('bigdl')} in {Path(__file__).parent}")
    yield Finding("Python", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")
    yield _processor()
    yield Finding("memory", f"{available_memory() / 2**30:.1f} GiB available")
    yield _allocator()
    if installed_version("pyspark") is not None:
        yield _java()
        yield from _spark()
    yield from _environment()
    yield from _extras()


def _processor() -> Finding:
    flags = isa_flags()
    features = list(dict.fromkeys(name for flag, name in _ISA.items() if flag in flags))
    name = processor_name() or processor_type()
    known = ", ".join(features) or "no known extension"
    return Finding("processor", f"{core_count()} cores, {known} ({name})")


def _allocator() -> Finding:
    preloaded = preloaded_allocator()
    if preloaded is not None:
        return Finding("allocator", f"{preloaded}, preloaded")
    return Finding("allocator", "the C library's, which nano tunes; see bigdl-nano-run")


def _java() -> Finding:
    from bigdl.orca.cluster.java import find_java

    try:
        java = find_java()
    except BigDLError as error:
        return Finding("Java", _sentence(error), is_problem=True)
    with_home = f"{java.version} of {java.origin} ({java.home})"
    java.close()
    return Finding("Java", with_home)


def _spark() -> Iterator[Finding]:
    """Yield findings about the Spark version and the Python interpreter of Spark workers."""
    from bigdl.orca.cluster.launch import spark_versions_in

    version = installed_version("pyspark") or ""
    home = os.environ.get("SPARK_HOME")
    release = next(iter(spark_versions_in(home)), None) if home else None
    if home and release is None:
        yield Finding(
            "Spark",
            f"SPARK_HOME={home} holds no Spark; unset it to use pyspark {version}",
            is_problem=True,
        )
    elif release and release.split(".")[:2] != version.split(".")[:2]:
        yield Finding(
            "Spark",
            f"SPARK_HOME={home} is Spark {release}, but the Python package is pyspark {version}; "
            f"run: pip install pyspark=={release}, or unset SPARK_HOME",
            is_problem=True,
        )
    else:
        yield Finding("Spark", f"{version}" + (f", SPARK_HOME={home}" if home else ""))
    python = os.environ.get("PYSPARK_PYTHON")
    # Sessions of init_orca_context run their workers on this interpreter.
    worker = python or "python3"
    problem = _worker_problem(worker)
    remedy = f"set PYSPARK_PYTHON={sys.executable}"
    if not problem:
        yield Finding("Spark's workers", f"run {shutil.which(worker) or worker}")
    elif python:
        yield Finding("Spark's workers", f"PYSPARK_PYTHON={python} {problem}; {remedy}", True)
    else:
        yield Finding(
            "Spark's workers",
            f"of a session without init_orca_context would run {shutil.which(worker) or worker}, "
            f"which {problem}: {remedy} first, or create the session with init_orca_context",
            is_problem=True,
        )


def _worker_problem(python: str) -> str:
    """Return why Spark workers cannot run a Python interpreter, or an empty string if they can."""
    path = shutil.which(python)
    if path is None:
        return "is not found on PATH"
    if os.path.realpath(path) == os.path.realpath(sys.executable) and (
        Path(path).parent == Path(sys.executable).parent
    ):
        return ""
    program = "import sys, bigdl.common; print(*sys.version_info[:2], sep='.')"
    command = [path, "-c", program]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PYTHON_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be started ({_sentence(error)})"
    if answer.returncode:
        return "has no BigDL"
    here = "{}.{}".format(*sys.version_info[:2])
    there = answer.stdout.strip()
    return "" if there == here else f"is Python {there}, while this is {here}"


def _environment() -> Iterator[Finding]:
    for name in _CLUSTER_VARIABLES:
        value = os.environ.get(name)
        if value and name.endswith(("_DIR", "KUBECONFIG")) and not Path(value).exists():
            yield Finding("settings", f"{name}={value} does not exist; correct or unset it", True)
        elif value:
            yield Finding("settings", f"{name}={value}")


def _extras() -> Iterator[Finding]:
    """Yield a finding for each extra: that it is installed, or the command that installs it."""
    requirements = [Requirement(line) for line in importlib.metadata.requires("bigdl") or []]
    for extra, purpose in _EXTRAS.items():
        wrong = []
        for requirement in requirements:
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": ""}):
                continue
            if marker.evaluate({"extra": extra}):
                version = installed_version(requirement.name)
                if version is None:
                    wrong.append(requirement.name)
                elif not requirement.specifier.contains(version, prereleases=True):
                    wrong.append(
                        f"{requirement.name} {version} ({requirement.specifier} is required)"
                    )
        if wrong:
            missing = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
            install = f"pip install 'bigdl[{extra}]'"
            yield Finding(f"[{extra}]", f"not installed: {purpose}; {install} ({missing})")
        else:
            yield Finding(f"[{extra}]", f"installed: {purpose}")


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())


def _doctor() -> int:
    problems = 0
    for finding in diagnose():
        mark = "!" if finding.is_problem else " "
        print(f"{mark} {finding.subject:<16} {finding.text}", flush=True)
        problems += finding.is_problem
    print(f"\nProblems: {problems}" if problems else "\nNo problem found.")
    return 1 if problems else 0


def _demo(backend: str, epochs: int) -> int:
    from bigdl.demo import run

    run(backend, epochs)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``bigdl`` and return its exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command-line arguments; default: those of the process.

    Returns
    -------
    int
        Exit status: 1 if ``doctor`` found a problem or a command failed.

    Examples
    --------
    >>> from bigdl.cli import main
    >>> main(["version"])
    3...
    0
    """
    parser = argparse.ArgumentParser(
        prog="bigdl", description="Check a BigDL installation, or run a demo."
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    commands.add_parser("doctor", help="check the installation and report problems with remedies")
    commands.add_parser("version", help="print the version of BigDL")
    demo = commands.add_parser("demo", help="train, evaluate and predict on a small table")
    demo.add_argument(
        "--backend",
        choices=("auto", "spark", "local"),
        default="auto",
        help="where to train; spark needs Java; auto selects spark if Java is available",
    )
    demo.add_argument("--epochs", type=int, default=5, help="number of training epochs")
    options = parser.parse_args(arguments)
    try:
        if options.command == "version":
            print(importlib.metadata.version("bigdl"))
            return 0
        if options.command == "doctor":
            return _doctor()
        return _demo(options.backend, options.epochs)
    except (BigDLError, ModuleNotFoundError) as error:
        print(f"bigdl: {_sentence(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
