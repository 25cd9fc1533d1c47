"""Hyper-parameter searches of PyTorch and Keras models: arguments, studies, summaries."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError, user_stacklevel
from bigdl.nano.searchable import spaces_in
from bigdl.tuning import (
    SamplerType,
    create_pruner,
    create_sampler,
    open_study,
    optimize,
    run_trials,
)

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

_OF_STUDY = (
    *("storage", "study_name", "load_if_exists", "direction", "directions"),
    *("sampler", "sampler_kwargs", "pruner", "pruner_kwargs"),
)
_OF_OPTUNA = ("timeout", "catch", "gc_after_trial", "show_progress_bar")
_OF_RUN = ("n_trials", "n_jobs", "tune_callbacks", "backend", *_OF_OPTUNA)


def split_arguments(
    keywords: Mapping[str, Any], of_training: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the keywords of a search into study and trial arguments, and training arguments.

    Raises
    ------
    UsageError
        If a keyword is unknown.
    """
    known = {*_OF_STUDY, *_OF_RUN, *of_training}
    unknown = sorted(set(keywords) - known)
    if unknown:
        raise UsageError(
            f"Invalid Arguments found for 'search': {', '.join(unknown)}; it takes "
            f"{', '.join(sorted(known))}",
            code="argument-unknown",
            argument=unknown[0],
            allowed=list(known),
        )
    training = {name: value for name, value in keywords.items() if name in of_training}
    return {k: v for k, v in keywords.items() if k not in training}, training


def directions_of(options: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, str]:
    """Return ``"minimize"`` or ``"maximize"`` for each metric, from the options of a search.

    Raises
    ------
    UsageError
        If several metrics do not have one direction each.
    """
    single, several = options.get("direction"), options.get("directions")
    if single is not None and several is not None:
        raise UsageError(
            "Pass direction for one metric or directions for several, not both",
            code="argument-conflict",
            argument="direction",
        )
    if several is None:
        several = ["minimize" if single is None else single] if len(metrics) == 1 else []
    if len(several) != len(metrics):
        raise UsageError(
            "In multi-objective optimization, you must explicitly specify the direction for "
            f"each metric: {list(metrics)} need {len(metrics)} directions, but there are "
            f"{list(several)}",
            code="argument-missing",
            argument="directions",
        )
    return dict(zip(metrics, several, strict=True))


class Searcher(abc.ABC):
    """Base class of models and trainers that run a search and keep the last search's study.

    Attributes
    ----------
    study : optuna.Study or None
        Study of the last search.
    """

    study: Study | None = None

    @abc.abstractmethod
    def end_search(self, use_trial_id: int = -1) -> Any:  # the framework's model
        """Build the untrained model of a trial.

        Parameters
        ----------
        use_trial_id : int
            Number of the trial; -1 is the best one.

        Returns
        -------
        LightningModule or keras.Model
            A searchable Keras model delegates to it from now on.

        Raises
        ------
        UsageError
            If nothing was searched, or there is no such trial.
        """

    def search_summary(self) -> Study:
        """Print the number of trials and the best trials.

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
            print(f"Pareto-optimal trials: {len(study.best_trials)}")
            for trial in study.best_trials:
                _print_trial(study, trial)
        return study

    def _run(
        self,
        objective: Any,
        directions: Mapping[str, str],
        options: Mapping[str, Any],
        resume: bool,
        n_parallels: int,
    ) -> None:
        """Open or resume the study of a search, and run its trials.

        Parameters
        ----------
        objective : callable
            Objective with the search spaces in its ``subject``.
        directions : mapping of str to str
            ``"minimize"`` or ``"maximize"`` for each metric that trials return.
        options : mapping
            Keywords from :func:`split_arguments`.
        resume : bool
            Resume the study of that name in the storage, or without a storage the study of the
            last search.
        n_parallels : int
            Number of processes that run trials.
        """
        spaces = spaces_in(objective.subject)
        if not spaces:
            raise UsageError(
                "There is no search space in the arguments of the model: pass some of "
                "bigdl.nano.automl.hpo.space, for example space.Int(8, 64) as the size of a layer",
                code="search-space",
            )
        sampler, pruner = options.get("sampler"), options.get("pruner")
        sampler_options = dict(options.get("sampler_kwargs") or {})
        if str(sampler).lower() == SamplerType.Grid.lower():
            sampler_options["search_space"] = _grid(spaces, sampler_options.get("search_space"))
        storage, name, last = options.get("storage"), options.get("study_name"), self.study
        if resume and storage is None:
            if last is None:
                warnings.warn(
                    "There is no search to resume: this process has not searched yet, and there is "
                    "no storage. Starting a new search",
                    stacklevel=user_stacklevel(),
                )
            else:
                storage, name = last._storage, last.study_name
                sampler, pruner = sampler or last.sampler, pruner or last.pruner
        self.study = open_study(
            storage=storage,
            name=name,
            directions=list(directions.values()),
            sampler=create_sampler(sampler, **sampler_options),
            pruner=create_pruner(pruner, **(options.get("pruner_kwargs") or {})),
            resume=bool(resume or options.get("load_if_exists")),
            metric_names=list(directions),
        )
        backend = options.get("backend")
        if backend is not None:
            _optimize(self.study, objective, backend, n_parallels, options)
            return
        run_trials(
            self.study,
            objective,
            options.get("n_trials"),
            processes=n_parallels,
            threads=options.get("n_jobs", 1),
            callbacks=options.get("tune_callbacks") or (),
            **{key: options[key] for key in _OF_OPTUNA if key in options},
        )

    def _searched(self) -> Study:
        if self.study is None:
            raise UsageError("Nothing was searched yet; call search first", code="not-fitted")
        return self.study

    def _trial(self, trial_id: int) -> FrozenTrial:
        study = self._searched()
        trials = study.get_trials(deepcopy=False)
        if trial_id != -1:
            if not 0 <= trial_id < len(trials):
                raise UsageError(
                    f"There is no trial {trial_id}; the search has trials 0 to {len(trials) - 1}",
                    code="argument-value",
                    argument="trial_id",
                )
            return trials[trial_id]
        if len(study.directions) > 1:
            raise UsageError(
                "A search for several metrics has no single best trial; choose one of "
                "study.best_trials and pass its number as use_trial_id",
                code="argument-missing",
                argument="use_trial_id",
            )
        if not any(trial.state.name == "COMPLETE" for trial in trials):
            raise UsageError("No trial has finished, so there is no best one", code="search-failed")
        return study.best_trial


def _optimize(
    study: Study,
    objective: Callable[[Trial], Any],
    backend: str,
    concurrency: int,
    options: Mapping[str, Any],
) -> None:
    """Run the trials on the workers of a cluster.

    Raises
    ------
    UsageError
        If an option is not supported there.
    """
    threads, settings = options.get("n_jobs", 1), ("gc_after_trial", "show_progress_bar")
    unsupported = [name for name in settings if options.get(name)]
    if threads != 1 or unsupported:
        raise UsageError(
            f"{(['n_jobs'] if threads != 1 else unsupported)[0]} is not supported with "
            f"backend={backend!r}; pass n_parallels for concurrent trials",
            code="argument-conflict",
            argument="backend",
        )
    optimize(
        study,
        objective,
        options.get("n_trials"),
        backend=backend,
        concurrency=concurrency if concurrency > 1 else None,
        timeout=options.get("timeout"),
        catch=options.get("catch", ()),
        callbacks=options.get("tune_callbacks") or (),
    )


def _grid(spaces: Mapping[str, Any], user_grid: object) -> dict[str, list[Any]]:
    """Return the values of each search space in a grid search.

    Parameters
    ----------
    spaces : mapping of str to Space
    user_grid : mapping of str to list, optional
        The user's ``sampler_kwargs["search_space"]``. Default: all options of each space.

    Raises
    ------
    UsageError
        If `user_grid` has other parameters than the spaces, or is no mapping.
    """
    if user_grid is None:
        return {name: space.grid for name, space in spaces.items()}
    if not isinstance(user_grid, Mapping) or set(user_grid) != set(spaces):
        listed = sorted(user_grid) if isinstance(user_grid, Mapping) else repr(user_grid)
        raise UsageError(
            f"search_space of the Grid sampler must hold a list of values for each of "
            f"{sorted(spaces)}, got {listed}",
            code="search-space",
            argument="search_space",
        )
    return {name: list(values) for name, values in user_grid.items()}


def _print_trial(study: Study, trial: FrozenTrial) -> None:
    names = study.metric_names or ["value"]
    values = ", ".join(f"{name} {value:g}" for name, value in zip(names, trial.values, strict=True))
    print(f"  Trial {trial.number}: {values}")
    print("  Params:")
    for name, value in trial.params.items():
        print(f"    {name}: {value}")
