"""Arguments of ``fit`` that are for the parameter layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError
from bigdl.orca.parameter_layer.messages import codec_for
from bigdl.orca.parameter_layer.stragglers import DropStragglers

__all__ = ["LayerOptions", "layer_options"]

_GROUPS = {"shuffle": 10, "barrier": 100}
_SAMPLINGS = ("exact", "window")


@dataclass(frozen=True)
class LayerOptions:
    """Options of a training by the parameter layer.

    Attributes
    ----------
    transport : str
        ``"shuffle"`` or ``"barrier"``.
    group_size : int
        Steps of one Spark job, at most.
    compression : str
        Name of a codec.
    sampling : str
        ``"exact"``: every row once per epoch. ``"window"``: a batch is a run of consecutive rows
        of the epoch's order from a random place on, as in BigDL 2.x.
    stragglers : DropStragglers or None
        When contributions that come late are left out.
    min_workers : int or None
        With fewer slots than workers there are fewer slices of the weights, but at least so many;
        None leaves their number as it is.
    """

    transport: str = "shuffle"
    group_size: int = 10
    compression: str = "fp32"
    sampling: str = "exact"
    stragglers: DropStragglers | None = None
    min_workers: int | None = None

    @property
    def max_drop(self) -> float:
        """The largest share of a step's contributions that may be left out."""
        return 1.0 if self.stragglers is None else self.stragglers.max_drop_percentage

    def check(self, ranks: int) -> None:
        """Refuse what does not go with so many workers."""
        if self.stragglers is not None:
            self.stragglers.check(ranks)
        if self.min_workers is not None and self.min_workers > ranks:
            raise UsageError(
                f"min_workers should be at most the number of workers, {ranks}, got "
                f"{self.min_workers}"
            )


def layer_options(given: dict[str, Any]) -> LayerOptions:
    """Check the options that were given to ``fit``; those that were not have their defaults."""
    transport = check_choice("transport", given.get("transport", "shuffle"), tuple(_GROUPS))
    sampling = check_choice("sampling", given.get("sampling", "exact"), _SAMPLINGS)
    compression = given.get("compression", "fp32")
    codec_for(compression)
    size = check_integer("group_size", given.get("group_size", _GROUPS[transport]), 1)
    stragglers = given.get("drop_stragglers")
    if stragglers is not None:
        stragglers = DropStragglers.of(stragglers)
    fewest = given.get("min_workers")
    if fewest is not None:
        _check_elastic(check_integer("min_workers", fewest, 1), transport, compression)
    return LayerOptions(transport, size, compression, sampling, stragglers, fewest)


def _check_elastic(fewest: int, transport: str, compression: str) -> None:
    if transport != "shuffle":
        raise UsageError(
            f"min_workers={fewest} goes with transport='shuffle'; the workers of transport="
            f"{transport!r} must all run at once"
        )
    if codec_for(compression).feedback:
        raise UsageError(
            f"min_workers={fewest} does not go with compression={compression!r}, where every "
            "worker keeps what rounding took; use compression='bf16'"
        )
