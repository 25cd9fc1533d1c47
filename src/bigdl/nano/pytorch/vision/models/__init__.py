"""Convolutional backbones and a classifier on top of one.

Every backbone has the parameter and buffer names of torchvision's model of the same name, so its
published weights load unchanged; torchvision itself is not needed.
"""

from bigdl.nano.pytorch.vision.models.backbone import BackboneModule
from bigdl.nano.pytorch.vision.models.mobilenet_v2 import MobileNetV2, mobilenet_v2
from bigdl.nano.pytorch.vision.models.mobilenet_v3 import (
    MobileNetV3,
    mobilenet_v3_large,
    mobilenet_v3_small,
)
from bigdl.nano.pytorch.vision.models.resnet import (
    ResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnext50_32x4d,
    resnext101_32x8d,
    wide_resnet50_2,
    wide_resnet101_2,
)
from bigdl.nano.pytorch.vision.models.shufflenet_v2 import (
    ShuffleNetV2,
    shufflenet_v2_x0_5,
    shufflenet_v2_x1_0,
    shufflenet_v2_x1_5,
    shufflenet_v2_x2_0,
)

__all__ = [
    "BackboneModule",
    "ImageClassifier",
    "MobileNetV2",
    "MobileNetV3",
    "ResNet",
    "ShuffleNetV2",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mobilenet_v3_small",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5",
    "shufflenet_v2_x2_0",
    "wide_resnet50_2",
    "wide_resnet101_2",
]


def __getattr__(name: str):
    if name != "ImageClassifier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A backbone needs torch alone; Lightning takes seconds to import.
    from bigdl.nano.pytorch.vision.models.classifier import ImageClassifier

    return ImageClassifier
