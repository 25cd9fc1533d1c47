"""The nesting of a model's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigdl.nano.acceleration.structure import Structure, flatten

__all__ = ["MetaData"]


class MetaData:
    """Takes outputs apart and puts them together. The spelling of its names is the old one."""

    @staticmethod
    def construct_matadata(outputs: Any) -> Structure:
        """How the tensors of `outputs` are nested; ``to_json`` writes it."""
        return flatten(outputs)[1]

    @staticmethod
    def reconstruct_output(outputs: Sequence[Any], metadata: Structure) -> Any:
        """A flat sequence of tensors or ndarrays, nested as `metadata` says.

        One tensor may be given without a sequence around it.
        """
        single = not isinstance(outputs, (list, tuple))
        return metadata.rebuild([outputs] if single else outputs)
