"""``bigdl-nano-run``: run a program in the environment that ``bigdl-nano-init`` sets.

This process becomes the program, so its exit code, its signals and its terminal are the program's.
"""

import os
import shutil
import sys
from collections.abc import Sequence

from bigdl.common.errors import UsageError
from bigdl.nano.cli.environment import VALUE_OPTIONS, make_parser, planned, print_message

_NAME = "bigdl-nano-run"


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process with the program, in the new environment.

    Parameters
    ----------
    arguments : sequence of str, optional
        Options, then ``script.py args…``, ``-m module args…`` or ``command args…``. Default: the
        command line.

    Returns
    -------
    int
        The exit code if no program is run; 2 if an argument is invalid.
    """
    before_program, program = _split(list(sys.argv[1:] if arguments is None else arguments))
    parser = make_parser(
        _NAME,
        "[options] (script.py | -m module | command) [args ...]",
        "Runs a program in the environment that bigdl-nano-init sets.",
    )
    try:
        options = parser.parse_args(before_program)
        command = [] if options.help or options.debug else _command(program)
    except UsageError as error:
        print_message(_NAME, str(error))
        return 2
    result = planned(parser, options, os.environ)
    if result is None:
        return 0
    plan, after = result
    for path in plan.scripts:
        print_message(_NAME, f"source {path} first")
    sys.stdout.flush()
    os.execve(command[0], command, after)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into options of this command and the program with its arguments."""
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return arguments[:position], arguments[position + 1 :]
        if argument == "-m" or not argument.startswith("-"):
            break
        position += 2 if argument in VALUE_OPTIONS else 1
    return arguments[:position], arguments[position:]


def _command(program: list[str]) -> list[str]:
    """Return the command line of the program, with the path of its executable."""
    if not program or program == ["-m"]:
        raise UsageError(f"there is no program to run; see {_NAME} -h", code="argument-missing")
    first = program[0]
    if first == "-m" or first.endswith((".py", ".pyz")) or os.path.isdir(first):
        return [sys.executable, *program]
    executable = shutil.which(first)
    if executable is not None:
        return [executable, *program[1:]]
    if os.path.exists(first):
        return [sys.executable, *program]
    raise UsageError(
        f"{first} is neither a Python program nor a command on PATH",
        code="path-missing",
        path=first,
    )


if __name__ == "__main__":
    sys.exit(main())
