"""Optuna samplers, pruners and studies for a search, created by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from bigdl.nano.searchable import suggested
from bigdl.tuning import (
    PrunerType,
    SamplerType,
    create_pruner,
    create_sampler,
    open_study,
)

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial

T = TypeVar("T")

__all__ = ["OptunaBackend", "PrunerType", "SamplerType", "create_hpo_backend"]


class OptunaBackend:
    """Factory of the Optuna components of a search.

    Examples
    --------
    >>> from bigdl.nano.automl.hpo.backend import OptunaBackend, SamplerType
    >>> sampler = OptunaBackend.create_sampler(SamplerType.Random, {"seed": 0})
    >>> study = OptunaBackend.create_study(direction="maximize", sampler=sampler)
    >>> study.optimize(lambda trial: -((trial.suggest_float("x", -1, 1) - 0.5) ** 2), n_trials=20)
    >>> abs(study.best_params["x"] - 0.5) < 0.1
    True
    """

    @staticmethod
    def create_sampler(
        sampler_type: str = SamplerType.TPE, kwargs: Mapping[str, Any] | None = None
    ) -> BaseSampler:
        """Return a sampler; see :func:`bigdl.tuning.create_sampler`."""
        return create_sampler(sampler_type, **(kwargs or {}))

    @staticmethod
    def create_pruner(
        pruner_type: str = PrunerType.Nop, kwargs: Mapping[str, Any] | None = None
    ) -> BasePruner:
        """Return a pruner; see :func:`bigdl.tuning.create_pruner`."""
        return create_pruner(pruner_type, **(kwargs or {}))

    @staticmethod
    def create_study(
        *,
        direction: str = "minimize",
        directions: list[str] | None = None,
        study_name: str | None = None,
        load_if_exists: bool = False,
        **kwargs: Any,  # of open_study
    ) -> Study:
        """Return a study; see :func:`bigdl.tuning.open_study`."""
        return open_study(
            name=study_name, directions=directions or [direction], resume=load_if_exists, **kwargs
        )

    @staticmethod
    def instantiate(trial: Trial, obj: T) -> T:
        """Replace the search spaces in an object with the suggestions of a trial.

        Parameters
        ----------
        trial : optuna.trial.Trial
        obj : object
            An AutoObject, a space, or a container of them.
        """
        return suggested(obj, trial)


def create_hpo_backend() -> OptunaBackend:
    """Return an :class:`OptunaBackend`, which creates the components of a search.

    Examples
    --------
    >>> from bigdl.nano.automl.hpo.backend import create_hpo_backend
    >>> type(create_hpo_backend().create_pruner("median")).__name__
    'MedianPruner'
    """
    return OptunaBackend()
