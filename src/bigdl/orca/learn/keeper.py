"""The whole state of a training, over all workers: taken, stored and restored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from bigdl.orca.learn.background import BackgroundWriter
from bigdl.orca.learn.checkpoint import CheckpointDirectory, Snapshot
from bigdl.orca.learn.data.batches import Batches
from bigdl.orca.learn.position import Position
from bigdl.orca.learn.pytorch.parts import Built
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.orca.learn.running import Buffers
from bigdl.orca.learn.state import capture_rng, dumps, load_into, loads, restore_rng
from bigdl.orca.learn.sums import EpochSums

__all__ = ["StateKeeper"]


class StateKeeper:
    """Snapshots of one training; every rank has one and they act together.

    Parameters
    ----------
    worker, sync
        Of the program.
    built : Built
        The model and what belongs to it.
    buffers : Buffers
    batches : Batches
    directory : CheckpointDirectory, optional
        Where rank 0 writes; without one the snapshots go to the driver.
    inputs : list, optional
        ``TensorShard.inputs``; kept for prediction.
    summary : StepSummary, optional
    writer : BackgroundWriter, optional
        Writes into the directory while the training goes on.
    """

    def __init__(
        self,
        worker,
        sync,
        built: Built,
        buffers: Buffers,
        batches: Batches,
        directory: CheckpointDirectory | None,
        inputs: list | None,
        *,
        summary: StepSummary | None = None,
        writer: BackgroundWriter | None = None,
    ):
        self._worker, self._sync, self._built = worker, sync, built
        self._buffers, self._batches, self._inputs = buffers, batches, inputs
        self._summary, self._writer = summary, writer or BackgroundWriter()
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
        self._restore_own(files.get("buffers.pt"), self._buffers.put)
        self._buffers.rows = manifest["rows_since_merge"][self._sync.rank]
        return position, EpochSums(**manifest["sums"][self._sync.rank])

    # -- what the framework keeps ----------------------------------------------------------------

    def _initial(self) -> dict[str, bytes]:
        """The files of a training that begins."""
        return {"model.pt": dumps(self._built.model.state_dict())}

    def _shared(self) -> dict[str, bytes]:
        """The files of what is the same on every rank."""
        built = self._built
        files = {
            "model.pt": dumps(built.model.state_dict()),
            "optimizer.pt": dumps(built.optimizer.state_dict()),
        }
        if built.scheduler is not None:
            files["scheduler.pt"] = dumps(built.scheduler.state_dict())
        if self._summary is not None:
            files["summary.pt"] = dumps(self._summary.take())
        return files

    def _put_shared(self, files: dict[str, bytes]) -> None:
        """The inverse of :meth:`_shared`, and of :meth:`_initial`."""
        built = self._built
        load_into(built.model, files["model.pt"])
        if "optimizer.pt" in files:
            load_into(built.optimizer, files["optimizer.pt"], "optimizer's state", "optimizer")
        if "scheduler.pt" in files and built.scheduler is not None:
            load_into(built.scheduler, files["scheduler.pt"], "scheduler's state", "scheduler")
        if self._summary is not None and "summary.pt" in files:
            self._summary.put(loads(files["summary.pt"]))

    def _own(self) -> dict:
        """What is this rank's alone."""
        return capture_rng()

    def _put_own(self, state: dict) -> None:
        """The inverse of :meth:`_own`."""
        restore_rng(state)

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
            everyone = sync.all_gather([*sums.values(), float(self._buffers.rows)])
            manifest["sums"] = [EpochSums(*values[:-1]).to_json() for values in everyone]
            manifest["rows_since_merge"] = [int(values[-1]) for values in everyone]
            if sync.world_size > 1:
                files["buffers.pt"] = sync.gather(dumps(self._buffers.own()))
        with self._buffers.merged():
            shared = self._shared() if sync.rank == 0 else {}
        if sync.rank != 0:
            return None
        packed = {name: dumps([loads(d) for d in data]) for name, data in files.items()}
        return Snapshot(manifest, packed | shared)
