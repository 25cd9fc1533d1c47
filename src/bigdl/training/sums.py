"""What an epoch adds up to."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass

__all__ = ["EpochSums"]


@dataclass
class EpochSums:
    """Sums over the steps of an epoch in one worker; part of a checkpoint inside an epoch.

    ``loss`` adds up so that the sum over the workers divided by the sum of what they count is the
    mean loss of the samples; a sample counts 1 or its weight.
    """

    loss: float = 0.0
    rows: float = 0.0
    batches: float = 0.0
    last_loss: float = 0.0
    epoch_s: float = 0.0
    fetch_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    counted: float = 0.0
    last_counted: float = 0.0

    def add(
        self, loss: float, counted: float, rows: int, *, fetch_s, forward_s, backward_s, step_s
    ) -> None:
        """Add one step; without rows its loss is 0 and its times do not count as a batch."""
        self.loss += loss
        self.counted += counted
        self.rows += rows
        self.batches += bool(rows)
        self.last_loss, self.last_counted = loss, counted
        self.fetch_s += fetch_s
        self.forward_s += forward_s
        self.backward_s += backward_s
        self.epoch_s += step_s

    def mean(self) -> float | None:
        """Mean loss of this worker's samples so far."""
        return self.loss / self.counted if self.counted else None

    def values(self) -> tuple[float, ...]:
        return tuple(float(value) for value in astuple(self))

    def to_json(self) -> dict:
        return asdict(self)

    def reduce(self, sync) -> dict | None:
        """Figures of all workers, the same on every rank; None if nobody did anything."""
        everyone = [EpochSums(*values) for values in sync.all_gather(self.values())]
        rows = sum(s.rows for s in everyone)
        if not rows:
            return None
        counted = sum(s.counted for s in everyone)
        last = sum(s.last_counted for s in everyone)
        batches = max(1.0, sum(s.batches for s in everyone))
        return {
            "batch_count": sum(s.batches for s in everyone) / len(everyone),
            "num_samples": int(rows),
            "train_loss": sum(s.loss for s in everyone) / counted if counted else None,
            "last_train_loss": sum(s.last_loss for s in everyone) / last if last else None,
            "profile": {
                "mean_train_epoch_s": sum(s.epoch_s for s in everyone) / len(everyone),
                "mean_fetch_s": sum(s.fetch_s for s in everyone) / batches,
                "mean_fwd_s": sum(s.forward_s for s in everyone) / batches,
                "mean_bwd_s": sum(s.backward_s for s in everyone) / batches,
            },
            "workers": [
                {
                    "batch_count": int(s.batches),
                    "num_samples": int(s.rows),
                    "train_loss": s.mean(),
                    "last_train_loss": s.last_loss / s.last_counted if s.last_counted else None,
                }
                for s in everyone
            ],
        }
