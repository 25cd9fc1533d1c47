"""The frozen part of a network that is trained: run without autograd, in another runtime.

In transfer learning most of a network only computes features. What comes before the first weight
that is trained needs no gradients, so it can run as inference does: in bf16 or int8, in the
runtime that is fastest (Dai et al., BigDL 2.0, CVPR 2022, report their largest gain for frozen
layers). Where equal images give equal features, these can be computed once for all epochs.

=========================  ======================================================================
:class:`FrozenSegment`           consecutive frozen modules that run as one
:class:`FrozenPrefix`      all segments of a model: what was replaced, what was not and why
:class:`CachedFeatures`    a dataset of a segment's outputs instead of images
=========================  ======================================================================
"""

from typing import TYPE_CHECKING

from bigdl.nano.lazy_names import lazy_names

if TYPE_CHECKING:
    from bigdl.nano.pytorch.frozen.callback import FrozenPrefixCallback as FrozenPrefixCallback
    from bigdl.nano.pytorch.frozen.features import CachedFeatures as CachedFeatures
    from bigdl.nano.pytorch.frozen.prefix import FrozenPrefix as FrozenPrefix
    from bigdl.nano.pytorch.frozen.prefix import (
        accelerate_frozen_prefix as accelerate_frozen_prefix,
    )
    from bigdl.nano.pytorch.frozen.segment import FrozenSegment as FrozenSegment

_HOMES = {
    "CachedFeatures": "bigdl.nano.pytorch.frozen.features",
    "FrozenPrefix": "bigdl.nano.pytorch.frozen.prefix",
    "FrozenPrefixCallback": "bigdl.nano.pytorch.frozen.callback",
    "FrozenSegment": "bigdl.nano.pytorch.frozen.segment",
    "accelerate_frozen_prefix": "bigdl.nano.pytorch.frozen.prefix",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
