"""One program on the actors of a Ray engine."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bigdl.common.errors import WorkerLost
from bigdl.orca.cluster.spark import user_import_path
from bigdl.orca.engines.ray_pool import NoRoom, kill
from bigdl.runtime.attempts import ChannelJob
from bigdl.runtime.causes import NoWay, worker_lost
from bigdl.runtime.channel import Channel
from bigdl.runtime.program import active_jobs, job_number, pickled
from bigdl.runtime.stage import Watch, interruptible
from bigdl.runtime.task import TaskSpec

if TYPE_CHECKING:
    from bigdl.orca.engines.ray import RayEngine
    from bigdl.runtime.shards.feed import Ingest

__all__ = ["RayJob"]

logger = logging.getLogger("bigdl.orca")

_LOOK_S = 0.05  # seconds between two looks of the driver
_GRACE_S = 2.0  # seconds that survivors get to notice that a peer went away
_ELASTIC_S = 30.0  # seconds in which Ray must notice that a node is gone
_END_S = 5.0  # seconds that workers get to end when they are told to

_ENDED = "its Python process ended unexpectedly", "their Python processes ended unexpectedly"
_AWAY = "its node went away", "their nodes went away"
_NODE_DIED = "node has died"  # as Ray says it


class RayJob(ChannelJob):
    """One program on actors; made by :meth:`RayEngine.open`."""

    def __init__(
        self, engine: RayEngine, fn, feed, num_workers: int, threads: int, keep_spools: bool
    ):
        super().__init__(num_workers)
        self._ingest: Ingest | None = None
        self._has_input = feed is not None
        program = pickled(fn)
        self._engine = engine
        self._feed = feed
        self._resources = contextlib.ExitStack()
        try:
            number = self._resources.enter_context(job_number())
            self._prepare()
            self._channel = Channel(engine.cluster.driver_host, engine.port)
            self._resources.callback(self._channel.close)
        except BaseException:
            self.close()
            raise
        self._spec = TaskSpec(
            address=self._channel.address,
            job=number,
            active_jobs=active_jobs(),
            world_size=num_workers,
            threads=threads,
            timeout=engine.timeout,
            is_local=True,  # what a program prints comes by the channel, not by Ray's logs too
            log_to_driver=engine.log_to_driver,
            import_path=tuple(user_import_path()),
            program=program,
            keep_spools=keep_spools,
            reader=self._ingest.reader if self._ingest else None,
        )

    def _prepare(self):
        if self._feed is None:
            return
        from bigdl.orca.data.feeds.on_ray import prepare_on_ray

        with interruptible():
            self._ingest = prepare_on_ray(self._feed, self._engine.cluster, self.num_workers)
        self._resources.callback(self._ingest.close)

    def attempt(self, options=None, state=None, on_event=None) -> list:
        while True:
            try:
                results = self._attempt(options or {}, state, on_event)
            except NoRoom as error:
                self._shrink(error.room)
            else:
                if results is not None:
                    return results

    def _shrink(self, room: int):
        """Go on with as many workers as there is room for, if that is enough."""
        least = self._engine.min_workers
        if least is None or room < least:
            raise WorkerLost(
                f"{self.num_workers if least is None else least} workers are needed but the "
                f"cluster can only run {room} tasks at once since nodes were lost"
            ) from None
        logger.warning("Nodes were lost: %d of %d workers go on", room, self.num_workers)
        self.num_workers, self._spools = room, None
        self._prepare()
        reader = self._ingest.reader if self._ingest else None
        self._spec = replace(self._spec, world_size=room, reader=reader)

    def close(self) -> None:
        self._remove_spools()
        self._spec = None  # the input in Ray's object store is freed with the last reference
        self._ingest = None
        self._resources.close()

    # -- one attempt ---------------------------------------------------------------------------

    def _attempt(self, options, state, on_event):
        """Results in rank order, or None when the input must be read again."""
        line = self._open_line(options, state)
        spec = self._spec
        if self._spools is not None:
            spec = replace(spec, reader=None, spools=tuple(self._spools))
        engine = self._engine
        # nodes may come back, but who can go on with fewer does not wait long
        is_elastic = engine.min_workers is not None and self._attempts > 1
        patience = min(engine.patience, _ELASTIC_S) if is_elastic else engine.patience
        with (
            interruptible(),
            engine.pool.crew(self.num_workers, spec.threads, patience) as actors,
        ):
            call = RayCall(actors, line)
            watch = Watch(line, call, on_event)
            call.run(spec, self._attempts, watch.poll)
        self._note_end(line, watch)
        answers = self._answers(line, watch)
        return self._without_answers(line, call) if answers is None else answers

    def _without_answers(self, line, call):
        """What an attempt that has no result of every rank calls for."""
        outcomes = {kind: detail for _, kind, detail in call.outcomes.values()}
        if "unreachable" in outcomes:
            raise NoWay(
                f"The worker on {outcomes['unreachable']}; open that port of the driver for the "
                "workers (channel_port= makes it a fixed one)"
            )
        if "nospool" in outcomes and not call.lost:
            logger.info("The spooled input is gone; it is read again")
            self._spools = None
            return None
        keys = [f"who/{place}" for place in sorted(call.lost)]
        gone = [line.get_json(key) for key in keys if line.has(key)]
        if any(_NODE_DIED in str(error) for error in call.lost.values()):
            raise worker_lost(gone, *_AWAY)
        raise worker_lost(gone, *(_ENDED if call.lost else [next(iter(outcomes.values()))]))


class RayCall:
    """One call of every actor of a crew.

    Attributes
    ----------
    outcomes : dict of int to tuple
        What the workers returned, by their place.
    lost : dict of int to exception
        The workers that died.
    """

    def __init__(self, actors: list, line):
        self._actors, self._line = actors, line
        self.outcomes: dict[int, tuple[int, str, str]] = {}
        self.lost: dict[int, Exception] = {}

    def run(self, spec, attempt: int, poll) -> None:
        """Run a task on every actor and call `poll` until the end."""
        import ray

        shared = ray.put(spec)
        calls = {
            actor.run.remote(shared, attempt, place): place
            for place, actor in enumerate(self._actors)
        }
        try:
            self._await(calls, poll)
        except BaseException:
            self._stop(calls, "stopped by the driver")
            raise

    def _await(self, calls, poll):
        import ray

        ended_at = None
        while calls:
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_LOOK_S)
            for call in done:
                self._take(call, calls.pop(call))
            if self.lost and ended_at is None:
                ended_at = time.monotonic()
            if calls and ended_at is not None and time.monotonic() - ended_at > _GRACE_S:
                self._stop(calls, "another worker was lost")
                ended_at = float("inf")
            poll()

    def _take(self, call, place):
        import ray

        try:
            self.outcomes[place] = ray.get(call)
        except ray.exceptions.RayActorError as error:
            if not self._line.has("abort"):  # else it ended as it was told
                self.lost[place] = error

    def _stop(self, calls, why):
        """End the workers: by themselves if they can."""
        import ray

        with contextlib.suppress(Exception):
            self._line.set("abort", why)
        with contextlib.suppress(Exception):
            ray.wait(list(calls), num_returns=len(calls), timeout=_END_S)
            self.cancel()

    def cancel(self) -> None:
        """End the workers that have not returned."""
        for place, actor in enumerate(self._actors):
            if place not in self.outcomes:
                kill(actor)
