"""The attempts of a job whose workers meet at the driver's channel, whatever engine runs them."""

from __future__ import annotations

import contextlib

from bigdl.runtime.causes import user_error
from bigdl.runtime.channel import Channel, Line
from bigdl.runtime.engine import Job
from bigdl.runtime.stage import Watch
from bigdl.runtime.uplink import decode

__all__ = ["ChannelJob"]


class ChannelJob(Job):
    """A job whose attempts each have a line of the channel, and whose spools outlive an attempt.

    An engine's job calls :meth:`_open_line` before its workers start, :meth:`_note_end` when none
    is left, then :meth:`_answers`; what it means that there are none, the engine knows.
    """

    def __init__(self, num_workers: int):
        self.num_workers = num_workers
        self._channel: Channel | None = None
        self._ingest = None
        self._attempts = 0
        self._spools: list[dict] | None = None  # by rank, once all are known
        self._lines: list[Line] = []

    def _open_line(self, options: dict, state: bytes | None) -> Line:
        """The line of the next attempt, with what the workers are told."""
        self._attempts += 1
        line = self._channel.line(self._attempts)
        self._lines.append(line)
        line.set_json("options", options)
        if state is not None:
            line.put_bytes("state", state)
        return line

    def _note_end(self, line: Line, watch: Watch) -> None:
        """Take what the workers of an attempt have left."""
        watch.poll(final=True)
        line.delete_bytes("state")
        if self._spools is None and self._ingest is not None:
            made = self._spools_of(line)
            if len(made) == self.num_workers:
                self._spools = [made[rank] for rank in range(self.num_workers)]

    def _answers(self, line: Line, watch: Watch) -> list | None:
        """Results in rank order; None if they are not complete.

        Raises
        ------
        UsageError, WorkerError
            The first error that a worker reported.
        """
        ranks = range(self.num_workers)
        if watch.first_error is not None:
            raise user_error(watch.first_error) from None
        if not line.has(*(f"result/{rank}/kind" for rank in ranks)):
            return None
        return [
            decode(line.get(f"result/{rank}/kind").decode(), line.take_bytes(f"result/{rank}"))
            for rank in ranks
        ]

    def _spools_of(self, line: Line) -> dict[int, dict]:
        """Spools that the workers of one attempt made, by their place."""
        keys = {place: f"spool/{place}" for place in range(self.num_workers)}
        return {place: line.get_json(key) for place, key in keys.items() if line.has(key)}

    def _remove_spools(self) -> None:
        """Remove what is left of them on this machine; workers on others removed theirs."""
        from bigdl.runtime.shards.spool import remove_spool

        lines, self._lines = self._lines, []
        with contextlib.suppress(Exception):
            for doc in (d for line in lines for d in self._spools_of(line).values()):
                for spool in doc.values():
                    remove_spool(spool["path"])
