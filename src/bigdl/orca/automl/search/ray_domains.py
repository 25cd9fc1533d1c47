"""Domains of ``ray.tune`` and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.automl.domains import Choice, Domain, Normal, Number, SampleFrom, Subset

__all__ = ["draws_of", "from_ray", "to_ray"]


def from_ray(domain) -> Domain | SampleFrom:
    """The same domain as one of ours.

    Raises
    ------
    UsageError
        For kinds that we have none for.
    """
    from ray.tune.search import sample

    if isinstance(domain, sample.Function):
        return SampleFrom(domain.func)
    if isinstance(domain, sample.Categorical):
        return Choice(domain.categories)
    sampler, q = domain.get_sampler(), None
    if isinstance(sampler, sample.Quantized):
        sampler, q = sampler.sampler, sampler.q
    if isinstance(sampler, sample.Normal):
        return Normal(sampler.mean, sampler.sd, q=q)
    log = isinstance(sampler, sample.LogUniform)
    if isinstance(domain, sample.Integer):
        # of Ray's integers the upper bound belongs to those with steps only
        upper = domain.upper if q is not None else domain.upper - 1
        return Number(domain.lower, upper, q=q, log=log, whole=True)
    if isinstance(domain, sample.Float) and isinstance(sampler, sample.Uniform | sample.LogUniform):
        return Number(domain.lower, domain.upper, q=q, log=log)
    raise UsageError(
        f"search_space holds {domain!r}, which cannot be used; see bigdl.orca.automl.hp"
    )


def to_ray(path: str, domain: Domain) -> dict[str, Any]:
    """Domains of Ray for the draws of one of ours, by name."""
    from ray import tune

    path = _name(path)

    if isinstance(domain, Choice):
        return {path: tune.choice(list(range(len(domain.categories))))}
    if isinstance(domain, Normal):
        return {path: tune.uniform(1e-9, 1 - 1e-9)}
    if isinstance(domain, Subset):
        names = [f"{path}:{i}" for i in range(len(domain.categories))]
        many = tune.randint(domain.min_items, domain.max_items + 1)
        return {f"{path}:number": many, **dict.fromkeys(names, tune.uniform(0.0, 1.0))}
    lower, upper = domain.bounds
    if domain.counts:
        make = tune.lograndint if domain.log else tune.randint
        return {path: make(lower, upper + 1)}
    make = tune.loguniform if domain.log else tune.uniform
    return {path: make(lower, upper)}


def draws_of(domains: Mapping[str, Domain], suggested: Mapping[str, Any]) -> dict[str, Any]:
    """The draws that a searcher of Ray means by its values for :func:`to_ray`."""
    found: dict[str, Any] = {}
    for path, domain in domains.items():
        name, values = _name(path), suggested
        if isinstance(domain, Subset):
            weights = [values[f"{name}:{i}"] for i in range(len(domain.categories))]
            found[path] = [int(values[f"{name}:number"]), *map(float, weights)]
        elif isinstance(domain, Choice) or (isinstance(domain, Number) and domain.counts):
            found[path] = int(values[name])
        else:
            found[path] = float(values[name])
    return found


def _name(path: str) -> str:
    """Ray takes a slash for a dict in a dict."""
    return path.replace("/", "|")
