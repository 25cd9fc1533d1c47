"""Conversions without the messages of converters."""

import contextlib
import io
import logging
import warnings

from bigdl.common.program_state import SharedChange, preserve_program_state
from bigdl.training.progress import in_notebook


def _silence(stack: contextlib.ExitStack) -> None:
    stack.enter_context(preserve_program_state())  # exporters import, and draw random numbers
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    if in_notebook():
        _silence_rich(stack)
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)  # without one, logging.warning() adds one that stays
    stack.callback(root.removeHandler, handler)
    stack.callback(logging.disable, root.manager.disable)
    logging.disable(max(root.manager.disable, logging.WARNING))


def _silence_rich(stack: contextlib.ExitStack) -> None:
    """Let NNCF's bars be text, too, which goes nowhere: in a notebook they leave empty boxes."""
    with contextlib.suppress(ImportError):
        import rich

        console = rich.get_console()
        stack.callback(setattr, console, "is_jupyter", console.is_jupyter)
        console.is_jupyter = False


_silent = SharedChange(_silence)


def quiet() -> SharedChange:
    """Without warnings, log lines below errors and prints of exporters and quantizers.

    What goes wrong is in the exceptions that they raise. Settings of the whole process are
    changed, so this belongs around conversions, not around inference. They stay changed while at
    least one thread wants it.
    """
    return _silent
