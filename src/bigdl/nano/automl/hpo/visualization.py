"""Charts of a study: the functions of ``optuna.visualization``.

Charts are Plotly objects if Plotly is installed, else Matplotlib axes. Parameters may have the
names of BigDL 2.x, which end in ``▁choice`` for categorical spaces.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import require
from bigdl.nano.lazy_names import public_names
from bigdl.nano.searchable import SPLITTER
from bigdl.tuning.study import without_experimental_warnings

if TYPE_CHECKING:
    from types import ModuleType

    from optuna import Study
    from plotly.graph_objects import Figure

_OLD_ENDING = f"{SPLITTER}choice"


def is_available() -> bool:
    """Return True if Plotly or Matplotlib is installed, so that charts can be drawn.

    Examples
    --------
    >>> from bigdl.nano.automl.hpo.visualization import is_available
    >>> is_available()
    True
    """
    return any(importlib.util.find_spec(name) for name in ("plotly", "matplotlib"))


def _chart(name: str, arguments: str = "study") -> Callable[..., Any]:
    def plot(study: Study, *args: object, **kwargs: object) -> Figure:
        args = tuple(_current_names(value) for value in args)
        if "params" in kwargs:
            kwargs["params"] = _current_names(kwargs["params"])
        with without_experimental_warnings():
            return getattr(_library(), name)(study, *args, **kwargs)

    plot.__name__ = plot.__qualname__ = name
    plot.__doc__ = f"""Draw the chart of ``optuna.visualization.{name}``.

    Parameters
    ----------
    study : optuna.Study
    *args, **kwargs
        Further arguments of Optuna's function.

    Returns
    -------
    ``plotly.graph_objects.Figure`` or ``matplotlib.axes.Axes``

    Examples
    --------
    >>> from bigdl.nano.automl.hpo.visualization import {name}
    >>> from bigdl.tuning import open_study, run_trials
    >>> def objective(trial):
    ...     x, y = trial.suggest_float("x", -1, 1), trial.suggest_int("y", 1, 3)
    ...     trial.report(abs(x), step=0)  # the metric of the first epoch
    ...     return x * x / y
    >>> study = open_study()
    >>> run_trials(study, objective, n_trials=5)
    >>> chart = {name}({arguments})
    """
    return plot


@functools.cache
def _library() -> ModuleType:
    if importlib.util.find_spec("plotly"):
        return require("optuna.visualization", "automl")
    require("matplotlib", "automl")
    return require("optuna.visualization.matplotlib", "automl")


def _current_names(value: object) -> object:
    if isinstance(value, str):
        return value.removesuffix(_OLD_ENDING)
    if isinstance(value, (list, tuple)):
        return [_current_names(each) for each in value]
    return value


plot_contour = _chart("plot_contour")
plot_edf = _chart("plot_edf")
plot_intermediate_values = _chart("plot_intermediate_values")
plot_optimization_history = _chart("plot_optimization_history")
plot_parallel_coordinate = _chart("plot_parallel_coordinate")
plot_param_importances = _chart("plot_param_importances")
plot_pareto_front = _chart(
    "plot_pareto_front", "study, targets=lambda trial: (trial.value, trial.params['y'])"
)
plot_rank = _chart("plot_rank")
plot_slice = _chart("plot_slice")
plot_timeline = _chart("plot_timeline")

__all__ = public_names(__name__)
