"""Recommendation served: features, candidates, scores and answers, in one process or several.

A :class:`FeatureStore` holds features and vectors by id, an :class:`ItemIndex` finds candidates, a
ranker scores them, and a :class:`Recommender` makes answers of all three.  :mod:`.services` puts
each of them behind gRPC, and the program ``bigdl-friesian-serve`` starts them from one file.
"""

import importlib

from bigdl.training.serving_run import ServingRun as ServingRun

_HOMES = {
    "Candidates": "index",
    "EmbeddedStore": "store",
    "FeatureService": "services",
    "FeatureStore": "store",
    "Features": "rows",
    "GrpcServer": "services",
    "HttpServer": "http",
    "IndexRecall": "recommender",
    "ItemIndex": "index",
    "Limits": "services",
    "LostShardError": "recommender",
    "ModuleRanker": "recommender",
    "RankingService": "services",
    "RecallService": "services",
    "Recommendation": "recommender",
    "Recommender": "recommender",
    "RecommenderClient": "clients",
    "RecommenderService": "services",
    "RedisStore": "redis_store",
    "RemoteFeatures": "clients",
    "RemoteRanker": "clients",
    "RemoteRecall": "clients",
    "Security": "services",
    "ServedRanker": "recommender",
    "ServingMetrics": "metrics",
    "Shard": "shards",
    "ShardedFeatures": "shards",
    "ShardedRecall": "shards",
    "open_store": "redis_store",
    "ray_application": "ray_serve",
}

__all__ = sorted([*_HOMES, "ServingRun"])


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
