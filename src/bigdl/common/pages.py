"""Self-contained HTML pages of tables and charts, readable in light and dark."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from bigdl.common.storage import write_bytes

PALETTE = (
    *("#1f77b4", "#17a2b8", "#2ca02c", "#8bc34a", "#ff7f0e"),
    *("#d62728", "#9467bd", "#8c564b", "#9e9e9e"),
)
"""Colours of the parts of a bar, which have contrast on white and on black."""

_MEASURE = re.compile(r"[\d,.]+ (%|MB|GB|s|ms)")
"""Text of a cell that is a number with a unit."""

_STYLE = """
.bigdl-page{font:14px/1.45 system-ui,sans-serif;max-width:900px}
.bigdl-page h1{font-size:1.45em;margin:.2em 0}.bigdl-page h2{font-size:1.1em;margin:1.4em 0 .4em}
.bigdl-page table{border-collapse:collapse;margin:.3em 0}
.bigdl-page th,.bigdl-page td{text-align:left;padding:.15em 1.1em .15em 0;
 border-bottom:1px solid #8884;vertical-align:top;overflow-wrap:anywhere}
.bigdl-page .scrolls{overflow-x:auto}
.bigdl-page table.wide th,.bigdl-page table.wide td{overflow-wrap:normal;white-space:nowrap}
.bigdl-page td.n{text-align:right;font-variant-numeric:tabular-nums}
.bigdl-page .bar{display:flex;height:16px;margin:.15em 0;border-radius:3px;overflow:hidden;
 background:#8882}
.bigdl-page .key{display:inline-block;margin-right:1.2em;white-space:nowrap}
.bigdl-page .key i{display:inline-block;width:.75em;height:.75em;margin-right:.4em}
.bigdl-page .note{border-left:4px solid #ff7f0e;padding:.3em .8em;margin:.4em 0;
 background:#ff7f0e1a}
.bigdl-page .dim{opacity:.7}.bigdl-page .scrolls svg{min-width:32em}
.bigdl-page svg{max-width:100%;height:auto}
"""
_BODY = """
:root{color-scheme:light dark}body{margin:2em auto;padding:0 1.2em;max-width:900px;
color:#1d2329;background:#fff}
@media (prefers-color-scheme:dark){body{color:#dfe3e8;background:#15181c}}
"""


class Page:
    """HTML page that is built section by section and needs no other file.

    Parameters
    ----------
    title : str

    Examples
    --------
    >>> from bigdl.common.pages import Page
    >>> page = Page("Fit")
    >>> page.add_table(["epoch", "loss"], [[1, 0.51234567]])
    >>> "0.5123" in page.html()
    True
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]

    def add_heading(self, text: str) -> None:
        """Add the heading of a section."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def add_text(self, text: str, css: str = "dim") -> None:
        """Add a paragraph; `css` is ``"dim"`` or ``"note"``."""
        self._parts.append(f"<div class='{css}'>{html.escape(text)}</div>")

    def add_html(self, content: str) -> None:
        """Add trusted HTML, such as the SVG of a chart."""
        self._parts.append(f"<div class='scrolls'>{content}</div>")

    def add_table(self, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table; floats have four significant digits.

        Parameters
        ----------
        names : sequence of str
            Names of the columns; empty for a table without a header.
        rows : iterable of sequence
        """
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        cell = _cell if names else _text_cell
        body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
        css = " class='wide'" if names else ""
        table = f"<table{css}>{f'<tr>{head}</tr>' if names else ''}{body}</table>"
        self._parts.append(f"<div class='scrolls'>{table}</div>")

    def add_bars(
        self,
        bars: Mapping[str, Mapping[str, float]],
        unit: str = "s",
        colours: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add bars that are divided into parts, with one legend.

        Parameters
        ----------
        bars : dict of str to dict of str to float
            Parts of each bar by label; a bar's parts are shown as shares of its sum.
        unit : str
            Unit of the values.
        colours : dict of str to str
            Fixed colours of labels; the others get those of ``PALETTE``, in turn.
        """
        labels = list(dict.fromkeys(label for parts in bars.values() for label in parts))
        palette = PALETTE * (1 + len(labels) // len(PALETTE))
        colours = {**dict(zip(labels, palette, strict=False)), **colours}
        largest = dict.fromkeys(labels, 0.0)
        for name, parts in bars.items():
            total = sum(parts.values()) or 1.0
            spans = ""
            for label, value in parts.items():
                share = 100 * value / total
                largest[label] = max(largest[label], share)
                text = html.escape(f"{label}: {value:.3g} {unit}, {share:.0f} %")
                spans += (
                    f"<span title='{text}' style='width:{share:.2f}%;background:{colours[label]}'>"
                    "</span>"
                )
            if name:
                self._parts.append(f"<div class='dim'>{html.escape(name)}</div>")
            self._parts.append(f"<div class='bar'>{spans}</div>")
        keys = ""
        for label in labels:
            upto = "up to " if len(bars) > 1 and largest[label] >= 1 else ""
            text = html.escape(f"{label} {upto}{_percent(largest[label])}")
            keys += f"<span class='key'><i style='background:{colours[label]}'></i>{text}</span>"
        self._parts.append(f"<div>{keys}</div>")

    def fragment(self) -> str:
        """Return the page as HTML for a notebook, which inherits the colours of the notebook."""
        return f"<style>{_STYLE}</style><div class='bigdl-page'>{''.join(self._parts)}</div>"

    _repr_html_ = fragment

    def html(self, refresh_s: int = 0) -> str:
        """Return the page as a document.

        Parameters
        ----------
        refresh_s : int
            Seconds after which a browser reloads the page; 0 for never.
        """
        refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"{refresh}<title>{html.escape(self._title)}</title><style>{_BODY}</style></head>\n"
            f"<body>\n{self.fragment()}\n</body></html>\n"
        )

    def write(self, path: str | os.PathLike[str], refresh_s: int = 0) -> None:
        """Write the page to a file or fsspec URL; a local file is replaced atomically.

        Raises
        ------
        UsageError
            If the file cannot be written.
        """
        write_bytes(os.fspath(path), self.html(refresh_s).encode())


def _percent(share: float) -> str:
    return "< 1 %" if 0 < share < 1 else f"{share:.0f} %"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"<td class='n'>{value:{',.0f' if abs(value) >= 1000 else '.4g'}}</td>"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"<td class='n'>{value:,}</td>"
    if isinstance(value, str) and _MEASURE.fullmatch(value):
        return f"<td class='n'>{value}</td>"
    return _text_cell(value)


def _text_cell(value: object) -> str:
    return f"<td>{html.escape(str(value))}</td>"
