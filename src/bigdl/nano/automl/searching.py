"""Searches of PyTorch and Keras models: arguments, studies, summaries."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.nano.automl.hpo.objects import spaces_in, with_config
from bigdl.tuning import SamplerType, create_pruner, create_sampler, open_study, run_trials

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

_OF_STUDY = (
    *("storage", "study_name", "load_if_exists", "direction", "directions"),
    *("sampler", "sampler_kwargs", "pruner", "pruner_kwargs"),
)
_OF_RUN = (
    *("n_trials", "timeout", "n_jobs", "catch"),
    *("tune_callbacks", "gc_after_trial", "show_progress_bar"),
)


@dataclass
class SearchArguments:
    """The keywords of a search, sorted by whom they are for.

    Attributes
    ----------
    study, run, rest : dict
        For the study, for the run of trials, and for the training.
    """

    study: dict[str, Any]
    run: dict[str, Any]
    rest: dict[str, Any]

    @classmethod
    def of(cls, keywords: Mapping[str, Any], of_training: Collection[str]) -> SearchArguments:
        """Return keywords sorted.

        Raises
        ------
        UsageError
            If one is for nobody.
        """
        unknown = sorted(set(keywords) - {*_OF_STUDY, *_OF_RUN, *of_training})
        if unknown:
            known = ", ".join(sorted({*_OF_STUDY, *_OF_RUN, *of_training}))
            raise UsageError(
                f"Invalid Arguments found for 'search': {', '.join(unknown)}; it takes {known}"
            )
        parts = (_OF_STUDY, _OF_RUN, of_training)
        return cls(*({k: v for k, v in keywords.items() if k in names} for names in parts))

    def directions(self, metrics: Sequence[str]) -> list[str]:
        """Return the direction of each metric.

        Raises
        ------
        UsageError
            If several metrics have no direction each.
        """
        single, several = self.study.get("direction"), self.study.get("directions")
        if single is not None and several is not None:
            raise UsageError("Give direction for one metric or directions for several, not both")
        if several is None:
            several = ["minimize" if single is None else single] if len(metrics) == 1 else []
        if len(several) != len(metrics):
            raise UsageError(
                "In multi-objective optimization, you must explicitly specify the direction for "
                f"each metric: {list(metrics)} need {len(metrics)} directions, but there are "
                f"{list(several)}"
            )
        return list(several)


class Searcher(abc.ABC):
    """An object that searches, in every framework, and keeps the study of its last search.

    Attributes
    ----------
    study : optuna.Study or None
        Of the last search.
    """

    def __init__(self) -> None:
        self._study: Study | None = None

    @property
    def study(self) -> Study | None:
        return self._study

    @abc.abstractmethod
    def end_search(self, use_trial_id: int = -1) -> Any:
        """Make the model of a trial, not trained.

        Parameters
        ----------
        use_trial_id : int
            Number of the trial; -1 is the best one.

        Returns
        -------
        LightningModule or keras.Model
            An object that stands for a Keras model is this one from now on.

        Raises
        ------
        UsageError
            If nothing was searched, or there is no such trial.
        """

    def search_summary(self) -> Study:
        """Print the number of trials and the best of them.

        Raises
        ------
        UsageError
            If nothing was searched.
        """
        study = self._searched()
        print(f"Number of finished trials: {len(study.trials)}")
        if len(study.directions) == 1:
            print("Best trial:")
            _print_trial(study, self._trial(-1))
        else:
            print(f"Trials that no other is better than in everything: {len(study.best_trials)}")
            for trial in study.best_trials:
                _print_trial(study, trial)
        return study

    def _run(
        self,
        objective: Callable[[Any], Any],
        subject: Any,
        arguments: SearchArguments,
        metrics: Sequence[str],
        *,
        resume: bool,
        n_parallels: int,
    ) -> None:
        """Make the study of a search, or go on with one, and run its trials.

        Parameters
        ----------
        objective : callable
        subject : object
            Holds the spaces.
        arguments : SearchArguments
        metrics : sequence of str
            Names of the figures that trials return.
        resume : bool
            Go on with the study of that name in the storage, or with that of the last search where
            there is no storage.
        n_parallels : int
            Processes that run trials.
        """
        spaces = spaces_in(subject)
        if not spaces:
            raise UsageError(
                "There is no search space in the arguments of the model: give it some of "
                "bigdl.nano.automl.hpo.space, for example space.Int(8, 64) as the size of a layer"
            )
        wanted, run = arguments.study, dict(arguments.run)
        directions = arguments.directions(metrics)
        options = dict(wanted.get("sampler_kwargs") or {})
        if str(wanted.get("sampler")).lower() == SamplerType.Grid.lower():
            options.setdefault("search_space", {name: space.grid for name, space in spaces.items()})
        sampler = create_sampler(wanted.get("sampler"), **options)
        pruner = create_pruner(wanted.get("pruner"), **(wanted.get("pruner_kwargs") or {}))
        goes_on = resume and wanted.get("storage") is None
        if goes_on and self._study is not None:
            _check_directions(self._study, directions)
            if wanted.get("sampler") is not None:
                self._study.sampler = sampler
            if wanted.get("pruner") is not None:
                self._study.pruner = pruner
        else:
            if goes_on:
                warnings.warn(
                    "There is no search to resume: this process has not searched yet, and no "
                    "storage is given. A new search begins",
                    stacklevel=4,
                )
            self._study = open_study(
                storage=wanted.get("storage"),
                name=wanted.get("study_name"),
                directions=directions,
                sampler=sampler,
                pruner=pruner,
                resume=bool(resume or wanted.get("load_if_exists")),
                metric_names=list(metrics),
            )
        run_trials(
            self._study,
            objective,
            run.pop("n_trials", None),
            processes=n_parallels,
            threads=run.pop("n_jobs", 1),
            callbacks=run.pop("tune_callbacks", None) or (),
            **run,
        )

    def _best(self, subject: Any, trial_id: int = -1) -> Any:
        """Return the subject of the search with the parameters of a trial; -1 is the best one.

        Raises
        ------
        UsageError
            If there is no such trial.
        """
        return with_config(subject, self._trial(trial_id).params)

    def _searched(self) -> Study:
        if self._study is None:
            raise UsageError("Nothing was searched yet; call search first")
        return self._study

    def _trial(self, trial_id: int) -> FrozenTrial:
        study = self._searched()
        trials = study.get_trials(deepcopy=False)
        if trial_id != -1:
            if not 0 <= trial_id < len(trials):
                raise UsageError(
                    f"There is no trial {trial_id}; the search has trials 0 to {len(trials) - 1}"
                )
            return trials[trial_id]
        if len(study.directions) > 1:
            raise UsageError(
                "A search for several metrics has no single best trial; choose one of "
                "study.best_trials and pass its number as use_trial_id"
            )
        if not any(trial.state.name == "COMPLETE" for trial in trials):
            raise UsageError("No trial has finished, so there is no best one")
        return study.best_trial


def _check_directions(study: Study, directions: list[str]) -> None:
    """Refuse to go on with a study of other directions."""
    last = [direction.name.lower() for direction in study.directions]
    if last != [str(direction).lower() for direction in directions]:
        raise UsageError(
            f"The last search had the directions {last}, so it cannot go on with {directions}; "
            "leave out resume"
        )


def _print_trial(study: Study, trial: FrozenTrial) -> None:
    names = study.metric_names or ["value"]
    figures = ", ".join(
        f"{name} {figure:g}" for name, figure in zip(names, trial.values, strict=True)
    )
    print(f"  Trial {trial.number}: {figures}")
    print("  Params:")
    for name, value in trial.params.items():
        print(f"    {name}: {value}")
