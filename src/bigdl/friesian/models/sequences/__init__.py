"""Sequence models for PyTorch, which predict the next item from a user's history.

``FeatureTable.sequences`` builds their input, and any Orca Estimator trains them: with ``labels``
the models compute their loss themselves::

    clicks = table.sequences("user", "item", "time")
    model = SASRec.from_schema(clicks.schema)
    est = Estimator.from_torch(model=model, optimizer=Adam(1e-3))
    est.fit(clicks.df, feature_cols=model.feature_cols, label_cols=model.label_cols)

Sequences are padded at the end, and positions count from the start, so that the keys and values of
a history stay valid when events are appended; see :meth:`CausalModel.extend`.
"""

from bigdl.friesian.models.sequences.items import ItemVectors
from bigdl.friesian.models.sequences.losses import (
    BinaryNextItem,
    FullSoftmax,
    NextItemLoss,
    SampledSoftmax,
    chunked_cross_entropy,
)
from bigdl.friesian.models.sequences.networks import (
    HSTU,
    BERT4Rec,
    CausalModel,
    GRU4Rec,
    NextItemOutput,
    SASRec,
    SequenceCache,
    SequenceModel,
)
from bigdl.friesian.models.sequences.saved import SavedSequenceModel

__all__ = [
    "HSTU",
    "BERT4Rec",
    "BinaryNextItem",
    "CausalModel",
    "FullSoftmax",
    "GRU4Rec",
    "ItemVectors",
    "NextItemLoss",
    "NextItemOutput",
    "SASRec",
    "SampledSoftmax",
    "SavedSequenceModel",
    "SequenceCache",
    "SequenceModel",
    "chunked_cross_entropy",
]
