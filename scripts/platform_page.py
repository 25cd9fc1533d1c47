#!/usr/bin/env python3
"""Write the tables of docs/guides/platforms.md.

python scripts/platform_page.py             # what other systems lack, from bigdl.common.platform
python scripts/platform_page.py --wheels    # also which extras have wheels, by platform and Python

For the wheels nothing is installed: uv (pip install uv) resolves the requirements of setup.py for
the other system, with the markers of all packages, and takes wheels only; PySpark and PyTurboJPEG,
pure Python without wheels, are left out. The table has the newest versions on the day of the run.
"""

import argparse
import os
import re
import runpy
import subprocess
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
PAGE = ROOT / "docs" / "guides" / "platforms.md"


def extras() -> dict[str, list[str]]:
    """Return the requirements of each extra in setup.py, with those of every installation."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    settings = setup.call_args.kwargs
    needs = {"": [], **settings["extras_require"]}

    def with_wheels(requirements: list[str]) -> list[str]:
        names = {each: re.match(r"[\w-]+", each)[0].lower() for each in requirements}
        return [each for each, name in names.items() if name not in SOURCES]

    return {
        name: with_wheels([*settings["install_requires"], *more]) for name, more in needs.items()
    }


def resolve(requirements: list[str], platform: str, python: str) -> str:
    """Return why the requirements cannot be installed from wheels there, or an empty string."""
    command = ["uv", "pip", "compile", "-", "--quiet", "--only-binary", ":all:"]
    command += ["--python-platform", platform, "--python-version", python]
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


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def losses_table() -> str:
    """Return the table of what each system lacks."""
    from bigdl.common import platform

    systems = (platform.MACOS, platform.WINDOWS, platform.ARM)
    rows = [
        [feature, *(losses.get(system, "") for system in systems)]
        for feature, losses in platform.LOSSES.items()
    ]
    return table(["Feature", *systems], rows)


def wheels_table(needs: dict[str, list[str]]) -> str:
    """Return the table of the Python versions for which each extra has wheels."""
    cells = [(name, title, python) for name in needs for title in PLATFORMS for python in PYTHONS]

    def check(cell: tuple[str, str, str]) -> str:
        name, title, python = cell
        reason = resolve(needs[name], PLATFORMS[title], python)
        print(*cell, reason or "ok", flush=True)
        return reason

    with ThreadPoolExecutor(4) as pool:
        reasons = dict(zip(cells, pool.map(check, cells), strict=True))

    def cell_of(name: str, title: str) -> str:
        why = {python: reasons[name, title, python] for python in PYTHONS}
        good = [python for python in PYTHONS if not why[python]]
        bad = sorted({blame(each) for each in why.values() if each})
        return ", ".join(good) + (f" (not: {', '.join(bad)})" if bad else "")

    rows = [
        [f"`{name}`" if name else "none", *(cell_of(name, title) for title in PLATFORMS)]
        for name in needs
    ]
    return table(["Extra", *PLATFORMS], rows)


def put(page: str, name: str, text: str) -> str:
    """Replace a table of the page, between its two comments."""
    pattern = rf"(<!-- {name}: .* -->\n).*?(<!-- end of {name} -->\n)"
    page, count = re.subn(
        pattern, lambda found: f"{found[1]}\n{text}\n{found[2]}", page, flags=re.S
    )
    if count != 1:
        raise LookupError(f"the page has {count} tables of {name}")
    return page


def main() -> None:
    """Replace the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", action="store_true", help="also check the wheels")
    options = parser.parse_args()
    tables = {"losses": losses_table()}
    if options.wheels:
        needs = {name: each for name, each in extras().items() if name not in FOR_DEVELOPERS}
        tables["wheels"] = wheels_table(needs)
    page = PAGE.read_text(encoding="utf-8")
    for name, text in tables.items():
        page = put(page, name, text)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
