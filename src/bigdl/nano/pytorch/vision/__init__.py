"""Images: datasets, transforms and backbones with torchvision's names, which need no torchvision.

Names that BigDL has not are torchvision's own, where the user has a working torchvision.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from bigdl.common.dropped import is_imported_by_name
from bigdl.common.errors import MissingExtraError

# Names of torchvision 0.28 that are not BigDL's own: these are asked for by no mistake.
_DATASETS = """
    CIFAR10 CIFAR100 CLEVRClassification CREStereo Caltech101 Caltech256 CarlaStereo CelebA
    Cityscapes CocoCaptions CocoDetection Country211 DTD DatasetFolder EMNIST ETH3DStereo EuroSAT
    FER2013 FGVCAircraft FakeData FallingThingsStereo FashionMNIST Flickr30k Flickr8k Flowers102
    FlyingChairs FlyingThings3D Food101 GTSRB HD1K HMDB51 INaturalist ImageNet Imagenette InStereo2k
    KMNIST Kinetics Kitti Kitti2012Stereo Kitti2015Stereo KittiFlow LFWPairs LFWPeople LSUN
    LSUNClass MNIST Middlebury2014Stereo MovingMNIST Omniglot PCAM PhotoTour Places365 QMNIST
    RenderedSST2 SBDataset SBU SEMEION STL10 SUN397 SVHN SceneFlowStereo Sintel SintelStereo
    StanfordCars UCF101 USPS VOCDetection VOCSegmentation VisionDataset WIDERFace
    wrap_dataset_for_transforms_v2
"""
_TRANSFORMS = """
    AugMix AutoAugment AutoAugmentPolicy RandAugment TrivialAugmentWide autoaugment v2
"""
_THEIRS = {"datasets": _DATASETS.split(), "transforms": _TRANSFORMS.split()}


def of_torchvision(module: str, name: str, asked: str) -> Any:
    """Return an attribute of a module of torchvision, for the ``__getattr__`` of another module.

    Parameters
    ----------
    module : str
        Name within torchvision.
    name : str
        Of the attribute.
    asked : str
        Name of the module that was asked for it.

    Raises
    ------
    MissingExtraError
        If the name is imported by ``from … import``, torchvision has it, but is not installed or
        does not fit the installed torch.
    AttributeError
        If it is read in another way, so that ``hasattr`` works, or if there is no such name as far
        as is known.
    """
    missing = f"module {asked!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(missing)
    try:
        torchvision = importlib.import_module(f"torchvision.{module}")
    except (ImportError, RuntimeError, OSError) as error:  # one that is built for another torch
        if name not in _THEIRS[module]:
            raise AttributeError(
                f"{missing}, and torchvision, which may have it, cannot be imported ({error})"
            ) from error
        if isinstance(error, ModuleNotFoundError) and error.name == "torchvision":
            advice = "which is not installed; run: pip install torchvision"
        else:
            advice = f"which cannot be imported ({error}); run: pip install --upgrade torchvision"
        kind = MissingExtraError if is_imported_by_name(2) else AttributeError
        raise kind(f"{name} is torchvision's, {advice}") from error
    if not hasattr(torchvision, name):
        raise AttributeError(f"{missing}, and neither has torchvision.{module}")
    return getattr(torchvision, name)


def names_with_torchvision(module: str, own: Sequence[str]) -> list[str]:
    """Return the public names of a module with torchvision's, if a working one is installed.

    For ``__dir__`` and ``__all__`` of the modules that look other names up in torchvision.

    Parameters
    ----------
    module : str
        Name within torchvision.
    own : sequence of str
        Names that BigDL has.
    """
    try:
        torchvision = importlib.import_module(f"torchvision.{module}")
    except (
        ImportError,
        RuntimeError,
        OSError,
    ):  # the last two: one for another torch
        return sorted(own)
    theirs = getattr(torchvision, "__all__", None) or [
        name for name in dir(torchvision) if not name.startswith("_")
    ]
    return sorted({*own, *theirs})
