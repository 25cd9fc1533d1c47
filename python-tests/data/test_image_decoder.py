"""ImageDecoder: a transform of TableLoader that decodes image files."""

import io

import numpy as np
import pyarrow as pa
import pytest

from bigdl.common.errors import UsageError
from bigdl.data import ImageDecoder, TableLoader

torch = pytest.importorskip("torch")
pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")


def encoded(height, width, seed, format="JPEG"):
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8))
    file = io.BytesIO()
    image.resize((width, height)).save(file, format)
    return file.getvalue()


def table_of(images):
    return pa.table({"photo": images, "number": range(len(images))})


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_images_equal_those_of_pillow_and_stay_with_their_rows(format):
    images = [encoded(20, 30, seed, format) for seed in range(40)]
    loader = TableLoader(
        table_of(images), batch_size=16, shuffle="global", transform=ImageDecoder("photo")
    )
    count = 0
    for batch in loader:
        assert batch["photo"].is_contiguous(memory_format=torch.channels_last)
        for pixels, number in zip(batch["photo"], batch["number"].tolist(), strict=True):
            expected = np.asarray(Image.open(io.BytesIO(images[number])).convert("RGB"))
            np.testing.assert_array_equal(pixels.permute(1, 2, 0).numpy(), expected)
            count += 1
    assert count == 40


def test_a_size_resizes_images_of_different_sizes_also_without_torch():
    images = [encoded(20 + seed, 30, seed) for seed in range(5)]
    decoder = ImageDecoder("photo", size=(8, 9), channels_first=False, format="numpy")
    batch = decoder({"photo": images})
    assert batch["photo"].shape == (5, 8, 9, 3)
    assert batch["photo"].dtype == np.uint8
    assert decoder({"photo": []})["photo"].shape == (0, 8, 9, 3)
    assert ImageDecoder("photo")({"photo": []})["photo"].shape == (0, 3, 0, 0)


def test_wrong_images_and_arguments_are_refused():
    with pytest.raises(UsageError, match="20 x 30 and 21 x 30") as caught:
        ImageDecoder("photo")({"photo": [encoded(20, 30, 0), encoded(21, 30, 1)]})
    assert caught.value.code == "data-shape"
    with pytest.raises(UsageError, match="'photo' cannot be decoded"):
        ImageDecoder("photo")({"photo": [b"no image"]})
    with pytest.raises(UsageError, match="'photo'") as caught:
        ImageDecoder("photo")({"number": [1]})
    assert caught.value.code == "column-missing"
    for size in (8, (8,), (0, 8), "88"):
        with pytest.raises(UsageError, match="size"):
            ImageDecoder("photo", size=size)
