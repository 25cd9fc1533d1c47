"""Image transforms with torchvision's names, for ndarrays, PIL images and tensors.

They are fastest on ndarrays, which the datasets of :mod:`bigdl.nano.pytorch.vision.datasets`
return. Other names are forwarded to ``torchvision.transforms`` if torchvision is installed.
"""

from typing import Any

from bigdl.nano.pytorch.vision import names_with_torchvision, of_torchvision
from bigdl.nano.pytorch.vision.transforms import functional as functional
from bigdl.nano.pytorch.vision.transforms import transforms as transforms
from bigdl.nano.pytorch.vision.transforms.transforms import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.transforms import __all__ as _OWN


def __getattr__(name: str) -> Any:  # an attribute of torchvision
    if name == "__all__":  # `import *` asks for it
        return names_with_torchvision("transforms", _OWN)
    return of_torchvision("transforms", name, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *names_with_torchvision("transforms", _OWN)})
