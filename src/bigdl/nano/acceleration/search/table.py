"""Results as text."""

from __future__ import annotations

from bigdl.nano.acceleration.search.results import Results
from bigdl.nano.acceleration.search.trial import Trial

__all__ = ["render"]

_WIDTHS = {"method": 32, "status": 20, "latency(ms)": 14, "speedup": 10, "metric value": 20}


def render(results: Results) -> str:
    """A table with one row for each method, and below it why methods failed.

    Parameters
    ----------
    results : Results

    Returns
    -------
    str
        Ends with a line break.
    """
    widths = dict(_WIDTHS)
    longest = max(len(name) for name in results)
    widths["method"] = max(widths["method"], longest + 2)
    if results.objective == "throughput":
        widths["samples/s"] = 14
    if results.objective == "memory":
        widths["memory(MB)"] = 14
    rule = " " + " ".join("-" * width for width in widths.values()) + " "
    lines = [rule, _line(list(widths), widths), rule]
    lines += [_line(_cells(trial, widths), widths) for trial in results.values()]
    lines.append(rule)
    notes = [f"{trial.method}: {trial.reason}" for trial in results.values() if trial.reason]
    return "\n".join([*lines, *notes]) + "\n"


def _cells(trial: Trial, columns) -> list[str]:
    values = {
        "method": trial.method,
        "status": trial.status,
        "latency(ms)": _figure(trial.latency),
        "speedup": "None" if trial.speedup is None else f"{trial.speedup:.2f}x",
        "metric value": _figure(trial.accuracy),
        "samples/s": _figure(trial.throughput),
        "memory(MB)": _figure(trial.memory),
    }
    return [values[column] for column in columns]


def _line(cells, widths) -> str:
    fields = (f"{cell:^{width}}" for cell, width in zip(cells, widths.values(), strict=True))
    return "|" + "|".join(fields) + "|"


def _figure(value: float | None) -> str:
    """A number with five significant figures."""
    return "None" if value is None else f"{value:.5g}"
