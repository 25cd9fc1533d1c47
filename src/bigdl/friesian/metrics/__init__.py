"""Metrics of recommendations: accuracy, novelty, diversity and coverage of lists."""

from bigdl.friesian.metrics.ranking import RankingMetrics, compare_rankings, ranking_metrics

__all__ = ["RankingMetrics", "compare_rankings", "ranking_metrics"]
