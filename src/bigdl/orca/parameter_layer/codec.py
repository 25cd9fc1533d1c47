"""How numbers travel: compressed on the way, summed in float32 where they arrive.

BigDL 2.x cut float32 to its upper two bytes and summed in that form, which shrinks a gradient a
little with every worker.  Here 16 bit formats round to the nearest (ties to even), and the sum is
made in float32, at the same number of bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from bigdl.common.checks import check_choice

__all__ = ["CODECS", "Codec", "codec_for"]


class Codec(ABC):
    """Bytes of a vector of float32 and back.

    Attributes
    ----------
    feedback : bool
        Whether what a rank lost by encoding is added to its next gradient ("1-bit SGD", Seide et
        al. 2014).
    weights : str
        Name of the codec in which weights travel beside gradients in this one.
    """

    feedback = False
    weights: str

    @abstractmethod
    def encode(self, vector: np.ndarray):
        """The vector as something bytes-like of so many bytes; perhaps a view of it."""

    @abstractmethod
    def decode(self, data) -> np.ndarray:
        """A vector of float32, perhaps read-only, from bytes of :meth:`encode`."""


class _Float32(Codec):
    weights = "fp32"

    def encode(self, vector):
        return np.ascontiguousarray(vector, dtype=np.float32).view(np.uint8)

    def decode(self, data):
        return np.frombuffer(data, np.float32)


class _Float16(Codec):
    weights = "fp16"

    def encode(self, vector):
        largest = np.finfo(np.float16).max
        # an infinity would stay in the weights for ever
        with np.errstate(over="ignore"):
            half = vector.astype(np.float16)
        overflown = np.isinf(half) & np.isfinite(vector)
        if overflown.any():
            half[overflown] = np.copysign(largest, vector[overflown]).astype(np.float16)
        return half.tobytes()

    def decode(self, data):
        return np.frombuffer(data, np.float16).astype(np.float32)


class _BFloat16(Codec):
    weights = "bf16"

    def encode(self, vector):
        bits = np.ascontiguousarray(vector, dtype=np.float32).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        upper = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
        broken = np.isnan(vector)
        if broken.any():  # rounding a nan up may give an infinity or a zero
            upper[broken] = 0x7FC0
        return upper.tobytes()

    def decode(self, data):
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


class _Int8(Codec):
    """Integers from -127 to 127, with a scale for each block of numbers."""

    feedback = True
    weights = "bf16"

    _BLOCK = 1024

    def encode(self, vector):
        blocks = -(-len(vector) // self._BLOCK)
        padded = np.zeros(blocks * self._BLOCK, np.float32)
        padded[: len(vector)] = vector
        rows = padded.reshape(blocks, self._BLOCK)
        scales = np.abs(rows).max(axis=1) / np.float32(127)
        safe = np.where(scales > 0, scales, np.float32(1))
        with np.errstate(invalid="ignore"):
            whole = np.rint(rows / safe[:, None]).astype(np.int8)
        return scales.tobytes() + whole.reshape(-1)[: len(vector)].tobytes()

    def decode(self, data):
        size = memoryview(data).nbytes
        count = size - 4 * -(-size // (self._BLOCK + 4))
        blocks = -(-count // self._BLOCK)
        scales = np.frombuffer(data, np.float32, blocks)
        values = np.frombuffer(data, np.int8, count, 4 * blocks).astype(np.float32)
        values *= np.repeat(scales, self._BLOCK)[:count]
        return values


CODECS: dict[str, Codec] = {
    "fp32": _Float32(),
    "fp16": _Float16(),
    "bf16": _BFloat16(),
    "int8": _Int8(),
}


def codec_for(name: str) -> Codec:
    """Return the codec of a name."""
    return CODECS[check_choice("compression", name, CODECS)]
