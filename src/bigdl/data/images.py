"""Decoding of images in table columns to arrays of pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ImageDecoder"]


def decode_column(
    contents: pa.Array,
    size: tuple[int, int],
    reduced: bool = True,
    threads: ThreadPoolExecutor | None = None,
    skips: bool = False,
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Start decoding a column's images and resizing them to one size.

    Parameters
    ----------
    contents : pyarrow.Array
        Binary column of encoded images.
    size : (int, int)
        Height and width of the result; the aspect ratio is not preserved.
    reduced : bool
        Decode a JPEG at reduced scale if the result is still large enough.
    threads : ThreadPoolExecutor, optional
        Pool that decodes; by default the thread that requests the result decodes.
    skips : bool
        Mark rows that are not an image as invalid instead of raising a UsageError.

    Returns
    -------
    callable
        Waits for the decoding; returns the pixels, uint8 of shape ``(rows, height, width, 3)``, and
        a bool mask of the valid rows of shape ``(rows,)``.
    """
    height, width = size
    pixels = np.zeros((len(contents), height, width, 3), np.uint8)
    decode = _decoder(size, reduced)

    def decode_row(row: int) -> bool:
        data = contents[row].as_py()
        try:
            if data is None:
                raise UsageError("it is null", code="data-null")
            decode(data, pixels[row])
        except UsageError as error:
            if not skips:
                raise error.with_message(
                    f"An image of the batch cannot be decoded: {error}"
                ) from error
            return False
        return True

    rows = range(len(contents))
    running: Iterator[bool] = (
        map(decode_row, rows) if threads is None else threads.map(decode_row, rows)
    )
    return lambda: (pixels, np.fromiter(running, bool, len(contents)))


def _decoder(size: tuple[int, int], reduced: bool) -> Callable[[bytes, np.ndarray], None]:
    import cv2

    from bigdl.data.image_files import decode

    height, width = size

    def target_size(rows: int, columns: int) -> tuple[int, int]:
        return size

    def decode_into(data: bytes, target: np.ndarray) -> None:
        image = decode(data, target_size if reduced else None)
        if image.shape[:2] == size:
            target[...] = image
            return
        shrinks = image.shape[0] > height or image.shape[1] > width
        method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        cv2.resize(image, (width, height), dst=target, interpolation=method)

    return decode_into


class ImageDecoder:
    """Transform of :class:`TableLoader` that decodes image files in a column to a tensor.

    JPEGs are decoded by TurboJPEG if its library is installed, else by OpenCV; both give the values
    of Pillow and are several times as fast for small images. The reading threads of the loader
    decode different batches at the same time.

    Parameters
    ----------
    column : str
        Column of bytes: JPEG, PNG or another format that OpenCV or Pillow reads. The EXIF
        orientation is not applied.
    size : (int, int), optional
        Height and width to which images are resized; the aspect ratio is not preserved. A large
        JPEG is decoded at a reduced scale. By default all images of a batch must have one size.
    channels_first : bool, default True
        Return shape ``(rows, 3, height, width)``, in the memory order of ``torch.channels_last``.
        False returns ``(rows, height, width, 3)``.
    format : {"torch", "numpy"}, default "torch"
        Type of the result, a tensor or an ndarray.

    Raises
    ------
    MissingExtraError
        If OpenCV or Pillow is missing.
    UsageError
        If an image cannot be decoded, or the images of a batch differ in size.

    Examples
    --------
    >>> import io
    >>> import pyarrow as pa
    >>> from PIL import Image
    >>> from bigdl.data import ImageDecoder, TableLoader
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (32, 24)).save(file, "JPEG")
    >>> table = pa.table({"photo": [file.getvalue()] * 4, "label": [0, 1, 0, 1]})
    >>> loader = TableLoader(table, batch_size=2, transform=ImageDecoder("photo"))
    >>> batch = next(iter(loader))
    >>> batch["photo"].shape, batch["photo"].dtype
    (torch.Size([2, 3, 24, 32]), torch.uint8)
    """

    def __init__(
        self,
        column: str,
        size: tuple[int, int] | None = None,
        channels_first: bool = True,
        format: str = "torch",
    ) -> None:
        require("cv2", "nano")
        self.column = column
        self.size = None if size is None else _check_size(size)
        self.channels_first = channels_first
        self.format = check_choice("format", format, ("torch", "numpy"))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with decoded images in the column."""
        if self.column not in batch:
            raise UsageError(
                f"The batch has no column {self.column!r}; its columns are {sorted(batch)}",
                code="column-missing",
                column=self.column,
            )
        pixels: Any = self._pixels(batch[self.column])
        if self.format == "torch":
            import torch

            pixels = torch.from_numpy(pixels)
            if self.channels_first:
                pixels = pixels.permute(0, 3, 1, 2)
        elif self.channels_first:
            pixels = pixels.transpose(0, 3, 1, 2)
        return {**batch, self.column: pixels}

    def _pixels(self, contents: Sequence[bytes]) -> np.ndarray:
        if self.size is not None:
            pixels = np.empty((len(contents), *self.size, 3), np.uint8)
            decode_into = _decoder(self.size, True)
            for row, data in enumerate(contents):
                with self._errors():
                    decode_into(data, pixels[row])
            return pixels
        from bigdl.data.image_files import decode

        pixels = np.empty((len(contents), 0, 0, 3), np.uint8)
        for row, data in enumerate(contents):
            with self._errors():
                image = decode(data)
            if not row:
                pixels = np.empty((len(contents), *image.shape), np.uint8)
            if image.shape != pixels.shape[1:]:
                raise UsageError(
                    f"A batch of column {self.column!r} has images of {pixels.shape[1]} x "
                    f"{pixels.shape[2]} and {image.shape[0]} x {image.shape[1]} pixels; pass "
                    f"size=(height, width) to resize them",
                    code="data-shape",
                    column=self.column,
                )
            pixels[row] = image
        return pixels

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            raise error.with_message(
                f"An image of column {self.column!r} cannot be decoded: {error}"
            ) from error


def _check_size(size: object) -> tuple[int, int]:
    """Raise an error if a size is not a pair of positive numbers; return the pair."""
    if not isinstance(size, Sequence) or len(size) != 2:
        raise UsageError(
            f"size must be (height, width), got {size!r}", code="argument-value", argument="size"
        )
    height, width = (check_integer("size", value, least=1) for value in size)
    return height, width
