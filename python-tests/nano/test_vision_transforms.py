"""Transforms keep the kind of an image, agree with Pillow, and draw from torch's generator."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision import transforms as T
from bigdl.nano.pytorch.vision.transforms import functional as F
from bigdl.nano.pytorch.vision.transforms import transforms as base
from bigdl.nano.pytorch.vision.transforms.transforms import (
    is_random,
    is_thread_safe,
    sufficient_size,
)

# The public names of torchvision.transforms.transforms.
NAMES = (
    "Compose ToTensor PILToTensor ConvertImageDtype ToPILImage Normalize Resize CenterCrop Pad "
    "Lambda RandomApply RandomChoice RandomOrder RandomCrop RandomHorizontalFlip "
    "RandomVerticalFlip RandomResizedCrop FiveCrop TenCrop LinearTransformation "
    "ColorJitter RandomRotation "
    "RandomAffine Grayscale RandomGrayscale RandomPerspective RandomErasing GaussianBlur "
    "InterpolationMode RandomInvert RandomPosterize RandomSolarize RandomAdjustSharpness "
    "RandomAutocontrast RandomEqualize ElasticTransform"
)

MODES = T.InterpolationMode


def photograph(height=61, width=83, seed=0):
    """Smooth colours with edges and some noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([128 + 100 * np.sin(x / 9 + k) * np.cos(y / (7 + k)) for k in range(3)], -1)
    smooth[height // 3 : height // 2, width // 4 : width // 2] = (200, 30, 90)
    return np.clip(smooth + random.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def array():
    return photograph()


@pytest.fixture(scope="module")
def picture(array):
    return Image.fromarray(array)


def as_kind(kind, array):
    if kind == "array":
        return array
    return Image.fromarray(array) if kind == "pil" else torch.from_numpy(array).permute(2, 0, 1)


def as_array(image):
    if isinstance(image, torch.Tensor):
        return image.permute(1, 2, 0).numpy()
    return np.asarray(image)


def difference(one, other):
    """Largest and mean distance of two images of bytes."""
    distance = np.abs(as_array(one).astype(int) - as_array(other).astype(int))
    return distance.max(), distance.mean()


def test_every_name_of_torchvision_is_there():
    assert [name for name in NAMES.split() if not hasattr(T, name)] == []


def test_an_unknown_name_says_that_torchvision_might_have_it():
    with pytest.raises(AttributeError, match="torchvision"):
        T.NoSuchTransform  # noqa: B018


# -- the same values as Pillow --------------------------------------------------------------------

EQUAL = {
    "resize bilinear": (lambda i: F.resize(i, 40), 1),
    "resize up": (lambda i: F.resize(i, 90), 1),
    "resize to a rectangle": (lambda i: F.resize(i, (33, 20)), 1),
    "resize bicubic": (lambda i: F.resize(i, 30, MODES.BICUBIC), 1),
    "resize nearest": (lambda i: F.resize(i, 30, MODES.NEAREST_EXACT), 0),
    "resize lanczos": (lambda i: F.resize(i, 30, MODES.LANCZOS), 0),
    "resize box": (lambda i: F.resize(i, 30, MODES.BOX), 0),
    "resize with a limit": (lambda i: F.resize(i, 40, max_size=50), 1),
    "crop": (lambda i: F.crop(i, 5, 7, 20, 30), 0),
    "crop beyond the edge": (lambda i: F.crop(i, -5, 60, 50, 40), 0),
    "center crop": (lambda i: F.center_crop(i, (31, 40)), 0),
    "center crop of a small image": (lambda i: F.center_crop(i, (70, 100)), 0),
    "horizontal flip": (F.hflip, 0),
    "vertical flip": (F.vflip, 0),
    "pad": (lambda i: F.pad(i, [1, 2, 3, 4], 9), 0),
    "pad reflected": (lambda i: F.pad(i, 5, padding_mode="reflect"), 0),
    "brightness": (lambda i: F.adjust_brightness(i, 1.37), 1),
    "contrast": (lambda i: F.adjust_contrast(i, 0.6), 1),
    "saturation": (lambda i: F.adjust_saturation(i, 1.6), 1),
    "sharpness": (lambda i: F.adjust_sharpness(i, 1.8), 2),
    "grayscale": (lambda i: F.rgb_to_grayscale(i, 3), 0),
    "invert": (F.invert, 0),
    "posterize": (lambda i: F.posterize(i, 3), 0),
    "solarize": (lambda i: F.solarize(i, 120), 0),
    "autocontrast": (F.autocontrast, 0),
    "equalize": (F.equalize, 0),
    "rotate by a right angle": (lambda i: F.rotate(i, 90, expand=True), 0),
}


@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("name", EQUAL)
def test_operations_give_what_pillow_gives(name, kind, array, picture):
    operation, tolerance = EQUAL[name]
    expected, got = operation(picture), operation(as_kind(kind, array))
    assert as_array(got).shape == as_array(expected).shape
    assert as_array(got).dtype == np.uint8
    assert difference(got, expected)[0] <= tolerance


# What differs in a few pixels, by the mean distance.
CLOSE = {
    "rotate": (lambda i: F.rotate(i, 23.5), 0.5),
    "rotate smoothly": (lambda i: F.rotate(i, 23.5, MODES.BILINEAR, fill=7), 0.5),
    "rotate about a corner": (lambda i: F.rotate(i, -8, center=(0, 0), fill=(9, 8, 7)), 0.5),
    "rotate in a larger frame": (lambda i: F.rotate(i, 30, MODES.BILINEAR, expand=True), 0.5),
    "affine": (lambda i: F.affine(i, 12, (3, -4), 1.2, (8, -5), MODES.BILINEAR), 0.5),
    "perspective": (
        lambda i: F.perspective(
            i, [[0, 0], [82, 0], [82, 60], [0, 60]], [[6, 4], [77, 2], [80, 55], [2, 58]]
        ),
        0.5,
    ),
    "hue": (lambda i: F.adjust_hue(i, 0.2), 3.0),
}


@pytest.mark.parametrize("name", CLOSE)
def test_warps_are_close_to_pillows(name, array, picture):
    operation, tolerance = CLOSE[name]
    expected, got = operation(picture), operation(array)
    assert got.shape == as_array(expected).shape
    assert difference(got, expected)[1] <= tolerance


def test_pil_images_are_left_to_pillow(picture):
    by_pillow = {
        "resize": (F.resize(picture, (20, 30)), picture.resize((30, 20), Image.BILINEAR)),
        "contrast": (F.adjust_contrast(picture, 1.5), ImageEnhance.Contrast(picture).enhance(1.5)),
        "rotate": (F.rotate(picture, 30), picture.rotate(30)),
        "expand": (
            F.rotate(picture, 30, MODES.BILINEAR, expand=True),
            picture.rotate(30, Image.BILINEAR, expand=True),
        ),
        "pad": (F.pad(picture, 3, 5), ImageOps.expand(picture, 3, (5, 5, 5))),
    }
    distances = {name: difference(*pair)[0] for name, pair in by_pillow.items()}
    assert distances.pop("expand") <= 1  # Pillow rounds its matrix
    assert set(distances.values()) == {0}


def test_a_blur_is_close_to_a_normal_distribution(array, picture):
    blurred = F.gaussian_blur(array, 13, 2.0)
    inner = np.s_[10:-10, 10:-10]  # at the edges Pillow extends, torchvision mirrors
    expected = np.asarray(picture.filter(ImageFilter.GaussianBlur(2.0)))
    assert difference(blurred[inner], expected[inner])[1] < 1.5


def test_without_antialias_only_the_neighbours_count():
    image = np.zeros((8, 8, 3), np.uint8)
    image[0, 0] = 255
    assert F.resize(image, 2, antialias=True).max() > 0
    assert F.resize(image, 2, antialias=False).max() == 0


# -- kinds of images -------------------------------------------------------------------------------

TRANSFORMS = {
    "Resize": lambda: T.Resize(20),
    "CenterCrop": lambda: T.CenterCrop(20),
    "Pad": lambda: T.Pad(2),
    "RandomCrop": lambda: T.RandomCrop(20, padding=1),
    "RandomResizedCrop": lambda: T.RandomResizedCrop(20),
    "RandomHorizontalFlip": lambda: T.RandomHorizontalFlip(),
    "RandomVerticalFlip": lambda: T.RandomVerticalFlip(),
    "RandomRotation": lambda: T.RandomRotation(20),
    "RandomAffine": lambda: T.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), 5),
    "RandomPerspective": lambda: T.RandomPerspective(p=1),
    "ElasticTransform": lambda: T.ElasticTransform(20.0, 2.0),
    "ColorJitter": lambda: T.ColorJitter(0.3, 0.3, 0.3, 0.2),
    "Grayscale": lambda: T.Grayscale(3),
    "RandomGrayscale": lambda: T.RandomGrayscale(0.5),
    "GaussianBlur": lambda: T.GaussianBlur(3),
    "RandomInvert": lambda: T.RandomInvert(),
    "RandomPosterize": lambda: T.RandomPosterize(4),
    "RandomSolarize": lambda: T.RandomSolarize(100),
    "RandomAdjustSharpness": lambda: T.RandomAdjustSharpness(2),
    "RandomAutocontrast": lambda: T.RandomAutocontrast(),
    "RandomEqualize": lambda: T.RandomEqualize(),
    "RandomApply": lambda: T.RandomApply([T.RandomInvert()], 0.5),
    "RandomOrder": lambda: T.RandomOrder([T.RandomInvert(), T.CenterCrop(20)]),
    "RandomChoice": lambda: T.RandomChoice([T.RandomInvert(), T.CenterCrop(20)], [1, 2]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_keeps_the_kind_and_follows_the_seed(name, array):
    transform = TRANSFORMS[name]()
    shapes = set()
    for kind in ("array", "pil", "tensor"):
        image = as_kind(kind, array)
        before = as_array(image).copy()
        results = []
        for _ in range(2):
            torch.manual_seed(3)
            results.append(transform(image))
        assert type(results[0]) is type(image) or isinstance(results[0], Image.Image)
        np.testing.assert_array_equal(as_array(results[0]), as_array(results[1]))
        np.testing.assert_array_equal(as_array(image), before)
        shapes.add(as_array(results[0]).shape)
    assert len(shapes) == 1  # the draws do not depend on the kind


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_can_be_pickled_and_printed(name, array):
    transform = TRANSFORMS[name]()
    torch.manual_seed(5)
    expected = transform(array)
    torch.manual_seed(5)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(transform))(array), expected)
    assert type(transform).__name__ in repr(transform)


@pytest.mark.parametrize(
    "transform", [T.Resize(20), T.CenterCrop(90), T.Pad(3), T.ColorJitter(0.5)]
)
def test_gray_images_stay_gray(transform, array):
    gray = array[:, :, 0]
    assert transform(gray).ndim == 2
    assert transform(gray[:, :, None]).shape[2] == 1
    assert transform(Image.fromarray(gray)).mode == "L"


@pytest.mark.parametrize(
    "transform",
    [T.Resize(20), T.RandomCrop(20), T.ColorJitter(0.2, 0.2, 0.2), T.RandomRotation(9)],
    ids=lambda transform: type(transform).__name__,
)
def test_floats_agree_with_bytes(transform, array):
    floats = array.astype(np.float32) / 255
    torch.manual_seed(1)
    of_bytes = transform(array)
    torch.manual_seed(1)
    of_floats = transform(floats)
    assert of_floats.dtype == np.float32
    np.testing.assert_allclose(of_floats, of_bytes / 255, atol=0.02)


def test_a_batch_of_tensors_is_transformed_image_by_image(array):
    batch = torch.stack([as_kind("tensor", array), as_kind("tensor", array[::-1].copy())])
    resized = T.Resize(20)(batch)
    assert torch.equal(resized[1], T.Resize(20)(batch[1]))


# -- tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["array", "pil"])
def test_to_tensor_divides_bytes_by_255(kind, array):
    tensor = T.ToTensor()(as_kind(kind, array))
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    assert torch.equal(tensor, torch.from_numpy(array).permute(2, 0, 1).float() / 255)


def test_to_tensor_leaves_floats_as_they_are(array):
    floats = array.astype(np.float32)
    assert T.ToTensor()(floats).max() == floats.max()


def test_a_mask_becomes_a_tensor_of_one_channel(array):
    mask = array[:, :, 0] % 3
    assert T.ToTensor()(mask).shape == (1, *mask.shape)
    assert torch.equal(T.PILToTensor()(mask)[0], torch.from_numpy(mask))


def test_channels_last_keeps_the_order_of_the_values(array):
    tensor = T.ToTensor(torch.channels_last)(array)
    assert tensor[None].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(tensor, T.ToTensor()(array))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_compose_normalizes_in_the_buffer_of_to_tensor(array, memory_format):
    to_tensor, normalize = T.ToTensor(memory_format), T.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.1])
    composed = T.Compose([to_tensor, normalize])(array)
    assert torch.equal(composed, normalize(to_tensor(array)))


def test_normalize_does_not_change_the_users_tensor():
    tensor = torch.rand(3, 4, 4)
    before = tensor.clone()
    T.Compose([T.Normalize([0.5], [0.5])])(tensor)
    assert torch.equal(tensor, before)


def test_images_survive_the_way_to_pil_and_back(array):
    image = T.ToPILImage()(T.ToTensor()(array))
    assert image.mode == "RGB"
    assert difference(image, array)[0] == 0


def test_types_of_tensors_are_converted_by_their_ranges():
    levels = torch.tensor([0, 128, 255], dtype=torch.uint8)
    assert T.ConvertImageDtype(torch.float32)(levels).max() == 1
    assert torch.equal(T.ConvertImageDtype(torch.uint8)(levels.float() / 255), levels)


def test_whitening_makes_the_values_uncorrelated():
    torch.manual_seed(0)
    data = torch.rand(200, 1, 2, 2) @ torch.rand(2, 2)
    flat = data.flatten(1)
    values, vectors = torch.linalg.eigh(torch.cov(flat.T))
    whiten = T.LinearTransformation(vectors / (values + 1e-9).sqrt(), flat.mean(0))
    white = torch.stack([whiten(image) for image in data]).flatten(1)
    torch.testing.assert_close(torch.cov(white.T), torch.eye(4), atol=0.05, rtol=0)


def test_erasing_overwrites_a_rectangle():
    torch.manual_seed(0)
    tensor = torch.ones(3, 32, 32)
    erased = T.RandomErasing(p=1)(tensor)
    gone = (erased == 0).all(0)
    rows, columns = gone.any(1).sum(), gone.any(0).sum()
    assert 0 < gone.sum() == rows * columns
    assert tensor.min() == 1


def test_crops_of_corners_and_their_mirror_images(array):
    five, ten = T.FiveCrop(20)(array), T.TenCrop(20)(array)
    assert len(five) == 5
    assert len(ten) == 10
    np.testing.assert_array_equal(five[3], array[-20:, -20:])
    np.testing.assert_array_equal(ten[5], array[:, ::-1][:20, :20])


# -- draws -----------------------------------------------------------------------------------------


def test_a_thread_may_draw_from_a_generator_of_its_own(array):
    crop = T.RandomCrop(20)
    state = torch.get_rng_state()
    with base.seeded(7):
        one = crop(array)
    with base.seeded(7):
        again = crop(array)
    np.testing.assert_array_equal(one, again)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_crop_is_drawn():
    image = np.arange(4 * 5, dtype=np.uint8).reshape(4, 5)
    torch.manual_seed(0)
    corners = {int(T.RandomCrop((3, 3))(image)[0, 0]) for _ in range(200)}
    assert corners == {0, 1, 2, 5, 6, 7}


def test_a_choice_follows_its_probabilities():
    torch.manual_seed(0)
    choice = T.RandomChoice([lambda _: "a", lambda _: "b"], p=[1, 3])
    drawn = [choice(None) for _ in range(1000)]
    assert 680 < drawn.count("b") < 820


def test_what_is_random_and_what_may_run_in_threads_is_known():
    fixed = T.Compose([T.Resize(20), T.ColorJitter(), T.CenterCrop(16), T.ToTensor()])
    assert not is_random(fixed)
    assert is_thread_safe(fixed)
    assert is_random(T.Compose([T.Resize(20), T.RandomCrop(16)]))
    assert is_random(T.Compose([T.ColorJitter(0.1)]))
    own = T.Compose([T.Resize(20), T.Lambda(lambda image: image)])
    assert is_random(own)
    assert not is_thread_safe(own)


def test_the_size_that_suffices_is_that_of_the_first_resize():
    chain = T.Compose([T.ColorJitter(), T.Resize(256), T.RandomCrop(224), T.Resize(128)])
    assert sufficient_size(chain)(1000, 2000) == (256, 512)
    assert sufficient_size(T.Resize((30, 40)))(1000, 2000) == (30, 40)
    for chain in (
        None,
        T.Compose([T.RandomCrop(224), T.Resize(128)]),
        T.Resize(30, MODES.NEAREST),
        T.Resize(30, antialias=False),
        lambda image: image,
    ):
        assert sufficient_size(chain) is None


# -- errors ----------------------------------------------------------------------------------------

WRONG = {
    "size": (lambda i: T.Resize(0)(i), "size should be a positive integer"),
    "mode": (lambda i: T.Resize(9, "cubic")(i), "InterpolationMode"),
    "max_size": (lambda i: T.Resize(30, max_size=20)(i), "max_size"),
    "crop": (lambda i: T.RandomCrop(900)(i), "pad_if_needed"),
    "padding": (lambda i: F.pad(i, [1, 2, 3])(i), "padding must be"),
    "padding mode": (lambda i: F.pad(i, 1, padding_mode="wrap"), "padding_mode"),
    "kernel": (lambda i: F.gaussian_blur(i, 4), "odd"),
    "hue": (lambda i: T.ColorJitter(hue=0.7)(i), "hue must be"),
    "brightness": (lambda i: F.adjust_brightness(i, -1), "brightness_factor"),
    "bits": (lambda i: F.posterize(i, 9), "bits"),
    "fill": (lambda i: F.rotate(i, 3, fill=(1, 2)), "fill must be"),
    "no image": (lambda i: T.Resize(9)("photo.jpg"), "An image must be"),
    "no floats": (lambda i: T.Normalize([0], [1])(torch.zeros(3, 4, 4).int()), "floats"),
    "no tensor": (lambda i: T.Normalize([0], [1])(i), "apply ToTensor first"),
    "std": (lambda i: T.Normalize([0], [0])(torch.zeros(3, 4, 4)), "std must not be 0"),
    "no list": (lambda i: T.Compose(T.Resize(3)), "list of transforms"),
    "lambda": (lambda i: T.Lambda(3), "function"),
    "floats": (lambda i: F.equalize(i / 255), "uint8"),
    "degrees": (lambda i: T.RandomRotation(-3), "degrees"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_one_sentence(name, array):
    call, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        call(array)
