"""Representations of objects in consoles and notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping


def call_text(name: str, fields: Mapping[str, object]) -> str:
    """Return the representation of an object as a call, such as ``Estimator(epochs=2)``.

    Parameters
    ----------
    name : str
    fields : mapping
        Values by name; None is left out, and a float has four significant digits.

    Examples
    --------
    >>> from bigdl.common.display import call_text
    >>> call_text("Fit", {"backend": "local", "train_loss": 0.123456, "score": None})
    "Fit(backend='local', train_loss=0.1235)"
    """
    parts = [f"{key}={_value_text(value)}" for key, value in fields.items() if value is not None]
    return f"{name}({', '.join(parts)})"


def html_table(title: str, fields: Mapping[str, object], below: str = "") -> str:
    """Return a table of names and values for a notebook, readable in light and dark themes.

    Parameters
    ----------
    title : str
        Caption.
    fields : mapping
        Values by name; None is left out.
    below : str
        HTML that follows the table.
    """
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(str(key))}</th>"
        f"<td style='text-align:left'>{html.escape(_value_text(value).strip(chr(39)))}</td></tr>"
        for key, value in fields.items()
        if value is not None
    )
    caption = f"<caption style='text-align:left'><b>{html.escape(title)}</b></caption>"
    return f"<table>{caption}{rows}</table>{below}"


def _value_text(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
