"""Search algorithms and schedulers by the names that BigDL and Ray use.

Ray is imported only if an object of Ray is used, so a local search does not need Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError
from bigdl.tuning import create_pruner, create_sampler
from bigdl.tuning.spaces import (
    Choice,
    GridSearch,
    Normal,
    Number,
    SampleFrom,
    SearchSpace,
    distributions,
)

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from ray.tune.schedulers import TrialScheduler
    from ray.tune.search import Searcher
    from ray.tune.search.sample import Domain

    from bigdl.orca.automl.trial import SearchGoal

_RANDOM = ("random", "variant_generator")
_SAMPLERS = {
    "optuna": "TPE",
    "tpe": "TPE",
    "cmaes": "CmaEs",
    "nsga2": "NSGAII",
    "nsgaii": "NSGAII",
}
# the Optuna pruner for each Ray scheduler, and the pruner's names of Ray's parameters
_GRACE, _FACTOR, _SAMPLES = "grace_period", "reduction_factor", "min_samples_required"
_Pruner = tuple[str, dict[str, str]]
_ASHA: _Pruner = "SuccessiveHalving", {_GRACE: "min_resource", _FACTOR: _FACTOR}
_MEDIAN: _Pruner = "Median", {_GRACE: "n_warmup_steps", _SAMPLES: "n_startup_trials"}
_HYPERBAND: _Pruner = "HyperBand", {**_ASHA[1], "max_t": "max_resource"}
_SCHEDULERS: dict[str, _Pruner] = {
    "asha": _ASHA,
    "asynchyperband": _ASHA,
    "async_hyperband": _ASHA,
    "median_stopping_rule": _MEDIAN,
    "medianstopping": _MEDIAN,
    "hyperband": _HYPERBAND,
    "fifo": ("Nop", {}),
}
_FINALISTS = "finalists"
# Ray's ASHA compares trials after one epoch and keeps one of four. That suits thousands of trials,
# but with 20 trials it often stops the best one. These values need half of the epochs of full
# trials and rarely stop the best one (benchmarks/automl.py, on two problems).
_GRACE_PART = 9
_REDUCTION = 2
_FINALIST_PART = 0.1


@dataclass(frozen=True)
class Strategy:
    """Search algorithm and scheduler as the user specified them; see ``AutoEstimator.fit``."""

    search_alg: Any = None
    search_alg_params: Mapping[str, Any] | None = None
    scheduler: Any = None
    scheduler_params: Mapping[str, Any] | None = None

    @property
    def is_random(self) -> bool:
        """True if all configurations are drawn at random before the search."""
        return self.search_alg is None or _lower(self.search_alg) in _RANDOM

    @property
    def algorithm(self) -> str:
        """Name of the search algorithm."""
        return "random" if self.is_random else _describe(self.search_alg).strip("'")

    @property
    def _is_asha(self) -> bool:
        return _SCHEDULERS.get(_lower(self.scheduler)) is _ASHA

    def _params(self, epochs: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the scheduler's parameters that the user passed, and their defaults.

        Defaults are in epochs, where some of Ray's are in seconds.
        """
        params = dict(self.scheduler_params or {})
        defaults = {
            "time_attr": "training_iteration",
            "max_t": epochs,
            _GRACE: 1,
            _FACTOR: 3,
            _SAMPLES: 3,
            "perturbation_interval": max(1, epochs // 4),
        }
        if self._is_asha:
            params.pop(_FINALISTS, None)
            longest = params.get("max_t", epochs)
            grace = max(1, longest // _GRACE_PART) if isinstance(longest, int) else 1
            defaults |= {_GRACE: grace, _FACTOR: _REDUCTION}
        return params, defaults

    def sampler(self, seed: int, on_ray: bool) -> BaseSampler | None:
        """Return the Optuna sampler of the search algorithm, or None if only Ray has the algorithm.

        Raises
        ------
        UsageError
            If the sampler rejects the parameters, or the algorithm needs Ray.
        """
        params = dict(self.search_alg_params or {})
        if self.is_random:
            if params:
                raise UsageError(
                    f"search_alg_params {sorted(params)} have no effect without search_alg; pass "
                    "search_alg, such as 'optuna'",
                    code="argument-conflict",
                    argument="search_alg_params",
                )
            return create_sampler("Random", seed=seed)
        if _is_of(self.search_alg, "optuna"):
            return create_sampler(self.search_alg)
        name = _SAMPLERS.get(_lower(self.search_alg))
        if name is not None:
            return create_sampler(name, **{"seed": seed, **params})
        if on_ray:
            return None
        raise UsageError(
            f"search_alg {self.algorithm!r} needs backend='ray'; backend='local' supports "
            "'random', 'optuna', 'cmaes', 'nsga2' and the samplers of Optuna",
            code="unsupported",
            argument="search_alg",
        )

    def pruner(self, epochs: int) -> BasePruner:
        """Return the Optuna pruner that corresponds to the scheduler.

        Raises
        ------
        UsageError
            If no pruner corresponds to the scheduler, or the pruner lacks a parameter.
        """
        if self.scheduler is not None and _is_of(self.scheduler, "optuna"):
            return create_pruner(self.scheduler)
        name = "fifo" if self.scheduler is None else _lower(self.scheduler)
        if name not in _SCHEDULERS:
            raise UsageError(
                f"scheduler {_describe(self.scheduler)} needs backend='ray'; backend='local' "
                f"supports {', '.join(sorted(_SCHEDULERS))} and the pruners of Optuna",
                code="unsupported",
                argument="scheduler",
            )
        pruner, names = _SCHEDULERS[name]
        params, defaults = self._params(epochs)
        unknown = sorted(set(params) - {*names, "max_t", "time_attr", "metric", "mode"})
        if unknown:
            raise UsageError(
                f"scheduler_params of backend='local' has no {', '.join(map(repr, unknown))}; it "
                "has grace_period, reduction_factor, max_t and min_samples_required, if the "
                "scheduler uses them",
                code="argument-unknown",
                argument="scheduler_params",
            )
        values = {**defaults, **params}
        return create_pruner(
            pruner, **{optuna_name: values[name] for name, optuna_name in names.items()}
        )

    def finalists(self, trials: int) -> int:
        """Return how many early-stopped trials are trained to the end.

        Parameters
        ----------
        trials : int
            Number of trials of the search.

        Raises
        ------
        UsageError
            If the scheduler's parameter ``finalists`` is not a number of trials.
        """
        if not self._is_asha:
            return 0
        count = (self.scheduler_params or {}).get(_FINALISTS)
        if count is None:
            return round(_FINALIST_PART * trials)
        return check_integer("finalists in scheduler_params", count, 0)

    def ray_scheduler(self, epochs: int) -> TrialScheduler | None:
        """Create the scheduler of Ray Tune.

        Raises
        ------
        UsageError
            If the name is unknown, or the scheduler rejects the parameters.
        """
        from ray import tune
        from ray._common.utils import get_function_args
        from ray.tune.schedulers import SCHEDULER_IMPORT, TrialScheduler

        scheduler, (params, defaults) = self.scheduler, self._params(epochs)
        if scheduler is None or isinstance(scheduler, TrialScheduler):
            if params:
                raise UsageError(
                    f"scheduler_params {sorted(params)} have no effect without the name of a "
                    "scheduler, such as 'AsyncHyperBand'",
                    code="argument-conflict",
                    argument="scheduler_params",
                )
            return scheduler
        name = {"asha": "asynchyperband"}.get(_lower(scheduler), _lower(scheduler))
        if name not in SCHEDULER_IMPORT:
            raise UsageError(
                f"scheduler must be one of {', '.join(sorted(SCHEDULER_IMPORT))}, or an object of "
                f"ray.tune, got {_describe(scheduler)}",
                code="name-unknown",
                argument="scheduler",
                allowed=list(SCHEDULER_IMPORT),
            )
        for common in ("metric", "mode"):  # Tune passes the search's metric and mode
            params.pop(common, None)
        accepted = get_function_args(SCHEDULER_IMPORT[name])
        unknown = [key for key in params if key not in accepted]
        if unknown:
            raise UsageError(
                f"scheduler {scheduler!r} has no parameter {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(sorted(set(accepted) - {'self', 'metric', 'mode'}))}",
                code="argument-unknown",
                argument="scheduler_params",
            )
        params = {**{key: value for key, value in defaults.items() if key in accepted}, **params}
        try:
            return tune.create_scheduler(name, **params)
        except (AssertionError, TypeError, ValueError, tune.TuneError) as error:
            raise UsageError(
                f"scheduler {scheduler!r} rejects the parameters {params!r}: {error}",
                code="argument-value",
                argument="scheduler_params",
            ) from error

    def ray_searcher(self, space: SearchSpace, goal: SearchGoal) -> Searcher | None:
        """Create the searcher of Ray Tune; return None for random search and Optuna samplers.

        Raises
        ------
        UsageError
            If the name is unknown, its package is missing, or it does not support the space.
        """
        if self.sampler(0, True) is not None:
            return None
        from ray import tune
        from ray.tune.search import SEARCH_ALG_IMPORT, Searcher

        search_alg, text = self.search_alg, _describe(self.search_alg)
        if not goal.is_single:
            raise UsageError(
                f"search_alg {text} supports one metric; for several use 'nsga2' or 'optuna'",
                code="argument-conflict",
                argument="search_alg",
            )
        if space.grids:
            raise UsageError(
                f"search_alg {text} does not support hp.grid_search; use hp.choice, or omit "
                "search_alg",
                code="argument-conflict",
                argument="search_alg",
            )
        drawn = space.drawn_parameters.items()
        domains = {_ray_name(name): _to_ray(distribution) for name, distribution in drawn}
        if isinstance(search_alg, Searcher):
            search_alg.set_search_properties(goal.first.name, goal.first.mode, domains)
            return search_alg
        name = _lower(search_alg)
        if name not in SEARCH_ALG_IMPORT:
            names = sorted({*SEARCH_ALG_IMPORT, *_SAMPLERS})
            raise UsageError(
                f"search_alg must be one of {', '.join(names)}, or an object of ray.tune or "
                f"Optuna, got {text}",
                code="name-unknown",
                argument="search_alg",
                allowed=list(names),
            )
        try:
            searcher = tune.create_searcher(name, **(self.search_alg_params or {}))
            searcher.set_search_properties(goal.first.name, goal.first.mode, domains)
            return searcher
        except (AssertionError, ImportError, TypeError, ValueError) as error:
            raise UsageError(
                f"search_alg {search_alg!r} cannot be used: {error}; 'optuna' needs no extra "
                "package",
                code="package-missing",
                argument="search_alg",
            ) from error


def _lower(value: object) -> str:
    return value.lower() if isinstance(value, str) else ""


def _is_of(value: object, package: str) -> bool:
    return any(c.__module__.partition(".")[0] == package for c in type(value).__mro__)


def _describe(value: object) -> str:
    return repr(value) if isinstance(value, str) else type(value).__name__


# Domains of ray.tune -----------------------------------------------------------------------------


def from_ray(value: Any) -> object:  # value: any value
    """Convert a ``ray.tune`` domain to a BigDL search space; return other values unchanged.

    Raises
    ------
    UsageError
        If the domain has no equivalent.
    """
    if isinstance(value, Mapping) and set(value) == {"grid_search"}:
        return GridSearch(value["grid_search"])
    if not type(value).__module__.startswith("ray.tune.search"):
        return value
    from ray.tune.search import sample

    if isinstance(value, sample.Function):
        return SampleFrom(value.func)
    if isinstance(value, sample.Categorical):
        return Choice(value.categories)
    sampler: Any = value.get_sampler()
    q = None
    if isinstance(sampler, sample.Quantized):
        sampler, q = sampler.sampler, sampler.q
    if isinstance(sampler, sample.Normal):
        return Normal(sampler.mean, sampler.sd, q=q)
    log = isinstance(sampler, sample.LogUniform)
    if isinstance(value, sample.Integer):
        # the upper bound of Ray's integers is inclusive only with steps
        upper = value.upper if q is not None else value.upper - 1
        return Number(value.lower, upper, q=q, log=log, whole=True)
    if isinstance(value, sample.Float) and isinstance(sampler, sample.Uniform | sample.LogUniform):
        return Number(value.lower, value.upper, q=q, log=log)
    raise UsageError(
        f"search_space contains {value!r}, which is not supported; use bigdl.orca.automl.hp",
        code="search-space",
    )


def _to_ray(distribution: Any) -> Domain:
    """Convert a parameter's Optuna distribution to a ``ray.tune`` domain."""
    from ray import tune

    if isinstance(distribution, distributions.CategoricalDistribution):
        return tune.choice(list(distribution.choices))
    low, high = distribution.low, distribution.high
    if isinstance(distribution, distributions.IntDistribution):
        return (tune.lograndint if distribution.log else tune.randint)(low, high + 1)
    return (tune.loguniform if distribution.log else tune.uniform)(low, high)


def parameters_from_ray(space: SearchSpace, suggested: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a Ray searcher's suggestion to Python numbers, by parameter name."""
    return {
        name: distribution.to_external_repr(
            distribution.to_internal_repr(suggested[_ray_name(name)])
        )
        for name, distribution in space.drawn_parameters.items()
    }


def _ray_name(name: str) -> str:
    """Replace slashes in a parameter name, because Ray treats them as nested dicts."""
    return name.replace("/", "|")
