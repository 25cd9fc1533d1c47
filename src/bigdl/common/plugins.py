"""Objects that other packages offer by entry points, found when a name is first asked for."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from bigdl.common.errors import UsageError


def plugin(group: str, name: str) -> Any:
    """Load the object that an installed package offers under a name; None if none does.

    Parameters
    ----------
    group : str
        Of the entry points, such as ``"bigdl.operators"``.
    name : str

    Raises
    ------
    UsageError
        If several packages offer the name.
    """
    offers = list(entry_points(group=group, name=name))
    if len(offers) > 1:
        packages = sorted(each.dist.name if each.dist else each.value for each in offers)
        raise UsageError(
            f"{', '.join(packages)} all offer {name!r} as one of {group}; uninstall all but one",
            code="argument-conflict",
            name=name,
        )
    return offers[0].load() if offers else None
