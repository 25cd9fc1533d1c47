"""Check with mypy that the sources use no call that Linux, macOS or Windows lacks.

    python scripts/check_platforms.py [linux] [darwin] [win32]

mypy knows which names of the standard library each system has. A call behind
``if sys.platform == ...`` counts for that system only. Each system takes about a minute and 2 GB of
memory.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("linux", "darwin", "win32")
OPTIONS = (
    "--config-file=",
    *("--python-version", "3.12"),
    "--no-site-packages",
    "--ignore-missing-imports",
    "--check-untyped-defs",
    "--explicit-package-bases",
    *("--cache-dir", ".mypy_cache/platforms"),
)
MISSING = re.compile(
    r"(Module( \"[\w.]+\")?|\"BaseContext\") has no attribute|Name \"\w+\" is not defined"
)


def missing_calls(system: str) -> list[str]:
    """Return mypy's lines about names that the standard library of a system lacks."""
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *OPTIONS, "--platform", system, "src/bigdl"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    return [line for line in run.stdout.splitlines() if MISSING.search(line)]


def main() -> int:
    """Print the missing calls of each system; return 1 if there are any."""
    of_linux = set(missing_calls("linux"))
    count = 0
    for system in sys.argv[1:] or SYSTEMS[1:]:
        lines = [line for line in missing_calls(system) if line not in of_linux]
        print(f"{system}: {len(lines)} calls that the system lacks", *lines, sep="\n")
        count += len(lines)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
