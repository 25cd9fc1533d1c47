"""Old import path of the tables."""

from bigdl.friesian.feature.feature_table import FeatureTable
from bigdl.friesian.feature.tables import StringIndex, Table, TargetCode

__all__ = ["FeatureTable", "StringIndex", "Table", "TargetCode"]
