"""The whole state of a training, over all workers: taken, stored and restored."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bigdl.training.background import BackgroundWriter
from bigdl.training.batches import Batches
from bigdl.training.checkpoint import CheckpointDirectory, Snapshot
from bigdl.training.position import Position
from bigdl.training.running import RunningState
from bigdl.training.state import dumps, loads
from bigdl.training.sums import EpochSums

__all__ = ["StateKeeper"]


class StateKeeper(ABC):
    """Snapshots of one training; every rank has one and they act together.

    Parameters
    ----------
    worker, sync
        Of the program.
    built : Built or keras.Model
        The model and what belongs to it.
    running : RunningState
    batches : Batches
    directory : CheckpointDirectory, optional
        Where rank 0 writes; without one the snapshots go to the driver.
    inputs : list, optional
        ``TensorShard.inputs``; kept for prediction.
    writer : BackgroundWriter, optional
        Writes into the directory while the training goes on.
    """

    def __init__(
        self,
        worker,
        sync,
        built: Any,
        running: RunningState,
        batches: Batches,
        directory: CheckpointDirectory | None,
        inputs: list | None,
        *,
        writer: BackgroundWriter | None = None,
    ):
        self._worker, self._sync, self._built = worker, sync, built
        self._running, self._batches, self._inputs = running, batches, inputs
        self._writer = writer or BackgroundWriter()
        self.directory = directory
        self._saved: dict | None = None  # position of the newest checkpoint
        self._name: str | None = None

    def restore(self) -> tuple[Position, EpochSums]:
        """Start from the driver's state, or from the model of rank 0: the same on every rank."""
        snapshot = self._agree_on_start()
        files, manifest = snapshot.files, snapshot.manifest
        self._put_shared(files)
        self._restore_own(files.get("rng.pt"), self._put_own)
        position = Position.of(manifest)
        if "windows" in manifest and manifest.get("rows") == list(self._batches.rows):
            # they depend on the memory that was free; a run goes on with those that it had
            self._batches = replace(self._batches, windows=manifest["windows"])
        if not position.step or position.partial:
            return position, EpochSums()
        self._batches.check(manifest, self._sync.rank)
        self._restore_own(files.get("buffers.pt"), self._running.put)
        self._running.rows = manifest["rows_since_merge"][self._sync.rank]
        return position, EpochSums(**manifest["sums"][self._sync.rank])

    # -- what the framework keeps ----------------------------------------------------------------

    @abstractmethod
    def _initial(self) -> dict[str, bytes]:
        """The files of a training that begins."""

    @abstractmethod
    def _shared(self) -> dict[str, bytes]:
        """The files of what is the same on every rank."""

    @abstractmethod
    def _put_shared(self, files: dict[str, bytes]) -> None:
        """The inverse of :meth:`_shared`, and of :meth:`_initial`."""

    @abstractmethod
    def _own(self) -> dict:
        """What is this rank's alone."""

    @abstractmethod
    def _put_own(self, state: dict) -> None:
        """The inverse of :meth:`_own`."""

    # --------------------------------------------------------------------------------------------

    @property
    def windows(self) -> Sequence[int]:
        """See :class:`Batches`."""
        return self._batches.windows

    def _agree_on_start(self) -> Snapshot:
        doc, blob = None, None
        if self._sync.rank == 0:
            blob = self._worker.state()
            if blob is None:
                doc, blob = Snapshot(Position().to_json(), self._initial()).pack()
            else:
                doc = self._worker.options["snapshot"]
            doc = json.dumps(doc).encode()
        doc = json.loads(self._sync.broadcast(doc))
        return Snapshot.unpack(doc, self._sync.broadcast(blob))

    def _restore_own(self, data: bytes | None, restore) -> None:
        """Give this rank what it had, if there were as many ranks."""
        everyone = loads(data) if data else []
        if len(everyone) == self._sync.world_size:
            restore(everyone[self._sync.rank])

    def save(self, position: Position, sums: EpochSums) -> None:
        """Write a checkpoint or send it to the driver; a collective.

        The state is copied here and written by a thread; the next checkpoint waits for it.
        """
        snapshot = self._take(position, sums)
        self._saved = position.to_json()
        if snapshot is None:
            return
        if self.directory is not None:
            self._writer.start(lambda: self._write(snapshot))
        else:
            doc, blob = snapshot.pack()
            self._worker.send("checkpoint", doc, blob)

    def _write(self, snapshot):
        self._name = self.directory.write(snapshot)

    def finish(self, position: Position, sums: EpochSums) -> str | None:
        """Leave the final state where the driver finds it; a collective.

        Returns
        -------
        str or None
            On rank 0 the name of the checkpoint in the directory; None when it was sent.
        """
        if self.directory is not None:
            if self._saved != position.to_json():
                self.save(position, sums)
            self._writer.wait()
            return self._name
        snapshot = self._take(position, sums)
        if snapshot is not None:
            doc, blob = snapshot.pack()
            self._worker.send("final", doc, blob)
        return None

    def _take(self, position, sums) -> Snapshot | None:
        """The whole state, on rank 0."""
        sync = self._sync
        manifest = {**position.to_json(), **vars(self._batches), "inputs": self._inputs}
        files = {"rng.pt": sync.gather(dumps(self._own()))}
        if position.step:
            everyone = sync.all_gather([*sums.values(), float(self._running.rows)])
            manifest["sums"] = [EpochSums(*values[:-1]).to_json() for values in everyone]
            manifest["rows_since_merge"] = [int(values[-1]) for values in everyone]
            if sync.world_size > 1:
                files["buffers.pt"] = sync.gather(dumps(self._running.own()))
        with self._running.merged():
            shared = self._shared() if sync.rank == 0 else {}
        if sync.rank != 0:
            return None
        packed = {name: dumps([loads(d) for d in data]) for name, data in files.items()}
        return Snapshot(manifest, packed | shared)
