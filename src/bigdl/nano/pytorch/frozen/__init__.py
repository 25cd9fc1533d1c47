"""The frozen part of a network that is trained: run without autograd, in another runtime.

In transfer learning most of a network only computes features. What comes before the first weight
that is trained needs no gradients, so it can run as inference does: in bf16 or int8, in the
runtime that is fastest (Dai et al., BigDL 2.0, CVPR 2022, report their largest gain for frozen
layers). Where equal images give equal features, these can be computed once for all epochs.

=========================  ======================================================================
:class:`Segment`           consecutive frozen modules that run as one
:class:`FrozenPrefix`      all segments of a model: what was replaced, what was not and why
:class:`CachedFeatures`    a dataset of a segment's outputs instead of images
=========================  ======================================================================
"""

import importlib

_HOMES = {
    "CachedFeatures": "bigdl.nano.pytorch.frozen.cache",
    "FrozenPrefix": "bigdl.nano.pytorch.frozen.prefix",
    "FrozenPrefixCallback": "bigdl.nano.pytorch.frozen.callback",
    "Segment": "bigdl.nano.pytorch.frozen.segment",
    "accelerate_frozen_prefix": "bigdl.nano.pytorch.frozen.prefix",
}

__all__ = [
    "CachedFeatures",
    "FrozenPrefix",
    "FrozenPrefixCallback",
    "Segment",
    "accelerate_frozen_prefix",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
