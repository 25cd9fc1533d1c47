"""Image datasets with fast decoders.

Other names are forwarded to ``torchvision.datasets`` if torchvision is installed.
"""

from typing import Any

from bigdl.nano.pytorch.vision import names_with_torchvision, of_torchvision
from bigdl.nano.pytorch.vision.datasets.folders import ImageFolder as ImageFolder
from bigdl.nano.pytorch.vision.datasets.folders import OxfordIIITPet as OxfordIIITPet
from bigdl.nano.pytorch.vision.datasets.folders import (
    SegmentationImageFolder as SegmentationImageFolder,
)
from bigdl.nano.pytorch.vision.datasets.folders import (
    collate_channels_last as collate_channels_last,
)

_OWN = ["ImageFolder", "OxfordIIITPet", "SegmentationImageFolder", "collate_channels_last"]


def __getattr__(name: str) -> Any:  # an attribute of torchvision
    if name == "__all__":  # `import *` asks for it
        return names_with_torchvision("datasets", _OWN)
    return of_torchvision("datasets", name, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *names_with_torchvision("datasets", _OWN)})
