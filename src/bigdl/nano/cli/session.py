"""An environment before and after ``bigdl-nano-init``, and how to get back.

What was changed is remembered in the environment itself, in one variable: for each name the value
before and the value set, and the entries added to ``LD_PRELOAD``. A variable that the user has
changed since then is the user's and stays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from bigdl.nano.cli.plan import Plan, make_plan, preloads

__all__ = ["STATE", "applied", "changes", "initialised", "restored"]

STATE = "BIGDL_NANO_STATE"


def initialised(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Plan, dict[str, str], dict[str, str]]:
    """Make a plan and apply it.

    Parameters
    ----------
    options : argparse.Namespace
        As :func:`bigdl.nano.cli.options.make_parser` makes it.
    environ : mapping
        An earlier plan may have been applied to it; the new one replaces that.

    Returns
    -------
    plan : Plan
    before, after : dict
        The environment without any plan, and with this one.
    """
    before = restored(environ)
    plan = make_plan(options, before)
    return plan, before, applied(plan, before)


def restored(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as it would be if no plan had been applied.

    Parameters
    ----------
    environ : mapping

    Returns
    -------
    dict
    """
    result = dict(environ)
    state = _state(result.pop(STATE, "{}"))
    for name, (before, ours) in state["values"].items():
        if result.get(name) == ours:
            _set(result, name, before)
    if state["preload"]:
        own = [path for path in preloads(result) if path not in state["preload"]]
        _set(result, "LD_PRELOAD", ":".join(own) or None)
    return result


def applied(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with a plan applied to it, and a record of what that changed."""
    own = preloads(environ)
    added = [path for path in plan.preload if path not in own]
    state = {
        "values": {name: (environ.get(name), value) for name, value in plan.values.items()},
        "preload": added,
    }
    result = dict(environ) | plan.values | {STATE: json.dumps(state)}
    if added:
        result["LD_PRELOAD"] = ":".join([*own, *added])
    return result


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """What to set, and with None what to remove, to get from one environment to another."""
    names = sorted({*before, *after})
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _state(text: str) -> dict:
    try:
        state = json.loads(text)
        values = {str(name): tuple(pair) for name, pair in state["values"].items()}
        if all(len(pair) == 2 for pair in values.values()):
            return {"values": values, "preload": list(state["preload"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return {"values": {}, "preload": []}  # none, or not written here


def _set(environ: dict[str, str], name: str, value: str | None) -> None:
    if value is None:
        environ.pop(name, None)
    else:
        environ[name] = value
