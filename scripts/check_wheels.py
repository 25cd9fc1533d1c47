#!/usr/bin/env python3
"""Check that the requirements of each extra have wheels for each platform and Python.

python scripts/check_wheels.py --write docs/guides/platforms.md

Nothing is installed: uv (pip install uv) resolves the requirements of setup.py for the other
system, with the markers of all packages, and takes wheels only; PySpark and PyTurboJPEG, which have
none, are pure Python. The table of the page has the newest versions on the day of the run.
"""

import argparse
import os
import re
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = {
    "macOS 14, arm64": "aarch64-apple-darwin",
    "Windows, x86-64": "x86_64-pc-windows-msvc",
    "Linux, aarch64": "aarch64-manylinux_2_35",
    "Linux, x86-64": "x86_64-manylinux_2_28",
}
"""Names in the table, and those of uv."""

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SOURCES = ("pyspark", "pyturbojpeg")
"""Packages without wheels, and without compiled code."""

FOR_DEVELOPERS = ("all", "dev", "docs")
BEGIN = "<!-- wheels: scripts/check_wheels.py -->\n"
END = "<!-- end of wheels -->\n"


def extras() -> dict[str, list[str]]:
    """Return the requirements of each extra in setup.py, with those of every installation."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    settings = setup.call_args.kwargs
    hard = settings["install_requires"]
    return {"": hard, **{name: [*hard, *more] for name, more in settings["extras_require"].items()}}


def resolve(requirements: list[str], platform: str, python: str) -> str:
    """Return why the requirements cannot be installed from wheels there, or an empty string."""
    command = ["uv", "pip", "compile", "-", "--quiet", "--only-binary", ":all:"]
    command += ["--python-platform", platform, "--python-version", python]
    for name in SOURCES:
        command += ["--no-binary", name]
    with tempfile.TemporaryDirectory() as folder:  # not the folder with pyproject.toml
        result = subprocess.run(
            command,
            input="\n".join(requirements),
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "UV_NATIVE_TLS": "1", "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        )
    return result.stderr.strip() if result.returncode else ""


def blame(reason: str) -> str:
    """Return the package that a message of uv says is missing."""
    pattern = r"Because (?:only )?(?:all versions of )?([\w-]+)"
    names = [name for name in re.findall(pattern, reason) if name != "you"]
    return names[0] if names else "an error"


def main() -> int:
    """Check all combinations, print them, and replace the table of a page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    parser.add_argument("--extras", nargs="*", help="only these")
    options = parser.parse_args()
    needs = {
        name: each
        for name, each in extras().items()
        if name not in FOR_DEVELOPERS and (options.extras is None or name in options.extras)
    }
    cells = [(name, title, python) for name in needs for title in PLATFORMS for python in PYTHONS]

    def check(cell: tuple[str, str, str]) -> str:
        name, title, python = cell
        reason = resolve(needs[name], PLATFORMS[title], python)
        print(*cell, reason or "ok", flush=True)
        return reason

    with ThreadPoolExecutor(4) as pool:
        reasons = dict(zip(cells, pool.map(check, cells), strict=True))
    rows = [
        "| extra | " + " | ".join(PLATFORMS) + " |",
        "|---" * (len(PLATFORMS) + 1) + "|",
    ]
    for name in needs:
        row = [f"`{name}`" if name else "none"]
        for title in PLATFORMS:
            why = {python: reasons[name, title, python] for python in PYTHONS}
            good = [python for python in PYTHONS if not why[python]]
            bad = sorted({blame(each) for each in why.values() if each})
            row.append(", ".join(good) + (f" (not: {', '.join(bad)})" if bad else ""))
        rows.append("| " + " | ".join(row) + " |")
    table = "\n".join(rows) + "\n"
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        after = rest.split(END)[1]
        options.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    else:
        print(table)
    return 1 if any(reasons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
