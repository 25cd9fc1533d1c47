"""Transforms are torchvision's: by recorded values, and by itself where it can be imported.

``RECORDED`` holds height, width and a weighted sum of the pixels of what torchvision 0.28.0 with
Pillow 13.0 gives for ``image(mode)``; ``python test_vision_against_torchvision.py`` prints it.
"""

import importlib

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused

from bigdl.nano.pytorch.vision import transforms as T
from bigdl.nano.pytorch.vision.transforms import functional as F

CASES = {
    "rotate 90 in a larger frame": lambda F, M, i: F.rotate(i, 90, expand=True),
    "rotate 270 in a larger frame": lambda F, M, i: F.rotate(i, 270, M.BILINEAR, True),
    "rotate 90": lambda F, M, i: F.rotate(i, 90, fill=9),
    "rotate about a point in a larger frame": lambda F, M, i: F.rotate(
        i, 30, M.BICUBIC, True, (3.5, 7)
    ),
    "rotate by 400 about a corner": lambda F, M, i: F.rotate(
        i, 400, expand=True, center=(0, 0), fill=0.5
    ),
    "affine": lambda F, M, i: F.affine(i, 30, [2, -3], 1.2, [10.0, 5.0], M.BILINEAR, 9, [4, 5]),
    "affine by half pixels": lambda F, M, i: F.affine(i, 0, [1.5, 2.5], 1.0, [0.0]),
    "perspective": lambda F, M, i: F.perspective(
        i, [[0, 0], [15, 0], [15, 15], [0, 15]], [[2, 1], [13, 3], [14, 14], [1, 12]], M.NEAREST
    ),
    "pad": lambda F, M, i: F.pad(i, (1, 2, 3, 4), 7),
    "pad and cut": lambda F, M, i: F.pad(i, [2, -1]),
    "pad wider than the image": lambda F, M, i: F.pad(i, 20, padding_mode="symmetric"),
    "resize to nearest": lambda F, M, i: F.resize(i, [5, 31], M.NEAREST),
    "resize by hamming": lambda F, M, i: F.resize(i, 9, M.HAMMING),
    "gamma": lambda F, M, i: F.adjust_gamma(i, 2.2, 1.1),
    "contrast": lambda F, M, i: F.adjust_contrast(i, 1.7),
    "center crop of a small image": lambda F, M, i: F.center_crop(i, (40, 8)),
    "elastic": lambda F, M, i: F.elastic_transform(i, displacement(i), M.BILINEAR, 9),
}
SIZE = (17, 24)
RECORDED = {
    ("rotate 90 in a larger frame", "RGB"): [24, 17, 6961222],
    ("rotate 90 in a larger frame", "L"): [24, 17, 1891926],
    ("rotate 270 in a larger frame", "RGB"): [24, 17, 6928426],
    ("rotate 270 in a larger frame", "L"): [24, 17, 1936002],
    ("rotate 90", "RGB"): [17, 24, 5398654],
    ("rotate 90", "L"): [17, 24, 1383205],
    ("rotate about a point in a larger frame", "RGB"): [27, 30, 6272541],
    ("rotate about a point in a larger frame", "L"): [27, 30, 1832026],
    ("rotate by 400 about a corner", "RGB"): [29, 30, 5218345],
    ("rotate by 400 about a corner", "L"): [29, 30, 1492884],
    ("affine", "RGB"): [17, 24, 6707549],
    ("affine", "L"): [17, 24, 1754596],
    ("affine by half pixels", "RGB"): [17, 24, 5716888],
    ("affine by half pixels", "L"): [17, 24, 1604090],
    ("perspective", "RGB"): [17, 24, 4273972],
    ("perspective", "L"): [17, 24, 1200004],
    ("pad", "RGB"): [23, 28, 7125250],
    ("pad", "L"): [23, 28, 2042997],
    ("pad and cut", "RGB"): [15, 28, 6206777],
    ("pad and cut", "L"): [15, 28, 1720565],
    ("pad wider than the image", "RGB"): [57, 64, 63315431],
    ("pad wider than the image", "L"): [57, 64, 17632184],
    ("resize to nearest", "RGB"): [5, 31, 2635570],
    ("resize to nearest", "L"): [5, 31, 667652],
    ("resize by hamming", "RGB"): [9, 12, 1738979],
    ("resize by hamming", "L"): [9, 12, 528921],
    ("gamma", "RGB"): [17, 24, 3744671],
    ("gamma", "L"): [17, 24, 860954],
    ("contrast", "RGB"): [17, 24, 6747096],
    ("contrast", "L"): [17, 24, 2031579],
    ("center crop of a small image", "RGB"): [40, 8, 2692736],
    ("center crop of a small image", "L"): [40, 8, 591470],
    ("elastic", "RGB"): [17, 24, 6452153],
    ("elastic", "L"): [17, 24, 1877906],
}


def values(channels, size=SIZE):
    """Smooth colours with edges, the same on every machine."""
    y, x = np.mgrid[: size[0], : size[1]]
    planes = [
        (3 * (k + 1) * x + 5 * y) % 200 + 50 * ((x // 5 + y // 4) % 2) for k in range(channels)
    ]
    return np.stack(planes, -1).astype(np.uint8)


def image(mode, size=SIZE):
    if mode in ("L", "I;16", "I", "F"):
        dtype = {"L": np.uint8, "I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
        return Image.fromarray(values(1, size)[:, :, 0].astype(dtype))
    return Image.fromarray(values(3, size)).convert(mode)


def displacement(img):
    y, x = np.mgrid[: img.height, : img.width]
    shifts = np.stack([np.sin(x + y) / 12, np.cos(x - 2 * y) / 9], -1)[None]
    return torch.from_numpy(shifts.astype(np.float32))


def summary(result):
    """Return height, width and a sum in which each place has a weight."""
    array = np.asarray(result).astype(np.float64)
    weights = np.arange(array.size).reshape(array.shape) % 97 + 1
    return [*array.shape[:2], round(float((array * weights).sum()))]


def torchvision():
    """Return torchvision's transforms, or skip."""
    try:
        return importlib.import_module("torchvision.transforms")
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", CASES)
def test_a_pil_image_becomes_what_torchvision_recorded(name, mode):
    result = CASES[name](F, T.InterpolationMode, image(mode))
    assert result.mode == mode
    assert summary(result) == RECORDED[name, mode]


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "I;16", "I", "F", "P", "1", "CMYK"])
@pytest.mark.parametrize("name", CASES)
def test_a_pil_image_becomes_what_torchvision_makes_of_it(name, mode):
    theirs = torchvision()
    for size in (SIZE, (24, 17), (16, 16)):
        source = image(mode, size)
        try:
            expected = CASES[name](theirs.functional, theirs.InterpolationMode, source.copy())
        except (TypeError, ValueError, OSError):
            continue  # it refuses this mode
        result = CASES[name](F, T.InterpolationMode, source)
        if expected.mode == mode:  # torchvision pads CMYK to RGBA
            np.testing.assert_allclose(np.asarray(result), np.asarray(expected), atol=0.02)
        assert result.mode == mode


DRAWN = {
    "RandomCrop": (20, 4),
    "RandomResizedCrop": (16,),
    "RandomRotation": (30,),
    "RandomAffine": (10, (0.1, 0.1), (0.8, 1.2), 5),
    "RandomPerspective": (0.5, 1.0),
    "ElasticTransform": (30.0, 3.0),
    "ColorJitter": (0.4, 0.4, 0.4, 0.1),
    "RandomHorizontalFlip": (),
    "RandomGrayscale": (0.5,),
    "RandomPosterize": (3,),
}


@pytest.mark.parametrize("name", DRAWN)
def test_an_equal_seed_draws_what_torchvision_draws(name):
    theirs = torchvision()
    for seed in range(5):
        torch.manual_seed(seed)
        expected = getattr(theirs, name)(*DRAWN[name])(image("RGB"))
        torch.manual_seed(seed)
        result = getattr(T, name)(*DRAWN[name])(image("RGB"))
        within = 1 if name == "ElasticTransform" else 0  # its displacements are sums of floats
        np.testing.assert_allclose(
            np.asarray(result).astype(int), np.asarray(expected).astype(int), atol=within
        )


def test_params_are_drawn_as_a_program_for_torchvision_draws_them():
    torch.manual_seed(0)
    picture = image("RGB")
    top, left, height, width = T.RandomCrop.get_params(picture, output_size=(5, 6))
    assert F.crop(picture, top, left, height, width).size == (6, 5)
    part = T.RandomResizedCrop.get_params(picture, scale=[0.5, 1.0], ratio=[0.7, 1.4])
    assert F.resized_crop(img=picture, top=part[0], left=0, height=9, width=9, size=4).size == (
        4,
        4,
    )
    assert -5 <= T.RandomRotation.get_params([-5, 5]) <= 5
    angle, moved, scale, shear = T.RandomAffine.get_params([0, 0], [0.5, 0.5], None, None, [24, 17])
    assert (angle, scale, shear) == (0, 1.0, (0.0, 0.0))
    assert abs(moved[0]) <= 12
    start, end = T.RandomPerspective.get_params(24, 17, 0.5)
    assert np.abs(np.array(start) - end).max() <= 6
    order, brightness, *others = T.ColorJitter.get_params([0.5, 0.6], None, None, None)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert 0.5 <= brightness <= 0.6
    assert others == [None] * 3
    assert T.ElasticTransform.get_params([5.0, 5.0], [1.5, 1.5], [17, 24]).shape == (1, 17, 24, 2)


@pytest.mark.parametrize("size", [SIZE, (24, 17), (16, 16), (3, 3), (5, 7)])
@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_of_any_size_become_what_pillow_makes_of_them(size, channels):
    array = values(channels, size)
    picture = Image.fromarray(array if channels == 3 else array[:, :, 0])
    for name in [name for name in CASES if "elastic" not in name]:
        result = CASES[name](F, T.InterpolationMode, array)
        expected = np.asarray(CASES[name](F, T.InterpolationMode, picture))
        assert result.shape == (*expected.shape[:2], channels), name
        distance = np.abs(result.astype(int) - expected.reshape(result.shape))
        # Bicubic filters differ; single pixels at an edge lie inside or outside.
        assert np.quantile(distance, 0.97) <= (6 if "point" in name else 1), name


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "uint16", "int16", "float16"])
def test_operations_that_move_pixels_take_every_type_and_keep_it(dtype):
    array = values(1)[:, :, 0].astype(np.int64) * 2**40 if dtype == "int64" else values(1)[:, :, 0]
    array = array > 99 if dtype == "bool" else array.astype(dtype)
    moved = {
        "pad": F.pad(array, 2)[2:-2, 2:-2],
        "edge": F.pad(array, 2, padding_mode="edge")[2:-2, 2:-2],
        "rotate": F.rotate(F.rotate(array, 90, expand=True), -90, expand=True),
        "affine": F.affine(array, 360, [0, 0], 1.0, 0.0),
        "elastic": F.elastic_transform(
            array, torch.zeros(1, *SIZE, 2), T.InterpolationMode.NEAREST
        ),
        "resize": F.resize(F.resize(array, (34, 48), T.InterpolationMode.NEAREST), SIZE, "nearest"),
    }
    for name, result in moved.items():
        assert result.dtype == array.dtype, name
        np.testing.assert_array_equal(result, array, err_msg=name)
    assert F.resize(array, 9).dtype == array.dtype


def test_sixteen_bits_and_floats_follow_bytes():
    array = values(3)
    wide, floats = array.astype(np.uint16) * 257, array.astype(np.float32) / 255
    M = T.InterpolationMode
    operations = {
        "resize": lambda i: F.resize(i, 9),
        "resize by box": lambda i: F.resize(i, 9, M.BOX),
        "rotate": lambda i: F.rotate(i, 30, M.BICUBIC),
        "affine": lambda i: F.affine(i, 30, [2, -3], 1.2, [10.0, 5.0], M.BILINEAR),
        "brightness": lambda i: F.adjust_brightness(i, 0.6),
        "contrast": lambda i: F.adjust_contrast(i, 1.4),
        "saturation": lambda i: F.adjust_saturation(i, 1.4),
        "sharpness": lambda i: F.adjust_sharpness(i, 0.4),
        "gamma": lambda i: F.adjust_gamma(i, 2.0),
        "invert": F.invert,
        "autocontrast": F.autocontrast,
        "blur": lambda i: F.gaussian_blur(i, 5),
    }
    for name, operation in operations.items():
        expected = operation(array) / 255.0
        np.testing.assert_allclose(operation(wide) / 65535.0, expected, atol=0.017, err_msg=name)
        of_floats = np.clip(operation(floats), 0, 1)  # bicubic filters overshoot
        np.testing.assert_allclose(of_floats, expected, atol=0.017, err_msg=name)


def test_changes_of_colours_leave_alpha_alone():
    array = values(4)
    for change in (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_gamma):
        changed = change(array, 0.4)
        np.testing.assert_array_equal(changed[:, :, 3], array[:, :, 3])
        np.testing.assert_array_equal(changed[:, :, :3], change(array[:, :, :3].copy(), 0.4))


@pytest.mark.parametrize("channels", [2, 5, 6])
def test_any_number_of_channels_is_warped_channel_by_channel(channels):
    array = values(channels)
    for mode in (T.InterpolationMode.NEAREST, T.InterpolationMode.BILINEAR):
        for operation in (
            lambda i, mode=mode: F.rotate(i, 20, mode, fill=9),
            lambda i: F.pad(i, 2, 9),
            lambda i, mode=mode: F.resize(i, 7, mode),
        ):
            together = operation(array)
            for channel in range(channels):
                alone = operation(array[:, :, channel].copy())
                assert np.abs(together[:, :, channel].astype(int) - alone).max() <= 2


def test_modes_of_pil_images_survive_borders_and_palettes_are_not_mixed():
    for mode in ("P", "CMYK", "HSV", "YCbCr", "LA"):
        assert F.pad(image(mode), 2).mode == mode
        assert F.pad(image(mode), 2, padding_mode="edge").mode == mode
    palette = image("P")
    inner = F.pad(palette, 2).crop((2, 2, 26, 19)).convert("RGB")
    np.testing.assert_array_equal(np.asarray(inner), np.asarray(palette.convert("RGB")))
    with refused("data-type"):
        F.gaussian_blur(palette, 3)


def test_tensors_take_the_nearest_pixel_as_torch_does():
    tensor = torch.from_numpy(values(1)[None, :, :, 0])
    for mode in ("nearest", "nearest-exact"):
        expected = torch.nn.functional.interpolate(tensor[None].float(), (7, 10), mode=mode)[0]
        assert torch.equal(F.resize(tensor, (7, 10), mode).float(), expected)


def test_to_tensor_keeps_types_that_are_not_bytes():
    assert T.ToTensor()(image("I")).dtype == torch.int32
    assert T.ToTensor()(image("F")).dtype == torch.float32
    wide = Image.fromarray(np.full((2, 2), 65535, np.uint16))
    assert T.ToTensor()(wide).max() == 65535  # torchvision gives -1
    labels = np.array([[2**40 + 1]])
    assert T.ToTensor()(labels).item() == 2**40 + 1
    assert T.ToTensor()(np.zeros((2, 2), bool)).dtype == torch.bool


def test_to_pil_image_takes_the_mode_as_what_the_channels_are():
    array = values(3)
    np.testing.assert_array_equal(np.asarray(F.to_pil_image(array, "HSV")), array)
    floats = torch.linspace(0, 1, 6).reshape(1, 2, 3)
    np.testing.assert_array_equal(np.asarray(F.to_pil_image(floats, "F")), floats[0].numpy())
    with refused("data-dtype", "3", "int16"):
        F.to_pil_image(array.astype(np.int16))


def test_floats_do_not_overflow_as_integers():
    ones = torch.ones(1, 1, 1)
    assert F.convert_image_dtype(ones, torch.int32).item() == 2**31 - 1
    with refused("data-dtype", "int64"):
        F.convert_image_dtype(ones, torch.int64)


if __name__ == "__main__":
    theirs = importlib.import_module("torchvision.transforms")
    for case, call in CASES.items():
        for mode in ("RGB", "L"):
            done = call(theirs.functional, theirs.InterpolationMode, image(mode))
            print(f"    ({case!r}, {mode!r}): {summary(done)},")
