"""Feature tables on Spark: cleaning, encoding, crossing, histories, negative samples.

A :class:`FeatureTable` wraps one Spark DataFrame, its attribute ``df``. Every operator returns a
new table.
"""

from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.feature.table import FeatureTable, StringIndex, TargetCode
from bigdl.friesian.ops.schema import Feature, FeatureSchema

__all__ = [
    "Feature",
    "FeaturePipeline",
    "FeatureSchema",
    "FeatureTable",
    "StringIndex",
    "TargetCode",
]
