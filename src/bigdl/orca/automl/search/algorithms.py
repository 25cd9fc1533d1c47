"""What proposes configurations and what stops trials early, by the names of BigDL and Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError

__all__ = ["Strategy", "foreign_searcher", "is_random", "pruner_of", "sampler_of", "scheduler_of"]

_RANDOM = ("random", "variant_generator")
_SAMPLERS = {
    "optuna": "TPE",
    "tpe": "TPE",
    "cmaes": "CmaEs",
    "nsga2": "NSGAII",
    "nsgaii": "NSGAII",
}
_SCHEDULERS = {
    "asha": "asha",
    "asynchyperband": "asha",
    "async_hyperband": "asha",
    "median_stopping_rule": "median",
    "medianstopping": "median",
    "hyperband": "hyperband",
    "fifo": "fifo",
}
_FINALISTS = "finalists"
# Ray's ASHA compares after one epoch and lets one trial of four go on, which is for thousands of
# trials: of 20 it often loses the best one. These numbers cost half of the epochs of full trials
# and seldom lose it (benchmarks/automl.py, on two problems).
_GRACE_PART = 9
_REDUCTION = 2
_FINALIST_PART = 0.1


@dataclass(frozen=True)
class Strategy:
    """What a user has named to propose configurations and to stop trials; see ``fit``."""

    search_alg: Any = None
    search_alg_params: Mapping[str, Any] | None = None
    scheduler: Any = None
    scheduler_params: Mapping[str, Any] | None = None

    @property
    def is_random(self) -> bool:
        """Whether values are drawn by chance."""
        return is_random(self.search_alg)

    def sampler(self, seed: int) -> Any | None:
        """See :func:`sampler_of`."""
        return sampler_of(self.search_alg, self.search_alg_params, seed)

    def pruner(self, epochs: int) -> Any:
        """See :func:`pruner_of`."""
        return pruner_of(self.scheduler, self.scheduler_params, epochs)

    def ray_scheduler(self, epochs: int) -> Any:
        """See :func:`scheduler_of`."""
        return scheduler_of(self.scheduler, self.scheduler_params, epochs)

    def finalists(self, trials: int) -> int:
        """How many of the trials that were stopped early are trained to their end after all.

        Parameters
        ----------
        trials : int
            Of the search.

        Raises
        ------
        UsageError
            If the scheduler's parameter ``finalists`` is no number of trials.
        """
        if _SCHEDULERS.get(_lowered(self.scheduler)) != "asha":
            return 0
        given = (self.scheduler_params or {}).get(_FINALISTS)
        if given is None:
            return round(_FINALIST_PART * trials)
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise UsageError(
                "finalists in scheduler_params must be a number of trials, 0 or more, got "
                f"{given!r}"
            )
        return given

    def ray_searcher(self, space, goal) -> Any | None:
        """See :func:`foreign_searcher`; None where chance or Optuna proposes."""
        if self.sampler(0) is not None:
            return None
        return foreign_searcher(self.search_alg, self.search_alg_params, space, goal)

    def text(self) -> str:
        """The name of what proposes configurations."""
        return "random" if self.is_random else _shown(self.search_alg).strip("'")


def is_random(search_alg: Any) -> bool:
    """Whether configurations are drawn at random, and known before the search."""
    return search_alg is None or _lowered(search_alg) in _RANDOM


def sampler_of(search_alg: Any, params: Mapping[str, Any] | None, seed: int) -> Any | None:
    """The sampler of Optuna that a search algorithm is; None where it is one of Ray's.

    Raises
    ------
    UsageError
        If the sampler does not take the parameters.
    """
    from bigdl.tuning import create_sampler

    params = dict(params or {})
    if is_random(search_alg):
        if params:
            raise UsageError(
                f"search_alg_params {sorted(params)} have no effect without search_alg; name one, "
                "such as 'optuna'"
            )
        return create_sampler("Random", seed=seed)
    if _is_of(search_alg, "optuna"):
        return create_sampler(search_alg)
    name = _lowered(search_alg)
    if name in _SAMPLERS:
        return create_sampler(_SAMPLERS[name], **{"seed": seed, **params})
    return None


def pruner_of(scheduler: Any, params: Mapping[str, Any] | None, epochs: int) -> Any:
    """The pruner of Optuna that does what a scheduler of Ray does.

    Raises
    ------
    UsageError
        For a scheduler that Optuna has no pruner for, or a parameter that its pruner has not.
    """
    from bigdl.tuning import create_pruner

    params = dict(params or {})
    if scheduler is not None and _is_of(scheduler, "optuna"):
        return create_pruner(scheduler)
    kind = "fifo" if scheduler is None else _SCHEDULERS.get(_lowered(scheduler))
    if kind is None:
        raise UsageError(
            f"scheduler {_shown(scheduler)} needs backend='ray'; backend='local' has "
            f"{', '.join(sorted(_SCHEDULERS))} and the pruners of Optuna"
        )
    for name in ("time_attr", "metric", "mode"):  # there is one of each only
        params.pop(name, None)
    longest = params.pop("max_t", epochs)
    if kind == "asha":
        params.pop(_FINALISTS, None)
        params = {**_asha_defaults(longest), **params}
    grace, factor = params.pop("grace_period", 1), params.pop("reduction_factor", None)
    if kind == "asha":
        given = {"min_resource": grace, "reduction_factor": factor}
        found = create_pruner("SuccessiveHalving", **given)
    elif kind == "hyperband":
        given = {"min_resource": grace, "max_resource": longest, "reduction_factor": factor or 3}
        found = create_pruner("HyperBand", **given)
    elif kind == "median":
        startup = params.pop("min_samples_required", 3)
        found = create_pruner("Median", n_startup_trials=startup, n_warmup_steps=grace)
    else:
        found = create_pruner(None)
    if params:
        raise UsageError(
            f"scheduler_params of backend='local' has no {', '.join(map(repr, sorted(params)))}; "
            "it has grace_period, reduction_factor, max_t and min_samples_required, where the "
            "scheduler uses them"
        )
    return found


def scheduler_of(scheduler: Any, params: Mapping[str, Any] | None, epochs: int) -> Any:
    """The scheduler of Ray Tune of a name.

    Raises
    ------
    UsageError
        If there is none, or it does not take the parameters.
    """
    from ray import tune
    from ray._common.utils import get_function_args
    from ray.tune.schedulers import SCHEDULER_IMPORT, TrialScheduler

    if scheduler is None or isinstance(scheduler, TrialScheduler):
        if params:
            raise UsageError(
                f"scheduler_params {sorted(params)} have no effect without the name of a "
                "scheduler, such as 'AsyncHyperBand'"
            )
        return scheduler
    name = {"asha": "asynchyperband"}.get(_lowered(scheduler), _lowered(scheduler))
    if name not in SCHEDULER_IMPORT:
        raise UsageError(
            f"scheduler must be one of {', '.join(sorted(SCHEDULER_IMPORT))}, or an object of "
            f"ray.tune, got {_shown(scheduler)}"
        )
    # the goal of the search, which Tune tells the scheduler itself
    ours = {"metric", "mode"} | ({_FINALISTS} if _SCHEDULERS.get(name) == "asha" else set())
    params = {k: v for k, v in dict(params or {}).items() if k not in ours}
    taken = get_function_args(SCHEDULER_IMPORT[name])
    unknown = [key for key in params if key not in taken]
    if unknown:
        raise UsageError(
            f"scheduler {scheduler!r} has no parameter {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(sorted(set(taken) - {'self', 'metric', 'mode'}))}"
        )
    # in epochs, where some of Ray's count seconds
    every = {
        "time_attr": "training_iteration",
        "max_t": epochs,
        "grace_period": 1,
        "perturbation_interval": max(1, epochs // 4),
    }
    if _SCHEDULERS.get(name) == "asha":
        every.update(_asha_defaults(params.get("max_t", epochs)))
    params = {**{key: value for key, value in every.items() if key in taken}, **params}
    try:
        return tune.create_scheduler(name, **params)
    except (AssertionError, TypeError, ValueError, tune.TuneError) as error:
        raise UsageError(
            f"scheduler {scheduler!r} cannot be made of {params!r}: {error}"
        ) from error


def _asha_defaults(longest) -> dict[str, int]:
    """Of ASHA's parameters for trials of so many epochs."""
    grace = max(1, longest // _GRACE_PART) if isinstance(longest, int) else 1
    return {"grace_period": grace, "reduction_factor": _REDUCTION}


def foreign_searcher(search_alg: Any, params: Mapping[str, Any] | None, space, goal) -> Any:
    """A searcher of Ray Tune over the draws of a search space.

    Raises
    ------
    UsageError
        If there is none of this name, its package is missing, or it cannot use the space.
    """
    from ray import tune
    from ray.tune.search import SEARCH_ALG_IMPORT, Searcher

    from bigdl.orca.automl.search.ray_domains import to_ray

    if not goal.is_single:
        raise UsageError(
            f"search_alg {_shown(search_alg)} has one metric; for several use 'nsga2' or 'optuna'"
        )
    if space.grids:
        raise UsageError(
            f"search_alg {_shown(search_alg)} cannot use hp.grid_search; use hp.choice, or leave "
            "search_alg out"
        )
    domains: dict[str, Any] = {}
    for path, domain in space.domains.items():
        domains.update(to_ray(path, domain))
    if isinstance(search_alg, Searcher):
        search_alg.set_search_properties(goal.first.name, goal.first.mode, domains)
        return search_alg
    name = _lowered(search_alg)
    if name not in SEARCH_ALG_IMPORT:
        names = sorted({*SEARCH_ALG_IMPORT, *_SAMPLERS})
        raise UsageError(
            f"search_alg must be one of {', '.join(names)}, or an object of ray.tune or Optuna, "
            f"got {_shown(search_alg)}"
        )
    try:
        made = tune.create_searcher(name, **(params or {}))
        made.set_search_properties(goal.first.name, goal.first.mode, domains)
        return made
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        raise UsageError(
            f"search_alg {search_alg!r} cannot be used: {error}; 'optuna' needs no further package"
        ) from error


def _lowered(value) -> str:
    return value.lower() if isinstance(value, str) else ""


def _is_of(value, package: str) -> bool:
    return any(c.__module__.partition(".")[0] == package for c in type(value).__mro__)


def _shown(value) -> str:
    return repr(value) if isinstance(value, str) else type(value).__name__
