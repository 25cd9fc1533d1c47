"""The steps that a pipeline can record, one module for each family.

``STEPS`` has them by the name of the method; a saved pipeline is read with it.
"""

from bigdl.friesian.feature.pipeline.steps.bins import CutBins, OneHotEncode
from bigdl.friesian.feature.pipeline.steps.casts import Cast
from bigdl.friesian.feature.pipeline.steps.cells import Clip, FillMedian, FillNa, Log
from bigdl.friesian.feature.pipeline.steps.encoding import CategoryEncode
from bigdl.friesian.feature.pipeline.steps.hashing import CrossColumns, HashEncode
from bigdl.friesian.feature.pipeline.steps.histories import AddHistSeq
from bigdl.friesian.feature.pipeline.steps.layout import Drop, Rename, Select
from bigdl.friesian.feature.pipeline.steps.scaling import MinMaxScale
from bigdl.friesian.feature.pipeline.steps.sequences import Mask, Pad
from bigdl.friesian.feature.pipeline.steps.tables import (
    AddNegativeSamples,
    AddNegHistSeq,
    DropNa,
    Filter,
)
from bigdl.friesian.feature.pipeline.steps.targets import CountEncode, TargetEncode

__all__ = ["STEPS"]

STEPS = {
    step.method: step
    for step in (
        AddHistSeq,
        AddNegHistSeq,
        AddNegativeSamples,
        Cast,
        CategoryEncode,
        Clip,
        CountEncode,
        CrossColumns,
        CutBins,
        Drop,
        DropNa,
        FillMedian,
        FillNa,
        Filter,
        HashEncode,
        Log,
        Mask,
        MinMaxScale,
        OneHotEncode,
        Pad,
        Rename,
        Select,
        TargetEncode,
    )
}
