"""Optuna studies: samplers and pruners by name, storages, tables and crash recovery.

A study is the record of a search. :func:`open_study` creates or resumes a study in memory or in a
database. :func:`create_sampler` creates the sampler, which proposes parameters, and
:func:`create_pruner` the pruner, which ends trials early.

A running trial in a database records the process that runs its search. When a search is resumed, a
trial whose process has ended is marked as failed and queued again with the same parameters. The
same applies to the trial of a killed process in a search with several processes. A trial is queued
again once: if it kills its process twice, the trial is the cause. Processes on other machines
cannot be checked, so their trials stay unchanged.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bigdl.common.errors import LazyModule, UsageError, hide_frames, require
from bigdl.common.platform.network import host_name
from bigdl.common.timeouts import CLOCK_STEP_S

if TYPE_CHECKING:
    import pandas as pd
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.study import Study, StudyDirection
    from optuna.trial import FrozenTrial, Trial

MemberT = TypeVar("MemberT", bound=StrEnum)

optuna = LazyModule("optuna", "automl")
psutil = LazyModule("psutil", "automl")

RETRY_OF = "retry_of"
"""User attribute with the number of the lost trial that a trial repeats."""

_PROCESS = "process"
_DESCRIPTION = "search"  # user attribute with the arguments of a search
_DIRECTIONS = ("minimize", "maximize")
_log = logging.getLogger(__name__)


class SamplerType(StrEnum):
    """Names of Optuna samplers.

    ``MOTPE`` is the name in BigDL 2.x for multi-objective search, which TPE now includes.

    Examples
    --------
    >>> from bigdl.tuning import SamplerType
    >>> SamplerType.TPE == "TPE"
    True
    >>> [sampler.value for sampler in SamplerType]
    ['TPE', 'CmaEs', 'Grid', 'Random', 'PartialFixed', 'NSGAII', 'MOTPE']
    """

    TPE = "TPE"
    CmaEs = "CmaEs"
    Grid = "Grid"
    Random = "Random"
    PartialFixed = "PartialFixed"
    NSGAII = "NSGAII"
    MOTPE = "MOTPE"


class PrunerType(StrEnum):
    """Names of Optuna pruners.

    Examples
    --------
    >>> from bigdl.tuning import PrunerType
    >>> [pruner.value for pruner in PrunerType]
    ['HyperBand', 'Median', 'Nop', 'Patient', 'Percentile', 'SuccessiveHalving', 'Threshold']
    """

    HyperBand = "HyperBand"
    Median = "Median"
    Nop = "Nop"
    Patient = "Patient"
    Percentile = "Percentile"
    SuccessiveHalving = "SuccessiveHalving"
    Threshold = "Threshold"


def create_sampler(
    sampler: SamplerType | str | BaseSampler | None = None, **arguments: Any
) -> BaseSampler:
    """Create an Optuna sampler by name.

    Parameters
    ----------
    sampler : SamplerType or str or optuna.samplers.BaseSampler, optional
        Name of the sampler, TPE by default. A sampler object is returned unchanged.
    **arguments
        Arguments of Optuna's class, for example ``seed``. ``Grid`` needs ``search_space``, the
        values of each parameter; ``PartialFixed`` needs ``fixed_params`` and takes
        ``base_sampler``.

    Raises
    ------
    UsageError
        If the name is unknown, or the sampler does not accept the arguments.

    Examples
    --------
    >>> from bigdl.tuning import create_sampler
    >>> type(create_sampler("grid", search_space={"units": [8, 16]})).__name__
    'GridSampler'
    >>> create_sampler("simplex")
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: sampler must be one of 'TPE', 'CmaEs', ...
    """
    if isinstance(sampler, optuna.samplers.BaseSampler):
        return cast("BaseSampler", sampler)
    name = _member(SamplerType, sampler or SamplerType.TPE, "sampler")
    if name is SamplerType.CmaEs:
        require("cmaes", "automl")
    if name is SamplerType.PartialFixed:
        arguments.setdefault("base_sampler", create_sampler())
    return cast(
        "BaseSampler",
        _construct("sampler", "TPE" if name is SamplerType.MOTPE else name, arguments),
    )


def create_pruner(
    pruner: PrunerType | str | BasePruner | None = None, **arguments: Any
) -> BasePruner:
    """Create an Optuna pruner by name.

    Parameters
    ----------
    pruner : PrunerType or str or optuna.pruners.BasePruner, optional
        Name of the pruner; by default trials are not pruned. A pruner object is returned unchanged.
    **arguments
        Arguments of Optuna's class, for example ``n_startup_trials``. ``Patient`` wraps another
        pruner only if ``wrapped_pruner`` is passed.

    Raises
    ------
    UsageError
        If the name is unknown, or the pruner does not accept the arguments.

    Examples
    --------
    >>> from bigdl.tuning import create_pruner
    >>> type(create_pruner("Median", n_startup_trials=3)).__name__
    'MedianPruner'
    """
    if isinstance(pruner, optuna.pruners.BasePruner):
        return cast("BasePruner", pruner)
    name = _member(PrunerType, pruner or PrunerType.Nop, "pruner")
    if name is PrunerType.Patient:
        arguments.setdefault("wrapped_pruner", None)
    return cast(
        "BasePruner",
        _construct("pruner", "Hyperband" if name is PrunerType.HyperBand else name, arguments),
    )


def _member(names: type[MemberT], name: object, argument: str) -> MemberT:
    """Return the enumeration member with a name, ignoring case."""
    for member in names:
        if str(name).lower() == member.lower():
            return member
    known = ", ".join(repr(member.value) for member in names)
    raise UsageError(
        f"{argument} must be one of {known}, or an object of Optuna, not {name!r}",
        code="name-unknown",
        argument=argument,
    )


def _construct(argument: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """Construct the sampler or pruner whose class name begins with `name`."""
    cls = getattr(getattr(optuna, f"{argument}s"), f"{name}{argument.capitalize()}")
    try:
        with without_experimental_warnings():
            return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{argument} {str(name)!r} cannot be created with {dict(arguments)!r}: {error}; see "
            f"optuna's {cls.__name__}",
            code="argument-value",
            argument=argument,
        ) from error


@contextmanager
def raise_log_level(level: int, *names: str) -> Iterator[None]:
    """Temporarily raise the level of loggers to at least `level`."""
    before = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger, usual in before.items():
        logger.setLevel(max(level, usual))
    try:
        yield
    finally:
        for logger, usual in before.items():
            logger.setLevel(usual)


@contextmanager
def without_experimental_warnings() -> Iterator[None]:
    """Context manager that suppresses Optuna's ExperimentalWarning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


@hide_frames
def open_study(
    *,
    storage: str | BaseStorage | None = None,
    name: str | None = None,
    directions: Sequence[str | StudyDirection] = ("minimize",),
    sampler: SamplerType | str | BaseSampler | None = None,
    pruner: PrunerType | str | BasePruner | None = None,
    resume: bool = False,
    metric_names: Sequence[str] | None = None,
) -> Study:
    """Create a study, or resume an existing one.

    Parameters
    ----------
    storage : str or optuna.storages.BaseStorage, optional
        URL of a database, for example ``"sqlite:///search.db"``, or a storage of Optuna. By default
        the study is in memory and ends with the process.
    name : str, optional
        Name of the study in the storage. Without a name, the study gets a new one, or the storage's
        only study is resumed.
    directions : sequence of {"minimize", "maximize"}
        One direction for each metric that the objective returns.
    sampler, pruner : optional
        Sampler and pruner of Optuna; default: TPE and no pruning.
    resume : bool
        Resume the study if the storage has it. Trials of a killed search are marked as failed and
        repeated first, with the same parameters (:func:`recover`).
    metric_names : sequence of str, optional
        Names of the metrics.

    Raises
    ------
    UsageError
        If the study exists without `resume`, if it has other directions, if the storage cannot be
        opened, or if a direction is unknown.

    Examples
    --------
    >>> from bigdl.tuning import open_study, run_trials
    >>> study = open_study(storage="sqlite:///search.db", name="rates", directions=["maximize"])
    >>> run_trials(study, lambda trial: trial.suggest_float("rate", 0, 1), n_trials=2)
    >>> again = open_study(
    ...     storage="sqlite:///search.db", name="rates", directions=["maximize"], resume=True
    ... )
    >>> len(again.trials)
    2
    """
    wanted = [_direction(direction) for direction in directions]
    database = _open(storage) if isinstance(storage, str) else storage
    if resume and name is None and database is not None:
        name = _only_study(database)
    try:
        study = optuna.create_study(
            storage=database,
            study_name=name,
            directions=wanted,
            sampler=create_sampler(sampler),
            pruner=create_pruner(pruner),
            load_if_exists=resume,
        )
    except optuna.exceptions.DuplicatedStudyError as error:
        raise UsageError(
            f"The study {name!r} already exists; pass resume=True to resume it, or choose "
            "another study_name",
            code="path-exists",
            argument="study_name",
        ) from error
    stored = [direction.name.lower() for direction in study.directions]
    if stored != wanted:
        raise UsageError(
            f"The study {study.study_name!r} has the directions {stored}, not {wanted}; choose "
            "another study_name, or leave out resume",
            code="argument-conflict",
            argument="directions",
        )
    lost = recover(study) if resume else []
    if lost:
        name, numbers = study.study_name, ", ".join(map(str, lost))
        _log.warning("The search %r was killed in trial %s, which is repeated", name, numbers)
    if metric_names is not None and study.metric_names != list(metric_names):
        with without_experimental_warnings():
            study.set_metric_names(list(metric_names))
    return cast("Study", study)


def check_description(study: Study, description: Mapping[str, object], search: str) -> None:
    """Record the arguments of a new search, or compare them with those of the resumed search.

    Parameters
    ----------
    study : optuna.Study
    description : dict of str to JSON value
        Arguments that a resumed search must share with the saved search.
    search : str
        Subject of the error message, such as ``"The search in logs/search_00000"``.

    Raises
    ------
    UsageError
        If the study has other arguments, or trials of a search without a description.
    """
    saved = study.user_attrs.get(_DESCRIPTION)
    if saved is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(_DESCRIPTION, dict(description))
        return
    if not isinstance(saved, dict) or not saved.keys() & description.keys():
        raise UsageError(
            f"{search} has trials of another program; choose another storage, or start a new "
            "search without resume",
            code="checkpoint-mismatch",
            argument="resume",
        )
    for key, value in description.items():
        if saved.get(key) != value:
            raise UsageError(
                f"{search} has {key} {saved.get(key)!r}, this one has {value!r}; resume with the "
                "same arguments, or start a new search without resume",
                code="checkpoint-mismatch",
                argument=key,
            )


def trial_table(study: Study) -> pd.DataFrame:
    """Return the trials of a study as a DataFrame with one row per trial.

    Parameters
    ----------
    study : optuna.Study

    Returns
    -------
    DataFrame
        Indexed by the trial's ``number``. The columns are Optuna's ``state``; the metrics under
        their names, or ``value`` without names; the duration in ``seconds``; and each parameter
        under its name, missing if a trial does not have it.

    Examples
    --------
    >>> from bigdl.tuning import create_sampler, open_study, run_trials, trial_table
    >>> sampler = create_sampler("grid", search_space={"units": [8, 16]})
    >>> study = open_study(sampler=sampler, metric_names=["loss"])
    >>> run_trials(study, lambda trial: 4 / trial.suggest_int("units", 8, 16))
    >>> table = trial_table(study)[["state", "loss", "units"]]
    >>> print(table.sort_values("loss").to_string(index=False))
       state  loss  units
    COMPLETE  0.25     16
    COMPLETE  0.50      8
    """
    import pandas as pd

    trials = study.get_trials(deepcopy=False)
    count = len(study.directions)
    unnamed = ["value"] if count == 1 else [f"value_{i}" for i in range(count)]
    metrics = study.metric_names or unnamed
    names = dict.fromkeys(name for trial in trials for name in trial.params)
    rows = [
        {
            "number": trial.number,
            "state": trial.state.name,
            **dict(zip(metrics, trial.values or [None] * count, strict=True)),
            "seconds": None if trial.duration is None else trial.duration.total_seconds(),
            **trial.params,
        }
        for trial in trials
    ]
    columns = ["number", "state", *metrics, "seconds", *names]
    return pd.DataFrame(rows, columns=columns).set_index("number")


def _direction(direction: object) -> str:
    """Normalize a direction to "minimize" or "maximize"."""
    name = getattr(direction, "name", direction)  # also Optuna's enumeration
    if not isinstance(name, str) or name.lower() not in _DIRECTIONS:
        raise UsageError(
            f"A direction must be 'minimize' or 'maximize', not {direction!r}",
            code="argument-value",
            argument="direction",
            allowed=["minimize", "maximize"],
        )
    return name.lower()


def _open(url: str) -> BaseStorage:
    from bigdl.tuning.storage import open_database

    try:
        return open_database(url)
    except Exception as error:  # of SQLAlchemy, the driver of a database, or Optuna
        raise UsageError(
            f"The storage {url!r} cannot be opened: {error}; give a URL such as "
            "'sqlite:///search.db'",
            code="path-unusable",
            argument="storage",
            path=url,
        ) from error


def _only_study(storage: BaseStorage) -> str | None:
    names = optuna.get_all_study_names(storage)
    if len(names) > 1:
        raise UsageError(
            f"The storage has {len(names)} studies ({', '.join(sorted(names))}); select the "
            "study to resume by study_name",
            code="argument-missing",
            argument="study_name",
            allowed=list(names),
        )
    return names[0] if names else None


# Lost trials --------------------------------------------------------------------------------------


def record_process(of: Trial | Study) -> None:
    """Store this process's identity in the trial or study that it runs.

    The record in the study covers trials that ended before they could record their process.
    """
    process = psutil.Process()
    key = _PROCESS if hasattr(of, "number") else f"{_PROCESS} {host_name()} {process.pid}"
    of.set_user_attr(key, [host_name(), process.pid, process.create_time()])


def recover(study: Study) -> list[int]:
    """Mark running trials of dead processes as failed, and queue them again.

    Returns
    -------
    list of int
        Numbers of the lost trials.
    """
    states = optuna.trial.TrialState
    running = study.get_trials(deepcopy=False, states=(states.RUNNING,))
    attrs = study.user_attrs
    runners = [attrs[key] for key in attrs if key.startswith(f"{_PROCESS} ")]
    all_gone = bool(runners) and all(map(_has_ended, runners))
    lost = [
        trial
        for trial in running
        if (_has_ended(trial.user_attrs[_PROCESS]) if _PROCESS in trial.user_attrs else all_gone)
    ]
    for trial in lost:
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # recovered by another process
            # Not `study.tell`: the grid sampler may then end a search that has not begun.
            study._storage.set_trial_state_values(trial._trial_id, state=states.FAIL)
            propose_again(study, trial)
    return [trial.number for trial in lost]


def propose_again(study: Study, trial: FrozenTrial) -> bool:
    """Queue the parameters of a lost trial, unless the trial is already a repetition.

    Returns
    -------
    bool
        Whether a new trial was queued.
    """
    if RETRY_OF in trial.user_attrs:
        return False
    repetition = optuna.create_trial(
        state=optuna.trial.TrialState.WAITING,
        params=trial.params,
        distributions=trial.distributions,
        system_attrs=trial.system_attrs,  # the grid sampler stores its grid point there
        user_attrs={**trial.user_attrs, RETRY_OF: trial.number},
    )
    study.add_trial(repetition)
    return True


def _has_ended(process: tuple[str, int, float] | None) -> bool:
    """Return True if a recorded process of this machine has ended."""
    if process is None or process[0] != host_name():
        return False
    _, pid, started = process
    try:
        current = psutil.Process(pid)
        is_alive = current.status() != psutil.STATUS_ZOMBIE
        return not is_alive or abs(current.create_time() - started) > CLOCK_STEP_S
    except psutil.NoSuchProcess:
        return True
