"""Metrics of recommendations: how good, how new and how varied the lists of a recommender are."""

from bigdl.friesian.metrics.ranking import RankingMetrics, compare_rankings, ranking_metrics

__all__ = ["RankingMetrics", "compare_rankings", "ranking_metrics"]
