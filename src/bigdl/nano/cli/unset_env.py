"""``bigdl-nano-unset-env``: print the shell commands that undo ``bigdl-nano-init``."""

import os
import sys

from bigdl.nano.cli.environment import STATE, changes, code, print_message, restored

_NAME = "bigdl-nano-unset-env"


def main() -> int:
    """Print the shell commands; ignore the arguments of a script that sources them.

    Returns
    -------
    int
        The exit code, 0.
    """
    if STATE not in os.environ:
        print_message(_NAME, "bigdl-nano-init has set nothing in this shell")
    sys.stdout.write(code(changes(os.environ, restored(os.environ))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
