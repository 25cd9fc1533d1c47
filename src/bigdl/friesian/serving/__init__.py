"""Online serving of recommendations, in one process or as several services.

A :class:`FeatureStore` holds features and vectors by id, an :class:`ItemIndex` finds candidates and
a ranker scores them. A :class:`Recommender` combines them to recommendations. :mod:`.services`
offers each part over gRPC, and the program ``bigdl-friesian-serve`` starts them from one file.
"""

from bigdl.nano.lazy_names import lazy_names

_MODULES = {
    "Batch": "stages",
    "Candidates": "index",
    "DriftMonitor": "drift",
    "EmbeddedEvents": "events",
    "EmbeddedStore": "store",
    "Event": "events",
    "EventStore": "events",
    "FeatureProfile": "drift",
    "FeatureService": "services",
    "FeatureStore": "store",
    "Features": "rows",
    "HttpServer": "http",
    "IndexRecall": "rankers",
    "ItemAttributes": "filters",
    "ItemFilter": "filters",
    "ItemIndex": "index",
    "Limits": "services",
    "LostShardError": "errors",
    "ModuleRanker": "rankers",
    "RankingService": "services",
    "RecallService": "services",
    "Recommendation": "stages",
    "Recommender": "recommender",
    "RecommenderClient": "clients",
    "RecommenderService": "services",
    "RedisEvents": "events",
    "RedisStore": "redis_store",
    "RemoteFeatures": "clients",
    "RemoteRanker": "clients",
    "RemoteRecall": "clients",
    "SequenceRecall": "sequences",
    "ServedRanker": "rankers",
    "Shard": "shards",
    "ShardedFeatures": "shards",
    "ShardedRecall": "shards",
    "Stage": "stages",
    "load_stage": "stages",
    "open_events": "events",
    "open_store": "redis_store",
    "ray_application": "ray_serve",
}
_SHARED = {
    "GrpcServer": "grpc_server",
    "Security": "access",
    "ServingMetrics": "metrics",
    "ServingRun": "serving_run",
}
_HOMES = {name: f"{__name__}.{module}" for name, module in _MODULES.items()} | {
    name: f"bigdl.nano.serving.{module}" for name, module in _SHARED.items()
}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
