"""Which methods a search tries."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import Method

__all__ = ["ACCELERATORS", "ORIGINAL", "PRECISIONS", "check_member", "choose", "fits"]

ORIGINAL = "original"
"""The method that leaves the model as it is: always tried, and first."""
ACCELERATORS = (None, "onnxruntime", "openvino", "jit")
PRECISIONS = (None, "int8", "bf16", "fp16", "fp32")
_MODES = ("default", "all", "grid", "extended")
_WRONG = {
    "accelerator": "Only support accelerator None, 'onnxruntime', 'openvino' and 'jit'.",
    "precision": "Only support precision 'int8', 'bf16', 'fp16' and 'fp32'.",
}


def choose(
    known: Mapping[str, Method],
    everything: Collection[str],
    *,
    search_mode: str = "default",
    accelerator: tuple | None = None,
    precision: tuple | None = None,
    use_ipex: bool | None = None,
    includes: Collection[str] | None = None,
    excludes: Collection[str] | None = None,
) -> list[str]:
    """Names of the methods to try, the original first.

    Parameters
    ----------
    known : mapping of str to Method
        All methods of the framework.
    everything : collection of str
        Names that ``search_mode="all"`` means.
    search_mode : {"default", "all", "grid", "extended"}
        ``"default"``: the methods among `everything` that are tried unasked. ``"extended"``: all
        that are known. ``"grid"``: `everything`, or what is left of it by the next three; it is
        implied where one of these is given and the mode is not ``"extended"``.
    accelerator, precision : tuple, optional
        Keep methods of these runtimes and of these precisions.
    use_ipex : bool, optional
        Keep methods with, or without, Intel's extension.
    includes : collection of str, optional
        Try these methods and no other, whatever the mode.
    excludes : collection of str, optional
        Leave these out; the original cannot be.

    Returns
    -------
    list of str

    Raises
    ------
    UsageError
        If a value is unknown or of the wrong form.
    """
    if search_mode not in _MODES:
        modes = ", ".join(map(repr, _MODES))
        raise UsageError(f"search_mode must be one of {modes}, not {search_mode!r}")
    _check_tuple("accelerator", accelerator, ACCELERATORS, "accelerator must be a tuple.")
    # The spelling of this text is the old interface's.
    _check_tuple("precision", precision, PRECISIONS, "precison must be a tuple.")
    if includes is not None:
        names = _includes(known, includes)
    else:
        filtered = (accelerator, precision, use_ipex) != (None, None, None)
        base = list(known) if search_mode == "extended" else [n for n in known if n in everything]
        if search_mode == "default" and not filtered:
            base = [name for name in base if known[name].default]
        names = [n for n in base if fits(known[n], accelerator, precision, use_ipex)]
    left_out = _names("excludes", excludes or ())
    for name in left_out:
        if name not in known:
            warnings.warn(f"There is no method {name!r} to exclude", stacklevel=4)
    return [ORIGINAL, *(n for n in names if n != ORIGINAL and n not in left_out)]


def fits(
    method: Method,
    accelerators: tuple | None = None,
    precisions: tuple | None = None,
    use_ipex: bool | None = None,
) -> bool:
    """Whether a method is one of these runtimes and precisions; None restricts nothing."""
    return (
        (accelerators is None or method.accelerator in accelerators)
        and (precisions is None or method.precision in precisions)
        and (use_ipex is None or method.ipex == bool(use_ipex))
    )


def check_member(what: str, value, allowed: tuple) -> None:
    """Refuse an accelerator or a precision that does not exist."""
    if value not in allowed:
        raise UsageError(f"{_WRONG[what]} {value!r} was given.")


def _check_tuple(what, values, allowed, wrong_form) -> None:
    if values is None:
        return
    if not isinstance(values, tuple):
        raise UsageError(f"{wrong_form} Write {what}=({values!r},) instead of {values!r}.")
    for value in values:
        check_member(what, value, allowed)


def _includes(known, includes) -> list[str]:
    names = _names("includes", includes)
    for name in names:
        if name not in known:
            raise UsageError(
                f"There is no method {name!r} to include; choose from {', '.join(known)}"
            )
    return [name for name in known if name in names]


def _names(what, given) -> list[str]:
    if isinstance(given, str):
        raise UsageError(f"{what} must be a list of names of methods, not the string {given!r}")
    return list(given)
