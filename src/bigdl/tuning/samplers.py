"""Samplers: who proposes the parameters of a trial."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from bigdl.common.errors import require
from bigdl.tuning._by_name import member, optuna, quietly_made

__all__ = ["SamplerType", "create_sampler"]


class SamplerType(StrEnum):
    """Names of samplers.

    ``MOTPE`` is what BigDL 2.x called the search for several objectives, which TPE does itself now.
    """

    TPE = "TPE"
    CmaEs = "CmaEs"
    Grid = "Grid"
    Random = "Random"
    PartialFixed = "PartialFixed"
    NSGAII = "NSGAII"
    MOTPE = "MOTPE"


_CLASSES = {
    SamplerType.TPE: "TPESampler",
    SamplerType.CmaEs: "CmaEsSampler",
    SamplerType.Grid: "GridSampler",
    SamplerType.Random: "RandomSampler",
    SamplerType.PartialFixed: "PartialFixedSampler",
    SamplerType.NSGAII: "NSGAIISampler",
    SamplerType.MOTPE: "TPESampler",
}


def create_sampler(sampler: Any = None, **arguments: Any) -> Any:
    """A sampler of Optuna.

    Parameters
    ----------
    sampler : SamplerType or str or optuna.samplers.BaseSampler, optional
        Its name, TPE by default. A sampler is returned as it is.
    **arguments
        Of Optuna's class, for example ``seed``. ``Grid`` needs ``search_space``, the values of each
        parameter; ``PartialFixed`` needs ``fixed_params`` and takes ``base_sampler``.

    Returns
    -------
    optuna.samplers.BaseSampler

    Raises
    ------
    UsageError
        If there is no such sampler, or it does not take the arguments.
    """
    samplers = optuna().samplers
    if isinstance(sampler, samplers.BaseSampler):
        return sampler
    kind = SamplerType.TPE if sampler is None else member(SamplerType, sampler, "sampler")
    if kind is SamplerType.CmaEs:
        require("cmaes", "automl")
    if kind is SamplerType.PartialFixed:
        arguments.setdefault("base_sampler", samplers.TPESampler())
    return quietly_made(getattr(samplers, _CLASSES[kind]), arguments, f"sampler {kind.value!r}")
