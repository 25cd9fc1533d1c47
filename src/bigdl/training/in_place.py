"""Recovery of a fit in place, by the workers that survive the loss of another one.

The weights, the optimizer and the schedule are equal on all ranks.  The rest of a rank's state is
small: the sums of its losses, and buffers such as running means.  In every step the ranks exchange
it, together with the sum of the gradients or, if it is large, during the computation of them, and
update the weights only after both have succeeded.  So a rank that has updated its weights knows the
state of every rank after this step, and all ranks have either made the step or can make it again.
Random numbers are derived from (seed, epoch, step, rank).

After a loss, the ranks with the newest state keep it, and one of them sends it to the others: the
replacement, and ranks that had not updated their weights yet (:mod:`bigdl.runtime.recovery`).
"""

from __future__ import annotations

import gc
import json
import zlib
from dataclasses import astuple, fields
from typing import TYPE_CHECKING, Any, Protocol, cast

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import LEAVE_GROUP_S
from bigdl.runtime.engine import PeerLost
from bigdl.runtime.recovery import Report, await_group
from bigdl.training.checkpoint import Checkpoint, in_thread
from bigdl.training.metrics import EpochSums
from bigdl.training.state import dumps, loads
from bigdl.training.timing import StepSums

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from bigdl.runtime.collectives.base import GradientSync
    from bigdl.runtime.worker import Worker
    from bigdl.training.batches import BatchLayout
    from bigdl.training.position import Position
    from bigdl.training.state import RunningState

_TABLE = "table.pt"
_CARRIED_VALUES = 4096  # the sum of gradients carries the state of all ranks up to this size
SUMS = len(fields(EpochSums))
"""Number of sums at the start of a rank's vector."""


def sums_vector(sums: EpochSums, *values: float) -> torch.Tensor:
    """Return sums and further numbers as a vector of float64."""
    import torch

    return torch.tensor([*astuple(sums), *values], dtype=torch.float64)


def flat_values(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors as a vector of float64, which keeps values of any dtype."""
    import torch

    parts = [value.reshape(-1).view(torch.uint8) for value in values]
    padding = torch.zeros(-sum(map(len, parts)) % 8, dtype=torch.uint8)
    return torch.cat([*parts, padding]).view(torch.float64)


def joined(*vectors: torch.Tensor) -> torch.Tensor:
    """Concatenate vectors."""
    import torch

    return torch.cat(vectors)


def shaped_values(vector: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Divide a vector of :func:`flat_values` into tensors like the given ones."""
    import torch

    sizes = [each.numel() * each.itemsize for each in like]
    content = vector.contiguous().view(torch.uint8)[: sum(sizes)]
    return [  # a copy, since a view of another dtype has to be aligned
        part.clone().view(each.dtype).view(each.shape)
        for part, each in zip(content.split(sizes), like, strict=True)
    ]


class FitState(Protocol):
    """The progress of a fit, :class:`bigdl.training.fit.TrainState`."""

    position: Position
    layout: BatchLayout
    exchanges: StepSums
    stop: bool
    is_due: bool
    shown: Sequence[dict[str, Any] | None]


class FitFiles(Protocol):
    """The model's files, :class:`bigdl.training.fit.Hooks`."""

    def files(self) -> dict[str, bytes]: ...

    def load(self, files: dict[str, bytes]) -> None: ...


class GuardedStep(Protocol):
    """A step that can be repeated, :class:`bigdl.training.fit.WorkerStep`."""

    running: RunningState

    def local_vector(self) -> torch.Tensor: ...

    def put_local(self, vector: torch.Tensor) -> None: ...

    def reset_local(self) -> None: ...

    def facts_of_step(self) -> object: ...

    def put_facts(self, facts: object) -> None: ...

    def use_layout(self, layout: BatchLayout) -> None: ...


class StepGuard:
    """State of all ranks after the last update, to which a rank can return.

    Parameters
    ----------
    sync : GradientSync
    state : FitState
    step : GuardedStep
    """

    def __init__(self, sync: GradientSync, state: FitState, step: GuardedStep):
        self._sync, self.state, self._step = sync, state, step
        self._table: list[torch.Tensor] | None = None  # None at the start of an epoch
        self._pending: Callable[[], Sequence[torch.Tensor]] | None = None  # waits for an exchange
        self._offered: list[torch.Tensor] | None = None
        self._saved: tuple[int, int, int, object] | None = None
        self._shapes: list[torch.Size] | None = None  # of the first step
        self._is_agreed = False  # by the ranks of this group

    def begin_epoch(self) -> None:
        """Record the state before the first step of an epoch; may be a collective operation."""
        position = self.state.position
        if not position.batch:
            self._table = None
        elif self._table is None:  # resumed from a checkpoint
            self._table = list(self._sync.begin_all_gather(self._step.local_vector())())
        self._keep()

    def _keep(self) -> None:
        position = self.state.position
        numbers = position.epoch, position.batch, position.global_step
        self._saved = (*numbers, self._step.facts_of_step())

    def offer(self, vector: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Start to exchange the state that this rank will have after the update that follows.

        Parameters
        ----------
        vector : torch.Tensor
            Vector of float64, of equal length on all ranks.
        values : sequence of torch.Tensor
            The buffers in the vector.

        Raises
        ------
        UsageError
            If the shapes of the buffers differ between ranks or between steps.
        """
        self._check_shapes(vector.numel(), [value.shape for value in values])
        if vector.numel() * self._sync.world_size <= _CARRIED_VALUES:
            self._sync.carry(vector)
            self._pending = self._sync.carried
        else:
            self._pending = self._sync.begin_all_gather(vector)

    def _check_shapes(self, size: int, shapes: list[torch.Size]) -> None:
        """Check that a state fits those of the other ranks; collective in a group's first step."""
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            pairs = zip(self._shapes, shapes, strict=False)
            old, new = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
            raise _other_shapes(
                f"a buffer had the shape {tuple(old)}, and in a later step {tuple(new)}"
                if old is not None and new is not None
                else f"the model had {len(self._shapes)} buffers, and in a later step {len(shapes)}"
            )
        if not self._is_agreed:
            number = zlib.crc32(repr([tuple(shape) for shape in shapes]).encode())
            everyone = self._sync.all_gather([size, number])
            if any(each != everyone[0] for each in everyone):
                sizes = [int(each) * 8 for each, _ in everyone]
                raise _other_shapes(f"the ranks' buffers and sums have {sizes} bytes")
            self._is_agreed = True

    def collect(self) -> None:
        """Wait for the exchange; call it before the weights are updated."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._offered = list(pending())

    def commit(self) -> None:
        """Record that this rank has made the step."""
        if self._offered is not None:
            self._table, self._offered = self._offered, None
        self._keep()

    def forget(self) -> None:
        """Forget an unfinished exchange, which would keep the sockets of its group open."""
        self._pending = self._offered = None
        self._is_agreed = False  # a replacement asks the others
        self._sync.carry(None)

    def roll_back(self) -> None:
        """Return to the state after the last update.

        Raises
        ------
        PeerLost
            If the states of the ranks are unknown, since no step has begun.
        """
        if self._saved is None:
            raise PeerLost("a worker was lost before the first step")
        position = self.state.position
        epoch, batch, steps, facts = self._saved
        if epoch != position.epoch or self._table is None:
            self._table = None
            position.batch = 0
            self._step.reset_local()
        else:
            position.batch, position.global_step = batch, steps
            self._step.put_local(self._table[self._sync.rank])
        self._step.put_facts(facts)

    def newest(self) -> list[int]:
        """Return numbers that compare the states of two ranks."""
        position = self.state.position
        is_partial = int(position.partial is not None)
        return [position.epoch, is_partial, position.batch, position.global_step]

    def pack(self, hooks: FitFiles) -> bytes:
        """Return the whole state for other ranks."""
        state = self.state
        layout = vars(state.layout)
        facts = {"facts": self._step.facts_of_step(), "layout": layout, "shown": state.shown}
        table = {} if self._table is None else {_TABLE: dumps(self._table)}
        files = {**hooks.files(), **table}
        doc, blob = Checkpoint({**state.position.to_json(), "in_place": facts}, files).pack()
        head = json.dumps(doc).encode()
        return len(head).to_bytes(8, "big") + head + blob

    def load(self, data: bytes, hooks: FitFiles, *, is_new: bool) -> None:
        """Take the state of another rank; `is_new` in a replacement."""
        end = 8 + int.from_bytes(data[:8], "big")
        snapshot = Checkpoint.unpack(json.loads(data[8:end]), data[end:])
        facts, files, state = snapshot.manifest["in_place"], dict(snapshot.files), self.state
        table = files.pop(_TABLE, None)
        hooks.load(files)
        self._step.running.restart()
        state.position, state.shown = snapshot.position, facts["shown"]
        if is_new:
            self._step.use_layout(type(state.layout)(**facts["layout"]))
        self._step.reset_local()
        self._table = None if table is None else cast("list[torch.Tensor]", loads(table))
        if self._table is not None:
            self._step.put_local(self._table[self._sync.rank])
        self._step.put_facts(facts["facts"])
        self._keep()


def _other_shapes(reason: str) -> UsageError:
    return UsageError(
        "A recovery in place needs buffers of the same shapes on all workers and in all steps, but "
        f'{reason}; pass recovery="restart", or keep such values outside of the model\'s buffers',
        code="unsupported",
        argument="recovery",
    )


def rejoin(
    worker: Worker,
    sync: GradientSync,
    guard: StepGuard,
    hooks: FitFiles,
    cause: PeerLost | None,
) -> bool:
    """Leave a broken group, join the next one, and agree on the newest state; on all ranks.

    Parameters
    ----------
    worker : Worker
    sync : GradientSync
    guard : StepGuard
    hooks : FitFiles
    cause : PeerLost or None
        The error that this rank noticed; None in a replacement, which has no state yet.

    Returns
    -------
    bool
        True on one of the ranks with the newest state if the state of rank 0 was lost.
    """
    state = guard.state
    has_state, group = cause is not None, worker.group if cause is None else worker.group + 1
    while True:
        guard.forget()
        if cause is not None:
            _leave(sync)
            if has_state:
                guard.roll_back()
        report = {
            "position": guard.newest() if has_state else None,
            "due": state.is_due,
            "stop": state.stop,
            "cause": None if cause is None else str(cause),
        }
        reports = await_group(worker.channel, group, worker.rank, report, cause)
        worker.group = group
        try:
            sync.rejoin(group)
            newest = _agree(reports)
            receivers = [r for r in range(sync.world_size) if r not in newest]
            is_sender = sync.rank == newest[0] and receivers
            packed = guard.pack(hooks) if is_sender else None
            received = sync.transfer(packed, newest[0], receivers)
            break
        except PeerLost as error:
            cause, group = PeerLost(str(error)), group + 1
    if received is not None:
        guard.load(received, hooks, is_new=not has_state)
    state.exchanges = StepSums()  # all ranks have sums of the same steps
    state.is_due = any(reports[rank]["due"] for rank in newest)
    state.stop = any(reports[rank]["stop"] for rank in newest)
    return newest[0] == sync.rank != 0


def _agree(reports: list[Report]) -> list[int]:
    """Return the ranks with the newest state."""
    best = max(each["position"] for each in reports if each["position"] is not None)
    return [rank for rank, each in enumerate(reports) if each["position"] == best]


def _leave(sync: GradientSync) -> None:
    """Leave a broken group; its sockets close, which wakes the peers that wait for this rank."""

    def leave() -> None:
        sync.stop()
        gc.collect()  # what refers to the group keeps its sockets open

    try:
        in_thread(leave).result(LEAVE_GROUP_S)
    except TimeoutError:
        raise PeerLost("the group of workers cannot be left, since a collective hangs") from None
