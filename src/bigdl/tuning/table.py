"""What came of a search, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["trial_table"]


def trial_table(study: Any) -> pd.DataFrame:
    """The trials of a study, one in each row.

    Parameters
    ----------
    study : optuna.Study

    Returns
    -------
    DataFrame
        Indexed by the trial's ``number``. The columns are ``state``, as Optuna calls it; the
        figures under the names of their metrics, or as ``value`` if they have none; ``seconds``,
        which the trial took; and each parameter under its name, missing where a trial has none.
    """
    import pandas as pd

    trials = study.get_trials(deepcopy=False)
    figures = study.metric_names or _unnamed(len(study.directions))
    names = dict.fromkeys(name for trial in trials for name in trial.params)
    rows = [
        {
            "number": trial.number,
            "state": trial.state.name,
            **dict(zip(figures, trial.values or [None] * len(figures), strict=True)),
            "seconds": None if trial.duration is None else trial.duration.total_seconds(),
            **trial.params,
        }
        for trial in trials
    ]
    columns = ["number", "state", *figures, "seconds", *names]
    return pd.DataFrame(rows, columns=columns).set_index("number")


def _unnamed(count: int) -> list[str]:
    return ["value"] if count == 1 else [f"value_{place}" for place in range(count)]
