"""The import path that programs for BigDL 2.x use."""

from bigdl.friesian.feature.base import Table
from bigdl.friesian.feature.feature_table import FeatureTable
from bigdl.friesian.feature.string_index import StringIndex
from bigdl.friesian.feature.target_code import TargetCode

__all__ = ["FeatureTable", "StringIndex", "Table", "TargetCode"]
