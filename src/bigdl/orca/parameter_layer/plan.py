"""What all ranks of a training know: its plan, and the steps of a group."""

from __future__ import annotations

from dataclasses import dataclass

from bigdl.orca.parameter_layer.geometry import Geometry

__all__ = ["LayerPlan", "Step"]


@dataclass(frozen=True)
class Step:
    """One step of the training.

    Attributes
    ----------
    epoch, number : int
        Which batch of which epoch.
    hyper : tuple of dict
        The optimizer's parameter groups in this step, without their parameters: schedules are
        worked out before a group of steps begins, so they are exact within it.
    ranges : tuple of (int, int)
        For every rank, the rows of the batch: positions in the rank's order of the epoch.
    limit : float, optional
        Seconds after which nobody waits for the contribution of a rank any more.
    """

    epoch: int
    number: int
    hyper: tuple[dict, ...]
    ranges: tuple[tuple[int, int], ...] = ()
    limit: float | None = None

    def rows(self, rank: int) -> int:
        """How many rows of the batch a rank has; 0 where that is not known."""
        if not self.ranges:
            return 0
        start, stop = self.ranges[rank]
        return stop - start


@dataclass(frozen=True)
class LayerPlan:
    """What all ranks know of a training.

    Attributes
    ----------
    sizes : tuple of int
        Elements of the parameters, in the order of the optimizer's groups.
    groups : tuple of int
        The parameter group of each.
    optimizer : type
    ranks : int
        Parts of the rows, each of which contributes to every step.
    compression : str
        Name of a codec.
    sums : bool
        Whether the loss adds up over the rows instead of averaging.
    clamp : tuple of (float, float), optional
        Every element of the gradient is brought into this range.
    norm : float, optional
        The whole gradient is scaled down to this L2 norm, after that.
    slices : int, optional
        Slices of the weights, owned by the first so many ranks; default one for each rank. What is
        computed does not depend on it.
    max_drop : float
        If more than this share of the contributions to a step is late, the step is discarded.
    slack : float
        Added to the L2 norm that a gradient has; default as in ``torch.nn.utils.clip_grad_norm_``.
    with_norms : bool
        Let the optimizer look at norms of whole parameters, whatever its class says.
    """

    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    optimizer: type
    ranks: int
    compression: str = "fp32"
    sums: bool = False
    clamp: tuple[float, float] | None = None
    norm: float | None = None
    slices: int | None = None
    max_drop: float = 1.0
    slack: float = 1e-6
    with_norms: bool = False

    @property
    def owners(self) -> int:
        """How many slices there are."""
        return self.ranks if self.slices is None else self.slices

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.sizes, self.owners)

    @property
    def needs_norms(self) -> bool:
        """Whether the optimizer looks at norms of whole parameters."""
        return self.with_norms or getattr(self.optimizer, "needs_norms", False)

    @property
    def needs_statistics(self) -> bool:
        """Whether ranks tell each other about their sums before the update."""
        return self.norm is not None or self.needs_norms
