"""Display of a running search: counts of trials, the best one and the latest ones."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from typing import TYPE_CHECKING

from bigdl.common.checks import check_positive
from bigdl.common.errors import hide_frames
from bigdl.training.progress import in_notebook, progress_form, say

if TYPE_CHECKING:
    from IPython.display import DisplayHandle
    from optuna.study import Study
    from optuna.trial import FrozenTrial

_STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}


@hide_frames
class SearchDisplay:
    """Callback that shows a search while it runs.

    In a notebook it is a table that is updated after each trial, in a terminal a block of lines
    that is drawn again, and elsewhere one line per trial, on standard error. It shows the number
    of finished, running, pruned and failed trials, the best trial and the latest ones.

    Parameters
    ----------
    latest : int, default 5
        Number of latest trials in the table.

    Examples
    --------
    >>> from bigdl.tuning import SearchDisplay, open_study, optimize
    >>> study = open_study()
    >>> display = SearchDisplay()
    >>> optimize(
    ...     study, lambda trial: trial.suggest_int("units", 2, 2), n_trials=2, backend="local",
    ...     concurrency=1, callbacks=[display],
    ... )
    >>> print(display.text(study))
    2 finished
    best of trial 0: 2; units=2
    trial 0 finished: 2; units=2
    trial 1 finished: 2; units=2
    """

    def __init__(self, latest: int = 5):
        self.latest = check_positive("latest", latest)
        self._ended: list[FrozenTrial] = []
        self._lines = 0
        self._handle: DisplayHandle | None = None

    def __call__(self, study: Study, trial: FrozenTrial) -> None:
        """Update the display; Optuna and :func:`~bigdl.tuning.optimize` call it after a trial."""
        self._ended = [*self._ended, trial][-self.latest :]
        if in_notebook():
            self._show_table(study)
        elif progress_form() == "bar":
            self._draw(self.text(study).splitlines())
        else:
            say(f"{_line_of(trial)} ({_counts(study)})")

    def text(self, study: Study) -> str:
        """Return the counts, the best trial and the latest trials as lines.

        Parameters
        ----------
        study : optuna.Study

        Examples
        --------
        >>> from bigdl.tuning import SearchDisplay, open_study
        >>> SearchDisplay().text(open_study())
        'no trials'
        """
        best = [f"best of {_text(each)}" for each in _best(study)]
        return "\n".join([_counts(study), *best, *map(_line_of, self._ended)])

    def _draw(self, lines: list[str]) -> None:
        """Replace the lines of the previous call in the terminal."""
        up = f"\x1b[{self._lines}A\x1b[J" if self._lines else ""
        width = shutil.get_terminal_size().columns - 1  # a wrapped line would be two
        sys.stderr.write(up + "".join(f"{line[:width]}\n" for line in lines))
        sys.stderr.flush()
        self._lines = len(lines)

    def _show_table(self, study: Study) -> None:
        from IPython.display import HTML, display

        page = HTML(self._html(study))  # type: ignore[no-untyped-call]
        if self._handle is None:
            self._handle = display(page, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(page)  # type: ignore[no-untyped-call]

    def _html(self, study: Study) -> str:
        from html import escape

        rows = [*_best(study), *self._ended]
        marks = [*("best" for _ in _best(study)), *(_state(each) for each in self._ended)]
        cells = [
            [str(each.number), mark, _values(each), _params(each)]
            for mark, each in zip(marks, rows, strict=True)
        ]
        head = "".join(f"<th>{name}</th>" for name in ("trial", "", "value", "parameters"))
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells
        )
        return f"<p>{escape(_counts(study))}</p><table><tr>{head}</tr>{body}</table>"


def _counts(study: Study) -> str:
    """Return the number of trials in each state, such as ``9 finished, 2 running``."""
    states = Counter(trial.state.name for trial in study.get_trials(deepcopy=False))
    counts = [f"{states[name]} {text}" for name, text in _STATES.items() if states[name]]
    return ", ".join(counts) or "no trials"


def _best(study: Study) -> list[FrozenTrial]:
    """Return the best trial, or the Pareto-optimal ones if there are few; none at the start."""
    if len(study.directions) > 1:
        return study.best_trials[:5]
    try:
        return [study.best_trial]
    except ValueError:  # no trial has finished
        return []


def _state(trial: FrozenTrial) -> str:
    return _STATES.get(trial.state.name, trial.state.name.lower())


def _values(trial: FrozenTrial) -> str:
    if trial.values is not None:
        return ", ".join(f"{value:.6g}" for value in trial.values)
    reports = trial.intermediate_values
    return f"{reports[max(reports)]:.6g} at step {max(reports)}" if reports else "no value"


def _params(trial: FrozenTrial) -> str:
    parts = (
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in trial.params.items()
    )
    return _printable(", ".join(parts))


def _printable(text: str) -> str:
    """Return a text with line breaks and control characters as escape sequences."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _text(trial: FrozenTrial, state: str = "") -> str:
    params = _params(trial)
    return f"trial {trial.number}{state}: {_values(trial)}" + (f"; {params}" if params else "")


def _line_of(trial: FrozenTrial) -> str:
    return _text(trial, f" {_state(trial)}")
