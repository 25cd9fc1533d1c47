"""Suppression of output from exporters and quantizers."""

import contextlib
import io
import logging
import warnings

from bigdl.common.program_state import SharedChange, preserve_program_state
from bigdl.training.progress import in_notebook


def _silence(stack: contextlib.ExitStack) -> None:
    stack.enter_context(
        preserve_program_state()
    )  # exporters import modules and draw random numbers
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    if in_notebook():
        _silence_rich(stack)
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)  # without a handler, logging.warning() adds a permanent one
    stack.callback(root.removeHandler, handler)
    stack.callback(logging.disable, root.manager.disable)
    logging.disable(max(root.manager.disable, logging.WARNING))


def _silence_rich(stack: contextlib.ExitStack) -> None:
    """Make NNCF print progress bars as text, which is discarded, instead of notebook widgets."""
    with contextlib.suppress(ImportError):
        import rich

        console = rich.get_console()
        stack.callback(setattr, console, "is_jupyter", console.is_jupyter)
        console.is_jupyter = False


_silent = SharedChange(_silence)


def quiet() -> SharedChange:
    """Return a context manager that hides warnings, logs below ERROR and converters' output.

    Errors still raise exceptions. The settings are process-wide, so use it around conversions and
    not around inference. They are restored when the last thread leaves the context.
    """
    return _silent
