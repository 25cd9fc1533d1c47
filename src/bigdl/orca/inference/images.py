"""Decoding of images in binary columns to arrays of pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa


def decode_images(
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

    from bigdl.nano.pytorch.vision.datasets.decoding import decode

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
