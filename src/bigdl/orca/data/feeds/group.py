"""Group of several inputs of one job, e.g. training and validation data."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.packing import PackedFeed, prepare_packed
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.feed import Feed, InputPlan


class FeedGroup(Feed):
    """Group of named inputs of one job; workers read each from ``worker.shards[key]``.

    Columns that occur in several Spark DataFrames get the types of the first one.

    Parameters
    ----------
    feeds : dict of str to Feed
        Inputs by key.
    """

    def __init__(self, feeds: Mapping[str, Feed]):
        self.feeds = dict(feeds)
        first = next(iter(self.feeds.values()))
        self.feature_cols, self.label_cols = first.feature_cols, first.label_cols

    @property
    def version(self) -> dict[str, Any] | None:
        """Dict of table versions by input key, for inputs that have a version."""
        versions = {key: feed.version for key, feed in self.feeds.items()}
        return {key: each for key, each in versions.items() if each is not None} or None

    @property
    def identity(self) -> dict[str, Any] | None:
        """Dict of row identities by input key, for inputs that have an identity."""
        identities = {key: feed.identity for key, feed in self.feeds.items()}
        return {key: each for key, each in identities.items() if each} or None

    def at(
        self, version: dict[str, Any] | None, identity: dict[str, Any] | None = None
    ) -> FeedGroup:
        versions, identities = version or {}, identity or {}
        known = {*versions, *identities}
        feeds = self.feeds.items()
        return FeedGroup(
            {k: f.at(versions.get(k), identities.get(k)) if k in known else f for k, f in feeds}
        )

    def check_local(self) -> None:
        for feed in self.feeds.values():
            feed.check_local()

    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        if len(self.feeds) == 1:
            ((key, feed),) = self.feeds.items()
            return feed.prepare(cluster, num_workers, name=key)
        if all(isinstance(f, PackedFeed) and f.needs_packing(cluster) for f in self.feeds.values()):
            packed = cast("Mapping[str, PackedFeed]", self.feeds)
            plans: list[InputPlan] = []
            first = next(iter(packed.values()))
            for key, feed in packed.items():
                reference = first if plans else None
                plan = feed.from_files(cluster, num_workers, key, reference)
                if plan is None:
                    return prepare_packed(packed, cluster, num_workers)
                plans.append(plan)
            return _combine_plans(plans)
        return _combine_plans(
            [f.prepare(cluster, num_workers, name=k) for k, f in self.feeds.items()]
        )


def _combine_plans(plans: Sequence[InputPlan]) -> InputPlan:
    """Combine the InputPlans of several inputs into one InputPlan."""
    closing = contextlib.ExitStack()
    for plan in plans:
        closing.callback(plan.close)
    if any(plan.frame is not None for plan in plans):
        closing.close()
        raise UsageError(
            "These inputs cannot be read together; pass inputs of the same type", code="data-type"
        )
    readers = [plan.reader for plan in plans]

    def read(batches, open_spool):
        shards = {}
        for reader in readers:
            shards.update(reader(batches, open_spool))
        return shards

    return InputPlan(None, read, closing.close)
