"""Acceleration of a network's frozen layers in training, without autograd and in fast runtimes.

In transfer learning most of a network only computes features. Layers before the first trained
weight need no gradients, so they can run as in inference: in bf16 or int8, and in the fastest
runtime (Dai et al., BigDL 2.0, CVPR 2022, report their largest gain for frozen layers). If equal
images give equal features, the features can be computed once for all epochs.

=========================  ======================================================================
:class:`FrozenSegment`     consecutive frozen modules that run as one
:class:`FrozenPrefix`      all segments of a model, and the frozen modules that are not replaced
:class:`CachedFeatures`    dataset of a segment's outputs instead of images
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
