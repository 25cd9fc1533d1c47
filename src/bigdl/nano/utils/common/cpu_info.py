"""Which instruction sets the processor has that an acceleration method may need."""

from __future__ import annotations

from bigdl.common.cpu import isa_flags

__all__ = ["CPUInfo"]


class CPUInfo:
    """Instruction sets of this machine's processors, read when the object is made.

    Attributes
    ----------
    flags : frozenset of str
        All of them, as Linux spells them (see :func:`bigdl.common.cpu.isa_flags`).
    has_avx, has_avx2, has_avx512 : bool
        Vectors of 256 bits, with integers, and of 512 bits.
    has_vnni : bool
        Products of int8 are summed in one instruction, on vectors of 512 or 256 bits.
    has_amx : bool
        Products of tiles.
    has_bf16 : bool
        Products of bfloat16 are computed in hardware, in vectors or in tiles.
    """

    def __init__(self) -> None:
        self.flags = isa_flags()
        self.has_avx = self._has("avx")
        self.has_avx2 = self._has("avx2")
        self.has_avx512 = self._has("avx512f")
        self.has_vnni = self._has("avx512_vnni", "avx_vnni")
        self.has_amx = self._has("amx_tile")
        self.has_bf16 = self._has("avx512_bf16", "amx_bf16", "bf16")

    def _has(self, *names: str) -> bool:
        return not self.flags.isdisjoint(names)


def _avx2_checker() -> bool:
    return CPUInfo().has_avx2


def _avx512_checker() -> bool:
    return CPUInfo().has_avx512


def _bf16_checker() -> bool:
    return CPUInfo().has_bf16
