"""BigDL 2.x's import path of :mod:`bigdl.orca.learn.nnframes.preprocessing`."""

from typing import NoReturn

from bigdl.common.dropped import refuse_name
from bigdl.orca.learn.nnframes.preprocessing import *  # noqa: F403
from bigdl.orca.learn.nnframes.preprocessing import __all__ as __all__

_SAMPLES = ("BigDLAdapter", "FeatureSet", "FeatureToTupleAdapter", "Sample", "ToTuple")
_RELATIONS = ("Relation", "Relations")


def __getattr__(name: str) -> NoReturn:
    if name in _SAMPLES:
        why = "it fed layers in the JVM; pass a DataFrame, XShards or arrays to an Estimator"
        refuse_name(__name__, name, why)
    if name in _RELATIONS:
        refuse_name(__name__, name, "it paired texts in the JVM; join DataFrames instead")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
