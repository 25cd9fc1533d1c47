"""The Ray engine: N workers as actors that live from one program to the next.

The same programs run on the same :mod:`~bigdl.runtime.channel` as on Spark, and what a worker
does is the same code.  Ray starts and ends processes and says which one died; a FailurePolicy
alone decides about retries, for which lost actors are replaced.

Actors live from their first program to the end of Ray (or :meth:`RayPool.close`), so a fit, an
evaluation and a prediction find torch imported.  They hold no CPU of Ray's while they wait: the
CPUs of a program are reserved by a placement group for as long as it runs, and its bundles say on
which nodes its workers are.  So idle workers never keep another program, a Ray task of the user or
a Ray dataset from running.
"""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

from bigdl.common.checks import check_integer, check_number
from bigdl.common.cpu import wait_passively
from bigdl.common.errors import UsageError, WorkerLost
from bigdl.common.private_folders import private_folder, process_folder
from bigdl.common.timeouts import (
    ACTOR_START_S,
    COLLECTIVE_S,
    INTERRUPT_LOOK_S,
    NODE_LOSS_S,
    WORKERS_JOIN_S,
)
from bigdl.orca.cluster.ray import RayCluster, refuse_lost
from bigdl.orca.cluster.ray_launch import ray_calls
from bigdl.runtime.engine import Engine
from bigdl.runtime.jobs import (
    CalledJob,
    DriverUnreachable,
    WorkerCalls,
    interruptible,
    lost_workers,
    worker_lost,
)
from bigdl.runtime.shards.feed import Feed, InputPlan

logger = logging.getLogger("bigdl.orca")


_AWAY = "its node went away", "their nodes went away"
_NODE_DIED = "node has died"  # as Ray says it


class InsufficientResources(Exception):
    """Ray has room only for so many workers, because nodes were lost."""


class RayWorker:
    """The class of the actors."""

    def __init__(self, directory: str):
        wait_passively()
        import torch  # noqa: F401 - takes seconds, and every program needs it

        self._directory = directory

    def run(self, spec, attempt: int, place: int) -> tuple[int, str, str]:
        """Run one task of a job; see :func:`bigdl.runtime.task.execute`."""
        from bigdl.runtime.channel import Unreachable
        from bigdl.runtime.task import execute

        directory = os.path.join(own_directory(), self._directory)
        private_folder(directory, replaceable=True)  # Ray's own directory is open to all
        try:
            return execute(spec, attempt, iter(()), place, directory)
        except Unreachable as error:
            return place, "unreachable", f"{os.uname().nodename} cannot connect to {error}"


def own_directory() -> str:
    """Ray's own directory on this node, which goes with Ray's session."""
    from ray import _private

    node = getattr(getattr(_private, "worker", None), "_global_node", None)
    return node.get_session_dir_path() if node is not None else process_folder()


class RayPool:
    """The actors of one connection to Ray; get it by :func:`pool_of`."""

    def __init__(self, session: str):
        self._directory = f"bigdl-{session}"
        self._idle: dict[str, list] = {}  # by node
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, number: int, cores: int, patience: float) -> Iterator[list]:
        """Reserve CPUs for a number of workers and lend their actors.

        Parameters
        ----------
        number : int
        cores : int
            Of every worker.
        patience : float
            Seconds to wait for CPUs that others use.

        Yields
        ------
        list of actors

        Raises
        ------
        UsageError
            When others do not give the CPUs back.
        InsufficientResources
            When the nodes are too few, or too small.
        WorkerLost
            When a process does not start.
        """
        actors: list[tuple[str, Any]] = []
        with _reserved(number, cores, patience) as nodes:
            try:
                for node in nodes:
                    actors.append((node, self._idle_or_new(node)))
                self._await_start(actors)
                yield [actor for _, actor in actors]
            finally:
                with self._lock:
                    for node, actor in actors:
                        self._idle.setdefault(node, []).append(actor)

    def close(self) -> None:
        """End the idle workers."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for actors in idle.values():
            for actor in actors:
                kill(actor)

    def _idle_or_new(self, node: str):
        with self._lock:
            if self._idle.get(node):
                return self._idle[node].pop()
        return self._start(node)

    def _start(self, node: str):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(RayWorker).options(num_cpus=0, scheduling_strategy=strategy)
        return actor.remote(self._directory)

    def _await_start(self, actors: list[tuple[str, Any]]) -> None:
        """Wait until all actors answer; those that are gone are replaced in the list."""
        import ray

        end = time.monotonic() + ACTOR_START_S
        starts = {actor.__ray_ready__.remote(): i for i, (_, actor) in enumerate(actors)}
        while starts:
            for start in ray.wait(list(starts), timeout=INTERRUPT_LOOK_S)[0]:
                place = starts.pop(start)
                node = actors[place][0]
                try:
                    ray.get(start)
                except ray.exceptions.RayActorError as error:
                    if time.monotonic() > end:
                        raise WorkerLost(f"A worker could not be started: {error}") from None
                    time.sleep(INTERRUPT_LOOK_S)
                    actors[place] = node, self._start(node)
                    starts[actors[place][1].__ray_ready__.remote()] = place
            if starts and time.monotonic() > end:
                nodes = " and ".join({actors[place][0] for place in starts.values()})
                raise WorkerLost(
                    f"A worker on node {nodes} did not start within {ACTOR_START_S:g} s"
                )


@functools.lru_cache(maxsize=1)
def pool_of(session: str) -> RayPool:
    """The pool of a connection to Ray; what belonged to those that ended is forgotten."""
    return RayPool(session)


def kill(actor) -> None:
    """End an actor's process."""
    import ray

    with contextlib.suppress(Exception):
        ray.kill(actor)


@contextlib.contextmanager
def _reserved(number: int, cores: int, patience: float) -> Iterator[list[str]]:
    """Reserve CPUs for workers, spread over the nodes; yields the node of each, node by node."""
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group([{"CPU": cores}] * number, strategy="SPREAD")
    end = time.monotonic() + patience
    cluster = RayCluster.from_active()
    try:
        while not group.wait(INTERRUPT_LOOK_S):
            room = cluster.room(cores)
            if time.monotonic() < end:
                continue
            if room < number:
                raise InsufficientResources(room)
            raise UsageError(
                f"{number} workers of {cores} CPUs were asked for, but others use too many of "
                f"Ray's {cluster.slots()} CPUs; wait for them, or ask for fewer workers",
                code="resource-limit",
            )
        places = placement_group_table(group)["bundles_to_node_id"]
        nodes = [places[index] for index in range(number)]
        yield sorted(nodes, key=nodes.index)
    finally:
        with contextlib.suppress(Exception):  # Ray may be gone
            remove_placement_group(group)


class RayJob(CalledJob):
    """One program on actors; made by :meth:`RayEngine.open`."""

    def _attempt(self, *attempt):
        try:
            with ray_calls():
                return super()._attempt(*attempt)
        except InsufficientResources as error:
            self._shrink(*error.args)
            return None

    def _poll(self, watch):
        def poll() -> None:
            refuse_lost()
            watch.poll()

        return poll

    def _shrink(self, room: int) -> None:
        """Go on with as many workers as there is room for, if that is enough."""
        least = self._engine.min_workers
        if least is None or room < least:
            raise WorkerLost(
                f"{self.num_workers if least is None else least} workers are needed but the "
                f"cluster can only run {room} tasks at once since nodes were lost"
            ) from None
        logger.warning("Nodes were lost: %d of %d workers go on", room, self.num_workers)
        self.num_workers = room
        self._read_again(self._input)

    def close(self) -> None:
        super().close()
        # the input in Ray's object store is freed with the last reference
        self.spec = self._input_plan = cast("Any", None)

    @contextlib.contextmanager
    def _calls(self, line):
        import ray

        engine = self._engine
        # nodes may come back, but who can go on with fewer does not wait long
        is_elastic = engine.min_workers is not None and self._attempts > 1
        patience = min(engine.patience, NODE_LOSS_S) if is_elastic else engine.patience
        with engine.pool.lend(self.num_workers, self.spec.threads, patience) as actors:
            spec = ray.put(self._next_spec())
            answers = [
                actor.run.remote(spec, self._attempts, place).future()
                for place, actor in enumerate(actors)
            ]
            kills = [functools.partial(kill, actor) for actor in actors]
            with WorkerCalls(line, answers, kills, ray.exceptions.RayActorError) as calls:
                yield calls

    def _failure(self, line, calls, outcomes):
        if "unreachable" in outcomes:
            return DriverUnreachable(
                f"The worker on {outcomes['unreachable']}; open that port of the driver for the "
                "workers (channel_port= makes it a fixed one)"
            )
        if any(_NODE_DIED in str(error) for error in calls.lost.values()):
            return worker_lost(lost_workers(line, calls), *_AWAY)
        return super()._failure(line, calls, outcomes)


class RayEngine(Engine):
    """Runs programs on actors of the Ray that this process is connected to.

    Parameters
    ----------
    cluster : RayCluster, optional
        Default: that of this process.
    workers_per_node : int, optional
        Workers per node when `num_workers` is not given to :meth:`run`.
    min_workers : int, optional
        After the loss of nodes, go on with fewer workers, but at least so many.
        The input is shared out anew. Default: all workers are needed.
    channel_port : int, optional
        Port of the driver that workers connect to; 0 takes any free one.
    timeout : float, optional
        Seconds after which a collective without progress fails; default 1800.
    patience : float, optional
        Seconds to wait for CPUs that others use; default 120.
    log_to_driver : bool, optional
        Show what workers print on the driver.

    Raises
    ------
    UsageError
        Without an active Ray, or for an argument that cannot work.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.engine import RayEngine
    >>> sc = init_orca_context("local", cores=2, init_ray_on_spark=True)
    >>> RayEngine().run(lambda worker: worker.rank * 10, num_workers=2)
    [0, 10]
    """

    cluster: RayCluster

    def __init__(
        self,
        cluster: RayCluster | None = None,
        *,
        workers_per_node: int = 1,
        min_workers: int | None = None,
        channel_port: int = 0,
        timeout: float = COLLECTIVE_S,
        patience: float = WORKERS_JOIN_S,
        log_to_driver: bool = True,
    ):
        cluster = cluster or RayCluster.from_active()
        super().__init__(cluster, workers_per_node, channel_port, timeout, log_to_driver)
        if min_workers is not None:
            check_integer("min_workers", min_workers, 1)
        self._job_class, self.min_workers = RayJob, min_workers
        self.patience = check_number("patience", patience, above=0)

    @property
    def pool(self) -> RayPool:
        """The actors of this driver."""
        return pool_of(self.cluster.session)

    def prepare(self, feed: Feed, num_workers: int) -> InputPlan:
        """Describe how the workers get the rows of a feed."""
        with interruptible():
            return super().prepare(feed, num_workers)

    def shutdown(self) -> None:
        """End the workers that wait for programs; another program starts new ones."""
        self.pool.close()
