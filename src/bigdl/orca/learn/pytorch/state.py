"""The state dicts of the parts of a PyTorch training."""

from __future__ import annotations

from bigdl.common.errors import UsageError
from bigdl.training.state import loads

__all__ = ["load_into"]


def load_into(part, data: bytes, what: str = "weights", whose: str = "model") -> None:
    """Load the bytes of a state dict into a model, optimizer or scheduler.

    Raises
    ------
    UsageError
        If it is the state of something else.
    """
    try:
        part.load_state_dict(loads(data))
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = " ".join(str(error).split())
        text = text if len(text) < 500 else f"{text[:500]}..."
        raise UsageError(f"The {what} do not fit the {whose}: {text}") from error
