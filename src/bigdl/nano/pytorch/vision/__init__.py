"""Image datasets, transforms and backbones with torchvision's names, independent of torchvision.

Other names of torchvision are forwarded to torchvision if a working one is installed.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from bigdl.common.dropped import is_imported_by_name
from bigdl.common.errors import MissingExtraError

# Names of torchvision 0.28 that BigDL lacks. For these, a missing torchvision is the likely cause.
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


def of_torchvision(module: str, name: str, importer: str) -> Any:  # any attribute
    """Return an attribute of a torchvision module, for the ``__getattr__`` of another module.

    Parameters
    ----------
    module : str
        Name of the module in torchvision.
    name : str
        Name of the attribute.
    importer : str
        Name of the module whose ``__getattr__`` was called.

    Raises
    ------
    MissingExtraError
        If the name is imported by ``from … import`` and torchvision is missing or does not fit the
        installed torch.
    AttributeError
        If the name does not exist, or is not read by an import statement, so that ``hasattr``
        works.
    """
    missing = f"module {importer!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(missing)
    try:
        torchvision = importlib.import_module(f"torchvision.{module}")
    except (ImportError, RuntimeError, OSError) as error:  # built for another torch
        if name not in _THEIRS[module]:
            raise AttributeError(
                f"{missing}, and torchvision, which may have it, cannot be imported ({error})"
            ) from error
        if isinstance(error, ModuleNotFoundError) and error.name == "torchvision":
            advice = "which is not installed; run: pip install torchvision"
        else:
            advice = f"which cannot be imported ({error}); run: pip install --upgrade torchvision"
        error_class = MissingExtraError if is_imported_by_name(2) else AttributeError
        raise error_class(f"{name} is torchvision's, {advice}") from error
    if not hasattr(torchvision, name):
        raise AttributeError(f"{missing}, and neither has torchvision.{module}")
    return getattr(torchvision, name)


def names_with_torchvision(module: str, names: Sequence[str]) -> list[str]:
    """Return the public names of a module and, if importable, of its torchvision counterpart.

    For ``__dir__`` and ``__all__`` of modules that forward names to torchvision.

    Parameters
    ----------
    module : str
        Name of the module in torchvision.
    names : sequence of str
        Names that BigDL defines.
    """
    try:
        torchvision = importlib.import_module(f"torchvision.{module}")
    except (
        ImportError,
        RuntimeError,
        OSError,
    ):  # the last two: built for another torch
        return sorted(names)
    theirs = getattr(torchvision, "__all__", None) or [
        name for name in dir(torchvision) if not name.startswith("_")
    ]
    return sorted({*names, *theirs})
