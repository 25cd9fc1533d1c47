"""Images: datasets, transforms and backbones with torchvision's names, which need no torchvision.

Names that BigDL has not are torchvision's own, where the user has a working torchvision.
"""

import importlib
from typing import Any

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
        If torchvision has the name, but is not installed, or does not fit the installed torch. It
        is an ImportError, so that ``from … import`` tells its text.
    AttributeError
        If there is no such name as far as is known.
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
        raise MissingExtraError(f"{name} is torchvision's, {advice}") from error
    if not hasattr(torchvision, name):
        raise AttributeError(f"{missing}, and neither has torchvision.{module}")
    return getattr(torchvision, name)
