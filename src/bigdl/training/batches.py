"""Which rows form the batches of a run, as all its workers agree on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.batches import BatchPlan
from bigdl.training.run_settings import RunSettings

__all__ = ["Batches", "exchange", "planned"]


@dataclass(frozen=True)
class Batches:
    """What the batches of a run depend on.

    Attributes
    ----------
    rows, fingerprint : sequence of int
        Of every worker's shard.
    windows : sequence of int
        Rows of every worker that are shuffled at a time; 0 for all of them.
    """

    seed: int
    batch_size: int
    rows: Sequence[int]
    fingerprint: Sequence[int]
    shuffle: bool
    drop_last: bool
    windows: Sequence[int] = ()

    def check(self, manifest: dict, rank: int) -> None:
        """In the middle of an epoch the batches must be those of the run that was interrupted."""
        for key in ("batch_size", "seed", "shuffle", "drop_last", "rows"):
            own = getattr(self, key)
            if manifest[key] != own:
                raise UsageError(
                    f"The checkpoint was taken in the middle of an epoch with {key}="
                    f"{manifest[key]}, now it is {own}; go on with the same data, seed, "
                    "batch_size and number of workers, or from a checkpoint of an epoch's end"
                )
        if manifest["fingerprint"] != self.fingerprint and rank == 0:
            print(
                "The rows or their order differ from those of the interrupted run, so the result "
                "will not equal that of an uninterrupted one",
                flush=True,
            )


def planned(settings: RunSettings, known: Sequence[dict]) -> tuple[BatchPlan, Batches]:
    """The batches of a run.

    Parameters
    ----------
    settings : RunSettings
    known : sequence of dict
        For every worker ``rows``, ``fingerprint``, ``window`` and ``drop_last`` of its data.

    Raises
    ------
    UsageError
        If there would be no batch at all.
    """
    rows = [each["rows"] for each in known]
    if not sum(rows):
        raise UsageError("The training data has no rows")
    drop_last = settings.drop_last or any(each["drop_last"] for each in known)
    plan = BatchPlan(rows, settings.batch_size, drop_last)
    if not plan.steps:
        raise UsageError(
            f"drop_last leaves no batch: the data has {sum(rows)} rows and batch_size is "
            f"{settings.batch_size}"
        )
    batches = Batches(
        seed=settings.seed,
        batch_size=settings.batch_size,
        rows=rows,
        fingerprint=[each["fingerprint"] for each in known],
        shuffle=settings.shuffle,
        drop_last=drop_last,
        windows=[each["window"] for each in known],
    )
    return plan, batches


def exchange(sync, own: Any) -> list:
    """JSON-able values of every rank, on every rank; a collective."""
    gathered = sync.gather(json.dumps(own).encode())
    both = None if gathered is None else b"[" + b",".join(gathered) + b"]"
    return json.loads(sync.broadcast(both))
