"""Tables of features on Spark: cleaning, encoding, crossing, histories, negative samples.

A :class:`FeatureTable` wraps one Spark DataFrame, which is its attribute ``df``; every operator
returns a new table.
"""

from bigdl.friesian.feature.feature_table import FeatureTable
from bigdl.friesian.feature.schema import Feature, FeatureSchema
from bigdl.friesian.feature.string_index import StringIndex
from bigdl.friesian.feature.target_code import TargetCode

__all__ = ["Feature", "FeatureSchema", "FeatureTable", "StringIndex", "TargetCode"]
