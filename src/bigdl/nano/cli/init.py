"""``bigdl-nano-init``: print shell commands that set up an environment for numeric programs.

The script ``bigdl-nano-init`` next to this module runs it; if sourced, the script also executes the
commands. Only shell code goes to stdout, so ``eval "$(bigdl-nano-init)"`` is equivalent.
"""

import os
import sys
from collections.abc import Sequence

from bigdl.common.errors import UsageError
from bigdl.nano.cli.environment import changes, code, make_parser, planned, print_message

_NAME = "bigdl-nano-init"
_SOURCED = "--sourced"  # the first argument when a shell sources the script


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the shell commands and return the exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the command line.

    Returns
    -------
    int
        The exit code; 2 if an argument is invalid.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sourced = arguments[:1] == [_SOURCED]
    parser = make_parser(
        _NAME, "[options]", f'Sets the environment: source {_NAME}, or eval "$({_NAME})".'
    )
    try:
        options = parser.parse_args(arguments[sourced:])
    except UsageError as error:
        if not sourced:
            print_message(_NAME, str(error))
            return 2
        # A script that sources this one without arguments passes its arguments; shells do not
        # distinguish them.
        print_message(_NAME, f"{error}; arguments of the sourcing script were ignored")
        options = parser.parse_args([])
    result = planned(parser, options, os.environ)
    if result is None:
        return 0
    plan, after = result
    sys.stdout.write(code(changes(os.environ, after), plan.scripts))
    if not sourced and sys.stdout.isatty():
        print_message(_NAME, f'nothing is set yet; use: source {_NAME}, or: eval "$({_NAME})"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
