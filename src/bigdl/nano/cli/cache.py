"""``bigdl-nano-cache``: list and clear what Nano keeps on disk.

Kept are converted networks (:mod:`bigdl.nano.acceleration.network_cache`) and results of
measurements (:mod:`bigdl.nano.acceleration.autotune`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from bigdl.common.errors import UsageError
from bigdl.common.private_folders import cache_directory
from bigdl.nano.acceleration.autotune import clear_results, count_results
from bigdl.nano.acceleration.network_cache import clear_entries, largest_size, list_entries
from bigdl.nano.cli.environment import print_message

_NAME = "bigdl-nano-cache"
_MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``bigdl-nano-cache``.

    Parameters
    ----------
    arguments : sequence of str, optional
        ``list`` or ``clear``. Default: the command line.

    Returns
    -------
    int
        The exit code; 2 if an argument or a variable is invalid.

    Examples
    --------
    >>> from bigdl.nano.cli.cache import main
    >>> main(["clear"]) == main(["list"]) == 0
    removed ...
    True
    """
    parser = argparse.ArgumentParser(
        prog=_NAME, description="Lists or clears the converted networks and measurements of Nano."
    )
    parser.add_argument("action", choices=("list", "clear"))
    action = parser.parse_args(arguments).action
    try:
        (_list if action == "list" else _clear)()
    except UsageError as error:
        print_message(_NAME, str(error))
        return 2
    return 0


def _list() -> None:
    entries = list_entries()
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s))
        what = " ".join(str(value) for key, value in entry.about.items() if key != "source")
        print(f"{entry.size / _MIB:8.1f} MiB  used {used}  {what}")
    total = sum(entry.size for entry in entries) / _MIB
    print(
        f"{len(entries)} networks with {total:.1f} MiB of at most {largest_size() / _MIB:.0f} in "
        f"{cache_directory('networks')}, {count_results()} measurements in "
        f"{cache_directory('choices')}"
    )


def _clear() -> None:
    size, results = clear_entries(), clear_results()
    print(f"removed {size / _MIB:.1f} MiB of networks and {results} measurements")


if __name__ == "__main__":
    sys.exit(main())
