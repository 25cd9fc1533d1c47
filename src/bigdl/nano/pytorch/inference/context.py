"""The settings under which accelerated models run, pushed on entry and popped on exit."""

from __future__ import annotations

import threading
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from bigdl.common.cpu import thread_scope
from bigdl.common.errors import UsageError

__all__ = [
    "InferenceContext",
    "Settings",
    "active_settings",
    "context_of",
    "remember_settings",
    "settings_of",
]

_local = threading.local()


@dataclass(frozen=True)
class Settings:
    """What one model asks of its surroundings.

    Attributes
    ----------
    threads : int or None
        Threads of PyTorch; None leaves them as they are.
    bf16 : bool
        Whether operators run in bfloat16 where autocast deems that safe.
    """

    threads: int | None = None
    bf16: bool = False


class InferenceContext:
    """``with`` it, models run without gradients, with their threads and their precision.

    Contexts nest, one may be entered again, and each leaves everything as it found it.

    Parameters
    ----------
    settings : Settings
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self._entered: list[ExitStack] = []

    @property
    def thread_num(self) -> int | None:
        """Number of threads inside; None if it is not changed."""
        return self.settings.threads

    def __enter__(self) -> InferenceContext:
        with ExitStack() as stack:
            # a thread scope takes a millisecond, a small model less
            if self.settings.threads not in (None, torch.get_num_threads()):
                stack.enter_context(thread_scope(self.settings.threads))
            stack.enter_context(torch.inference_mode())
            if self.settings.bf16:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(_Active(self.settings))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exception) -> None:
        self._entered.pop().close()


class _Active:
    """Marks the calling thread as being inside a context, so that models do not enter another."""

    def __init__(self, settings: Settings):
        self._settings = settings

    def __enter__(self):
        self._before = getattr(_local, "settings", None)
        _local.settings = self._settings

    def __exit__(self, *exception):
        _local.settings = self._before


def active_settings() -> Settings | None:
    """The settings of the innermost context of this thread, if there is one."""
    return getattr(_local, "settings", None)


# What was asked for modules of users, on which nothing is set.
_of_plain_modules: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def remember_settings(model: torch.nn.Module, settings: Settings) -> None:
    """Settings that :func:`settings_of` gives for a module of the user's."""
    _of_plain_modules[model] = settings


def settings_of(model: torch.nn.Module) -> Settings:
    """What a model asks for; nothing special if nobody has said anything of it."""
    return getattr(model, "inference_settings", None) or _of_plain_modules.get(model, Settings())


def context_of(*models: torch.nn.Module) -> InferenceContext:
    """One context for several models.

    Parameters
    ----------
    *models : Module
        A list or tuple of modules counts as its elements. The largest thread count holds for all,
        and bf16 if one of them asks for it; both with a warning where the models differ.

    Raises
    ------
    UsageError
        If there is no model, or something is none.
    """
    flat = [m for each in models for m in (each if isinstance(each, (list, tuple)) else [each])]
    for model in flat:
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"get_context takes models, but got a {type(model).__name__}")
    if not flat:
        raise UsageError("get_context takes at least one model, but got none")
    found = [settings_of(model) for model in flat]
    threads = {each.threads for each in found}
    chosen = max((count for count in threads if count is not None), default=None)
    if len(threads) > 1:
        warnings.warn(
            f"The models have different numbers of threads "
            f"({', '.join(str(each.threads) for each in found)}); {chosen} is used for all",
            stacklevel=3,
        )
    bf16 = any(each.bf16 for each in found)
    if bf16 and not all(each.bf16 for each in found):
        warnings.warn(
            "Some of the models run in bf16 and some do not; all run in bf16 in this context",
            stacklevel=3,
        )
    return InferenceContext(Settings(chosen, bf16))
