"""Trainers of trials."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pytorch_lightning.callbacks import Callback, Checkpoint

from bigdl.common.errors import UsageError

__all__ = ["fresh_trainer", "trial_arguments"]


def trial_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the trainers of trials are made with.

    Parameters
    ----------
    given : mapping
        Arguments of the Trainer that searches.

    Returns
    -------
    dict
        Copies of them. Bars, summaries, Lightning's own logger and checkpoints are left out unless
        they were asked for: a search would have them for each trial.

    Raises
    ------
    UsageError
        If they cannot be copied.
    """
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    if not any(isinstance(each, Checkpoint) for each in _callbacks(given)):
        quiet["enable_checkpointing"] = False
    try:
        return quiet | copy.deepcopy(dict(given))
    except Exception as error:
        raise UsageError(
            f"Each trial has copies of the Trainer's arguments, but one cannot be copied: {error}"
        ) from error


def fresh_trainer(arguments: Mapping[str, Any], *callbacks: Callback) -> Any:
    """A trainer of one trial, with further callbacks."""
    from bigdl.nano.pytorch.trainer import Trainer

    arguments = copy.deepcopy(dict(arguments))
    arguments["callbacks"] = [*_callbacks(arguments), *callbacks]
    return Trainer(**arguments)


def _callbacks(arguments: Mapping[str, Any]) -> list[Callback]:
    callbacks = arguments.get("callbacks") or []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
