"""Convolutional backbones and an image classifier.

Every backbone has the parameter and buffer names of torchvision's model of the same name, so that
torchvision's published weights can be loaded. torchvision is not needed.
"""

from typing import TYPE_CHECKING

from bigdl.nano.lazy_names import lazy_names
from bigdl.nano.pytorch.vision.models import backbones
from bigdl.nano.pytorch.vision.models.backbones import *  # noqa: F403

if TYPE_CHECKING:
    from bigdl.nano.pytorch.vision.models.classifier import ImageClassifier

__all__ = ["ImageClassifier"]
__all__ += backbones.__all__

# A backbone needs torch alone; Lightning takes seconds to import.
__getattr__, __dir__ = lazy_names(
    __name__, {"ImageClassifier": "bigdl.nano.pytorch.vision.models.classifier"}
)
