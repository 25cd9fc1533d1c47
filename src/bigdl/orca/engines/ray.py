"""Ray engine: N workers as actors that are reused by consecutive programs.

Workers run the same programs, with the same :mod:`~bigdl.runtime.channel` and worker code, as on
Spark.  Ray starts and ends processes and reports which one died.  The FailurePolicy alone decides
about retries, for which lost actors are replaced.

Actors live from their first program to the end of Ray (or :meth:`RayPool.close`), so consecutive
programs need not import torch again.  Idle actors hold no Ray CPUs: a placement group reserves the
CPUs of a program while it runs, and its bundles determine the nodes of the workers.  So idle
workers never block another program, a user's Ray task or a Ray dataset.
"""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

from bigdl.common.checks import check_integer, check_number
from bigdl.common.cpu import wait_passively
from bigdl.common.errors import UsageError, WorkerLost
from bigdl.common.platform.network import host_name
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
_NODE_DIED = "node has died"  # part of Ray's error message


class InsufficientResources(Exception):
    """Raised when Ray can run fewer workers than requested because nodes were lost."""


class RayWorker:
    """Ray actor that runs one worker, for several programs in turn."""

    def __init__(self, directory: str):
        wait_passively()
        import torch  # noqa: F401 - takes seconds, and every program needs it

        self._directory = directory

    def run(self, spec, attempt: int, rank: int) -> tuple[int, str, str]:
        """Run one task of a job; see :func:`bigdl.runtime.task.execute`."""
        from bigdl.runtime.channel import Unreachable
        from bigdl.runtime.task import execute

        directory = os.path.join(session_directory(), self._directory)
        private_folder(directory, replaceable=True)  # Ray's directory is readable by all users
        try:
            return execute(spec, attempt, iter(()), rank, directory)
        except Unreachable as error:
            return rank, "unreachable", f"{host_name()} cannot connect to {error}"


def session_directory() -> str:
    """Return Ray's session directory on this node."""
    from ray import _private

    node = getattr(getattr(_private, "worker", None), "_global_node", None)
    return node.get_session_dir_path() if node is not None else process_folder()


class RayPool:
    """Worker actors of one connection to Ray, see :func:`pool_of`."""

    def __init__(self, session: str):
        self._directory = f"bigdl-{session}"
        self._idle: dict[str, list] = {}  # by node
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, number: int, cores: int, patience: float) -> Iterator[list]:
        """Context manager that reserves CPUs and yields the node and the actor of each worker.

        Parameters
        ----------
        number : int
        cores : int
            CPUs of every worker.
        patience : float
            Seconds to wait for CPUs that other programs use.

        Yields
        ------
        list of (str, actor)
            The caller appends actors that replace lost ones, and puts None in the place of an
            actor that has died or was killed.

        Raises
        ------
        UsageError
            If other programs do not release the CPUs in time.
        InsufficientResources
            If the nodes are too few, or too small.
        WorkerLost
            If a process does not start.
        """
        actors: list[tuple[str, Any]] = []
        with _reserved(number, cores, patience) as nodes:
            try:
                for node in nodes:
                    actors.append((node, self.idle_or_new(node)))
                self._await_start(actors)
                yield actors
            finally:
                with self._lock:
                    for node, actor in actors:
                        if actor is not None:
                            self._idle.setdefault(node, []).append(actor)

    def close(self) -> None:
        """Stop the idle workers."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for actors in idle.values():
            for actor in actors:
                kill(actor)

    def prepare(self, nodes: Iterable[str]) -> None:
        """Start an actor on each node that has no idle one."""
        for node in set(nodes):
            with self._lock:
                has_idle = bool(self._idle.get(node))
            if not has_idle:
                actor = self._start(node)
                with self._lock:
                    self._idle.setdefault(node, []).append(actor)

    def idle_or_new(self, node: str):
        """Return an idle actor of a node, or one that starts."""
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
        """Wait until all actors answer; replace actors that have died."""
        import ray

        end = time.monotonic() + ACTOR_START_S
        starts = {actor.__ray_ready__.remote(): i for i, (_, actor) in enumerate(actors)}
        while starts:
            for start in ray.wait(list(starts), timeout=INTERRUPT_LOOK_S)[0]:
                index = starts.pop(start)
                node = actors[index][0]
                try:
                    ray.get(start)
                except ray.exceptions.RayActorError as error:
                    if time.monotonic() > end:
                        raise WorkerLost(f"A worker could not be started: {error}") from None
                    time.sleep(INTERRUPT_LOOK_S)
                    actors[index] = node, self._start(node)
                    starts[actors[index][1].__ray_ready__.remote()] = index
            if starts and time.monotonic() > end:
                nodes = " and ".join({actors[index][0] for index in starts.values()})
                raise WorkerLost(
                    f"A worker on node {nodes} did not start within {ACTOR_START_S:g} s"
                )


@functools.lru_cache(maxsize=1)
def pool_of(session: str) -> RayPool:
    """Return the pool of a connection to Ray; only the latest pool is kept."""
    return RayPool(session)


def kill(actor) -> None:
    """Kill an actor's process."""
    import ray

    with contextlib.suppress(Exception):
        ray.kill(actor)


@contextlib.contextmanager
def _reserved(number: int, cores: int, patience: float) -> Iterator[list[str]]:
    """Context manager that reserves CPUs spread over the nodes and yields each worker's node."""
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
                f"{number} workers of {cores} CPUs were requested, but others use too many of "
                f"Ray's {cluster.slots()} CPUs; wait for them, or request fewer workers",
                code="resource-limit",
            )
        node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
        nodes = [node_of_bundle[index] for index in range(number)]
        yield sorted(nodes, key=nodes.index)
    finally:
        with contextlib.suppress(Exception):  # Ray may be gone
            remove_placement_group(group)


class RayJob(CalledJob):
    """Job that runs one program on actors, created by :meth:`RayEngine.open`."""

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
        """Continue with `room` workers; raise WorkerLost if the engine needs more."""
        least = self._engine.min_workers
        if least is None or room < least:
            raise WorkerLost(
                f"{self.num_workers if least is None else least} workers are needed but the "
                f"cluster can only run {room} tasks at once since nodes were lost"
            ) from None
        logger.warning("Nodes were lost: %d of %d workers continue", room, self.num_workers)
        self.num_workers = room
        self._read_again(self._input)

    def close(self) -> None:
        super().close()
        # the input in Ray's object store is freed with the last reference
        self.spec = self._input_plan = cast("Any", None)

    @contextlib.contextmanager
    def _calls(self, channel):
        import ray

        engine = self._engine
        # nodes may return, but a job that can continue with fewer workers does not wait long
        is_elastic = engine.min_workers is not None and self._attempts > 1
        patience = min(engine.patience, NODE_LOSS_S) if is_elastic else engine.patience
        with engine.pool.lend(self.num_workers, self.spec.threads, patience) as actors:
            spec = ray.put(self._next_spec())
            answers = [
                actor.run.remote(spec, self._attempts, rank).future()
                for rank, (_, actor) in enumerate(actors)
            ]

            def end(task_index: int):
                node, actor = actors[task_index]
                actors[task_index] = node, None
                if actor is not None:
                    kill(actor)

            kills = [functools.partial(end, task_index) for task_index in range(len(actors))]

            def replace(lost: int, rank: int, group: int):
                end(lost)
                node, task_index = actors[lost][0], len(actors)
                actors.append((node, engine.pool.idle_or_new(node)))
                replacing = self._replacing_spec(rank, group)
                call = actors[-1][1].run.remote(replacing, self._attempts, task_index)
                return call.future(), functools.partial(end, task_index)

            self._replacements = replace
            self._prepare_replacement = lambda modules: engine.pool.prepare(n for n, _ in actors)
            with WorkerCalls(channel, answers, kills, ray.exceptions.RayActorError) as calls:
                yield calls

    def _is_replaceable(self, error):
        return _NODE_DIED not in str(error)

    def _failure(self, channel, calls, outcomes):
        if "unreachable" in outcomes:
            return DriverUnreachable(
                f"The worker on {outcomes['unreachable']}; open that port of the driver for the "
                "workers (channel_port= sets a fixed port)"
            )
        if any(_NODE_DIED in str(error) for error in calls.lost.values()):
            return worker_lost(lost_workers(channel, calls), *_AWAY)
        return super()._failure(channel, calls, outcomes)


class RayEngine(Engine):
    """Engine that runs programs on actors of the Ray cluster that this process is connected to.

    Parameters
    ----------
    cluster : RayCluster, optional
        Cluster to run on; default that of this process.
    workers_per_node : int, optional
        Workers per node if :meth:`run` is called without `num_workers`.
    min_workers : int, optional
        Minimum number of workers with which a job continues after the loss of nodes. The input is
        then distributed again. By default all workers are needed.
    channel_port : int, optional
        Port of the driver that workers connect to; 0 selects a free port.
    timeout : float, optional
        Seconds after which a collective without progress fails; default 1800.
    patience : float, optional
        Seconds to wait for CPUs that other programs use; default 120.
    log_to_driver : bool, optional
        Print the output of workers on the driver.

    Raises
    ------
    UsageError
        If Ray is not active, or an argument is invalid.

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
    def can_replace(self) -> bool:
        return True

    @property
    def pool(self) -> RayPool:
        """Pool of this driver's actors."""
        return pool_of(self.cluster.session)

    def prepare(self, feed: Feed, num_workers: int) -> InputPlan:
        """Plan how the workers read the rows of a feed."""
        with interruptible():
            return super().prepare(feed, num_workers)

    def shutdown(self) -> None:
        """Stop the idle workers; the next program starts new workers."""
        self.pool.close()
