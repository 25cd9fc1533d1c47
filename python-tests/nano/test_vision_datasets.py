"""Datasets decode as Pillow does, with any number of threads, and say what is missing."""

import importlib
import io
import pickle
import sys
from types import ModuleType
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from torch.utils.data import DataLoader

from bigdl.common.errors import UsageError
from bigdl.data import image_files as decoding
from bigdl.nano.pytorch.vision import datasets as D
from bigdl.nano.pytorch.vision import transforms as T


def photograph(height, width, seed=0):
    """Smooth colours, as JPEG is made for."""
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / (15 + seed) + k) * np.cos(y / (11 + k)) for k in range(3)]
    return np.stack(waves, -1).astype(np.uint8)


def saved(image, form="JPEG", **options):
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six images of two classes, one of them a PNG and one below another folder."""
    root = tmp_path_factory.mktemp("images")
    for number in range(6):
        path = root / ("cat", "dog")[number % 2] / f"{number}.{'png' if number == 5 else 'jpg'}"
        path = path.parent / "more" / path.name if number == 4 else path
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(60 + number, 80, number)).save(path)
    (root / "cat" / "notes.txt").write_text("no image")
    return root


AUGMENT = T.Compose([T.Resize(40), T.RandomCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])


# -- decoding --------------------------------------------------------------------------------------

FORMS = {
    "jpeg": ("RGB", "JPEG", {}),
    "progressive jpeg": ("RGB", "JPEG", {"progressive": True}),
    "jpeg without subsampling": ("RGB", "JPEG", {"subsampling": 0}),
    "gray jpeg": ("L", "JPEG", {}),
    "cmyk jpeg": ("CMYK", "JPEG", {}),
    "png": ("RGB", "PNG", {}),
    "gray png": ("L", "PNG", {}),
    "png with transparency": ("RGBA", "PNG", {}),
    "png with a palette": ("P", "PNG", {}),
    "gif": ("P", "GIF", {}),
    "bmp": ("RGB", "BMP", {}),
}


@pytest.mark.parametrize("name", FORMS)
def test_files_are_decoded_to_what_pillow_gives(name):
    mode, form, options = FORMS[name]
    data = saved(Image.fromarray(photograph(50, 70)).convert(mode), form, **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    decoded = decoding.decode(data)
    assert decoded.dtype == np.uint8
    # Versions of the library of JPEG may round in another way.
    assert np.abs(decoded.astype(int) - expected).max() <= (2 if "jpeg" in name else 0)


def test_the_orientation_of_the_camera_is_not_applied():
    image = Image.fromarray(photograph(50, 70))
    exif = image.getexif()
    exif[0x0112] = 6  # turned
    assert decoding.decode(saved(image, exif=exif)).shape == (50, 70, 3)


@pytest.mark.parametrize(("needed", "size"), [(66, 129), (65, 65), (34, 65), (33, 33), (9, 17)])
def test_a_jpeg_is_decoded_as_small_as_suffices(needed, size):
    data = saved(Image.fromarray(photograph(129, 129)))
    image = decoding.decode(data, lambda height, width: (needed, needed))
    assert image.shape == (size, size, 3)


def test_a_reduced_image_looks_like_the_resized_one():
    image = Image.fromarray(photograph(400, 500))
    resize = T.Resize(100)
    reduced = resize(decoding.decode(saved(image), lambda *_: (100, 125)))
    whole = resize(decoding.decode(saved(image)))
    assert reduced.shape == whole.shape
    assert np.abs(reduced.astype(int) - whole).mean() < 2


def test_the_size_of_a_jpeg_is_read_from_its_header():
    assert decoding.jpeg_size(saved(Image.fromarray(photograph(50, 70)))) == (50, 70, 3)
    assert decoding.jpeg_size(b"\xff\xd8\xff") is None
    assert decoding.jpeg_size(b"no image at all") is None


def test_a_file_that_holds_no_image_is_named(tmp_path):
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"\xff\xd8\xff nothing more")
    with refused("file-format", "broken.jpg"):
        decoding.read_image(path)


# -- ImageFolder -----------------------------------------------------------------------------------


def test_a_folder_is_a_class(folder):
    dataset = D.ImageFolder(folder)
    assert dataset.classes == ["cat", "dog"]
    assert dataset.class_to_idx == {"cat": 0, "dog": 1}
    assert dataset.targets == [0, 0, 0, 1, 1, 1]
    assert dataset.imgs == dataset.samples
    image, target = dataset[0]
    assert image.shape == (60, 80, 3)
    assert image.dtype == np.uint8
    assert target == 0


def test_transforms_of_images_and_targets_are_applied(folder):
    dataset = D.ImageFolder(folder, AUGMENT, lambda target: 10 * target)
    image, target = dataset[5]
    assert image.shape == (3, 32, 32)
    assert target == 10


def test_another_loader_and_another_choice_of_files(folder):
    dataset = D.ImageFolder(
        folder, loader=Image.open, is_valid_file=lambda p: p.endswith(".png"), allow_empty=True
    )
    assert len(dataset) == 1
    assert dataset[0][0].mode == "RGB"


def test_a_batch_equals_its_samples_in_any_number_of_threads_or_processes(folder):
    dataset = D.ImageFolder(folder, AUGMENT)
    order = [3, 0, 5, 1]
    torch.manual_seed(4)
    at_once = dataset.__getitems__(order)
    torch.manual_seed(4)
    one_by_one = [dataset[index] for index in order]
    for (image, target), (other, same) in zip(at_once, one_by_one, strict=True):
        assert torch.equal(image, other)
        assert target == same


def test_epochs_of_a_loader_follow_the_seed_and_differ(folder):
    def epochs():
        torch.manual_seed(9)
        loader = DataLoader(D.ImageFolder(folder, AUGMENT), batch_size=4, shuffle=True)
        return [torch.cat([images for images, _ in loader]) for _ in range(2)]

    first, again = epochs(), epochs()
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])


def test_a_batch_can_keep_channels_last(folder):
    transform = T.Compose([T.Resize((32, 32)), T.ToTensor(torch.channels_last)])
    loader = DataLoader(
        D.ImageFolder(folder, transform), batch_size=6, collate_fn=D.collate_channels_last
    )
    images, targets = next(iter(loader))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images[3], D.ImageFolder(folder, transform)[3][0])
    assert targets.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.slow
def test_workers_draw_by_their_seeds(folder):
    def epoch():
        torch.manual_seed(2)
        dataset = D.ImageFolder(folder, AUGMENT)
        loader = DataLoader(dataset, batch_size=3, num_workers=1, multiprocessing_context="spawn")
        return torch.cat([images for images, _ in loader])

    assert torch.equal(epoch(), epoch())


def test_a_function_of_the_users_runs_in_the_thread_of_the_loader(folder):
    import threading

    seen = set()

    def note(image):
        seen.add(threading.current_thread())
        return image

    D.ImageFolder(folder, T.Compose([T.Resize(8), T.Lambda(note)])).__getitems__([0, 1, 2])
    assert seen == {threading.current_thread()}


def test_whether_samples_are_always_the_same_is_known(folder):
    assert D.ImageFolder(folder, T.Compose([T.Resize(8), T.ToTensor()])).deterministic
    assert not D.ImageFolder(folder, AUGMENT).deterministic


def test_a_dataset_can_be_pickled_and_printed(folder):
    dataset = pickle.loads(pickle.dumps(D.ImageFolder(folder, AUGMENT)))
    assert len(dataset) == 6
    assert "6 images of 2 classes" in repr(dataset)


def test_a_folder_without_classes_or_images_is_refused(tmp_path):
    with refused("path-missing"):
        D.ImageFolder(tmp_path / "nowhere")
    with refused("data-empty"):
        D.ImageFolder(tmp_path)
    (tmp_path / "empty").mkdir()
    with refused("data-empty", "allow_empty"):
        D.ImageFolder(tmp_path)
    assert len(D.ImageFolder(tmp_path, allow_empty=True)) == 0


def test_other_datasets_are_torchvisions():
    with pytest.raises(AttributeError, match="torchvision"):
        D.NoSuchDataset  # noqa: B018


# -- segmentation ----------------------------------------------------------------------------------


@pytest.fixture
def pedestrians(tmp_path):
    """Two images, with two objects and with none."""
    for name in ("PNGImages", "PedMasks"):
        (tmp_path / name).mkdir()
    for number in range(2):
        image = Image.fromarray(photograph(20, 30, number))
        image.save(tmp_path / "PNGImages" / f"{number}.png")
        mask = np.zeros((20, 30), np.uint8)
        if number == 0:
            mask[2:6, 3:9], mask[10:15, 20:28] = 1, 2
        Image.fromarray(mask).save(tmp_path / "PedMasks" / f"{number}_mask.png")
    return tmp_path


def test_masks_become_boxes_and_masks_of_objects(pedestrians):
    image, target = D.SegmentationImageFolder(pedestrians, "PNGImages", "PedMasks")[0]
    assert image.shape == (20, 30, 3)
    assert target["boxes"].tolist() == [[3, 2, 8, 5], [20, 10, 27, 14]]
    assert target["masks"].shape == (2, 20, 30)
    assert target["masks"].sum((1, 2)).tolist() == [24, 40]
    assert target["labels"].tolist() == [1, 1]
    assert target["iscrowd"].tolist() == [0, 0]
    assert target["area"].tolist() == [15, 28]
    assert target["image_id"].tolist() == [0]


def test_an_image_without_objects_has_no_boxes(pedestrians):
    _, target = D.SegmentationImageFolder(pedestrians, "PNGImages", "PedMasks")[1]
    assert target["boxes"].shape == (0, 4)
    assert target["masks"].shape == (0, 20, 30)


def test_image_and_target_are_transformed_together(pedestrians):
    dataset = D.SegmentationImageFolder(
        pedestrians, "PNGImages", "PedMasks", lambda image, target: (image.mean(), len(target))
    )
    assert dataset[0][1] == 6


def test_every_image_needs_a_mask(pedestrians):
    (pedestrians / "PedMasks" / "1_mask.png").unlink()
    with refused("data-structure"):
        D.SegmentationImageFolder(pedestrians, "PNGImages", "PedMasks")
    with refused("path-missing"):
        D.SegmentationImageFolder(pedestrians, "PNGImages", "Masks")


# -- pets ------------------------------------------------------------------------------------------


@pytest.fixture
def pets(tmp_path):
    base = tmp_path / "oxford-iiit-pet"
    (base / "images").mkdir(parents=True)
    (base / "annotations" / "trimaps").mkdir(parents=True)
    names = ["Abyssinian_1", "great_pyrenees_2", "Abyssinian_3"]
    for number, name in enumerate(names):
        Image.fromarray(photograph(24, 32, number)).save(base / "images" / f"{name}.jpg")
        mask = np.ones((24, 32), np.uint8)
        mask[:4], mask[4:6] = 2, 3
        Image.fromarray(mask).save(base / "annotations" / "trimaps" / f"{name}.png")
    (base / "annotations" / "trainval.txt").write_text(
        "Abyssinian_1 1 1 1\ngreat_pyrenees_2 2 2 1\n"
    )
    (base / "annotations" / "test.txt").write_text("Abyssinian_3 1 1 1\n")
    return tmp_path


def test_a_pet_comes_with_its_mask(pets):
    dataset = D.OxfordIIITPet(pets, T.ToTensor(), T.Compose([T.Resize(12, 0), T.PILToTensor()]))
    image, mask = dataset[1]
    assert len(dataset) == 2
    assert image.shape == (3, 24, 32)
    assert mask.shape == (1, 12, 16)
    assert set(mask.unique().tolist()) == {1, 2, 3}


def test_a_pet_comes_with_its_breed(pets):
    dataset = D.OxfordIIITPet(pets, split="test", target_types="category")
    assert [target for _, target in map(dataset.__getitem__, range(len(dataset)))] == [0]
    both = D.OxfordIIITPet(pets, target_types=["category", "segmentation"])
    assert both.classes == ["Abyssinian", "Great Pyrenees"]
    label, mask = both[1][1]
    assert label == 1
    assert mask.shape == (24, 32)


def test_missing_pets_are_fetched_only_on_demand(tmp_path, monkeypatch):
    with refused("path-missing", "download=True"):
        D.OxfordIIITPet(tmp_path)

    def no_network(url, timeout):
        raise URLError("no network here")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with refused("cluster-unreachable", "images.tar"):
        D.OxfordIIITPet(tmp_path, download=True)


WRONG = {
    "split": ({"split": "all"}, "split should be"),
    "target_types": ({"target_types": "breed"}, "target_types should be"),
    "positional": ({"transform": "trainval"}, "by name"),
    "both": ({"transform": abs, "transforms": abs}, "not both"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name, pets):
    arguments, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        D.OxfordIIITPet(pets, **arguments)


@pytest.mark.parametrize("module", ["datasets", "transforms"])
def test_import_star_and_dir_have_torchvisions_names(module, monkeypatch):
    ours = importlib.import_module(f"bigdl.nano.pytorch.vision.{module}")
    torchvision, theirs = ModuleType("torchvision"), ModuleType(f"torchvision.{module}")
    theirs.Foreign = type("Foreign", (), {})
    theirs.__all__ = ["Foreign"]
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    assert "Foreign" in dir(ours)
    names = {}
    exec(f"from {ours.__name__} import *", names)
    assert names["Foreign"] is theirs.Foreign
    own = "ImageFolder" if module == "datasets" else "Resize"
    assert names[own] is getattr(ours, own)


def test_hasattr_of_a_dataset_of_torchvision_works_without_it():
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    datasets = importlib.import_module("bigdl.nano.pytorch.vision.datasets")
    assert not hasattr(datasets, "CIFAR10")
    with pytest.raises(AttributeError, match="run: pip install torchvision"):
        datasets.CIFAR10  # noqa: B018


def test_a_file_without_bytes_is_named(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "2.jpg").touch()
    with refused("file-damaged", "2.jpg"):
        D.ImageFolder(tmp_path)[0]
