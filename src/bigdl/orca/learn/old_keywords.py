"""Keywords of earlier generations of BigDL: taken, renamed, or named as having no effect."""

from __future__ import annotations

import difflib
import logging

from bigdl.common.errors import UsageError

__all__ = ["take_old", "warn_once"]

logger = logging.getLogger("bigdl.orca")

# what has no effect here, and why
_IDLE = {
    "info": "info was for a TrainingOperator; config reaches every creator and callback",
}
_said: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning, the first time in this process."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def take_old(verb: str, given: dict, renamed: dict[str, str] | None = None, known=()) -> dict:
    """What the remaining keywords of a call mean.

    Parameters
    ----------
    verb : str
        For the message.
    given : dict
        The keywords that the signature does not have.
    renamed : dict of str to str
        Old names of arguments.
    known : iterable of str
        Names of the arguments, for advice.

    Returns
    -------
    dict
        Values of the renamed arguments, under their names of today.

    Raises
    ------
    UsageError
        For a keyword of no generation.
    """
    found = {}
    for name, value in given.items():
        if renamed and name in renamed:
            found[renamed[name]] = value
        elif name in _IDLE:
            if value is not None:
                warn_once(f"{verb}({name}=) has no effect: {_IDLE[name]}")
        else:
            close = difflib.get_close_matches(name, [*known, *(renamed or ())], 1)
            advice = f"; did you mean {close[0]}=?" if close else ""
            raise UsageError(f"{verb} has no argument {name!r}{advice or '; leave it out'}")
    return found
