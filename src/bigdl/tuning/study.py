"""Studies: where the trials of a search are kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.tuning._by_name import optuna, quietly
from bigdl.tuning.lost import recover
from bigdl.tuning.pruners import create_pruner
from bigdl.tuning.samplers import create_sampler
from bigdl.tuning.storage import open_database

__all__ = ["is_in_memory", "open_study"]

_DIRECTIONS = ("minimize", "maximize")
_log = logging.getLogger(__name__)


def open_study(
    *,
    storage: Any = None,
    name: str | None = None,
    directions: Sequence[str] = ("minimize",),
    sampler: Any = None,
    pruner: Any = None,
    resume: bool = False,
    metric_names: Sequence[str] | None = None,
) -> Any:
    """Make a study, or go on with one.

    Parameters
    ----------
    storage : str or optuna.storages.BaseStorage, optional
        URL of a database, for example ``"sqlite:///search.db"``, or a storage of Optuna. By default
        the study is in memory and ends with the process.
    name : str, optional
        Name of the study in the storage. Without a name, a new one is found, or the storage's only
        study is resumed.
    directions : sequence of {"minimize", "maximize"}
        One for each figure that the objective returns.
    sampler, pruner : optional
        Of Optuna; TPE, and no pruning by default.
    resume : bool
        Go on with the study if the storage has it. Trials of a search that was killed are marked as
        failed and come first, with the parameters that they had (:mod:`bigdl.tuning.lost`).
    metric_names : sequence of str, optional
        Names of the figures.

    Returns
    -------
    optuna.Study

    Raises
    ------
    UsageError
        If there is such a study and it is not to be resumed, it has other directions, the storage
        cannot be opened, or a direction is unknown.
    """
    library = optuna()
    wanted = [_direction(direction) for direction in directions]
    place = _opened(storage)
    if resume and name is None and storage is not None:
        name = _only_study(place)
    try:
        study = library.create_study(
            storage=place,
            study_name=name,
            directions=wanted,
            sampler=create_sampler(sampler),
            pruner=create_pruner(pruner),
            load_if_exists=resume,
        )
    except library.exceptions.DuplicatedStudyError as error:
        raise UsageError(
            f"There is a study {name!r} already; pass resume=True to go on with it, or choose "
            "another study_name"
        ) from error
    found = [direction.name.lower() for direction in study.directions]
    if found != wanted:
        raise UsageError(
            f"The study {study.study_name!r} has the directions {found}, not {wanted}; choose "
            "another study_name"
        )
    if resume:
        _tell_of(study, recover(study))
    if metric_names is not None and study.metric_names != list(metric_names):
        with quietly():
            study.set_metric_names(list(metric_names))
    return study


def is_in_memory(study: Any) -> bool:
    """Whether only this process sees the study."""
    return isinstance(study._storage, optuna().storages.InMemoryStorage)


def _direction(direction: Any) -> str:
    name = getattr(direction, "name", direction)  # Optuna's own enumeration, too
    if not isinstance(name, str) or name.lower() not in _DIRECTIONS:
        raise UsageError(f"A direction must be 'minimize' or 'maximize', not {direction!r}")
    return name.lower()


def _opened(storage: Any) -> Any:
    if not isinstance(storage, str):
        return storage
    try:
        return open_database(storage)
    except Exception as error:  # of SQLAlchemy, the driver of a database, or Optuna
        raise UsageError(
            f"The storage {storage!r} cannot be opened: {error}; give a URL such as "
            "'sqlite:///search.db'"
        ) from error


def _only_study(storage: Any) -> str | None:
    names = optuna().get_all_study_names(storage)
    if len(names) > 1:
        raise UsageError(
            f"The storage has {len(names)} studies ({', '.join(sorted(names))}); say by study_name "
            "which of them to resume"
        )
    return names[0] if names else None


def _tell_of(study: Any, lost: list[int]) -> None:
    if lost:
        numbers = ", ".join(map(str, lost))
        _log.warning(
            "The search %r was killed in trial %s, which is tried again", study.study_name, numbers
        )
