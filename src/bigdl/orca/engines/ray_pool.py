"""The worker processes of a Ray engine: actors that wait for programs.

Actors live from their first program to the end of Ray (or :meth:`RayPool.close`), so a fit, an
evaluation and a prediction find torch imported.  They hold no CPU of Ray's while they wait: the
CPUs of a program are reserved by a placement group for as long as it runs, and its bundles say on
which nodes its workers are.  So idle workers never keep another program, a Ray task of the user or
a Ray dataset from running.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from bigdl.common.errors import UsageError, WorkerLost
from bigdl.orca.cluster.ray import RayCluster

__all__ = ["NoRoom", "RayPool", "RayWorker"]

_START_S = 120.0  # seconds in which a process must be up
_LOOK_S = 0.1  # seconds in which Ctrl-C is seen


class NoRoom(Exception):
    """Ray has no room for a crew, because nodes were lost.

    Attributes
    ----------
    room : int
        How many workers it has room for.
    """

    def __init__(self, room: int):
        super().__init__(room)
        self.room = room


class RayWorker:
    """The class of the actors."""

    def __init__(self, directory: str):
        import torch  # noqa: F401 - takes seconds, and every program needs it

        self._directory = directory

    def pid(self) -> int:
        """Answers once the process is up."""
        return os.getpid()

    def run(self, spec, attempt: int, place: int) -> tuple[int, str, str]:
        """Run one task of a job; see :func:`bigdl.runtime.task.execute`."""
        from bigdl.runtime.channel import Unreachable
        from bigdl.runtime.task import execute

        directory = os.path.join(own_directory(), self._directory)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        try:
            return execute(spec, attempt, iter(()), place, directory)
        except Unreachable as error:
            return place, "unreachable", f"{os.uname().nodename} cannot connect to {error}"


def own_directory() -> str:
    """Ray's own directory on this node, which goes with Ray's session."""
    import tempfile

    from ray import _private

    node = getattr(getattr(_private, "worker", None), "_global_node", None)
    return node.get_session_dir_path() if node is not None else tempfile.gettempdir()


class RayPool:
    """The actors of one connection to Ray; get it by :meth:`of`."""

    _lock = threading.Lock()
    _pools: dict[str, RayPool] = {}  # noqa: RUF012 - of this process, by connection

    def __init__(self, session: str):
        self._directory = f"bigdl-{session}"
        self._idle: dict[str, list] = {}  # by node
        self._own = threading.Lock()

    @classmethod
    def of(cls, cluster: RayCluster) -> RayPool:
        """The pool of a cluster; what belonged to connections that ended is forgotten."""
        session = cluster.session
        with cls._lock:
            if session not in cls._pools:
                cls._pools = {session: cls(session)}
            return cls._pools[session]

    @contextlib.contextmanager
    def crew(self, number: int, cores: int, patience: float) -> Iterator[list]:
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
        NoRoom
            When the nodes are too few, or too small.
        WorkerLost
            When a process does not start.
        """
        group = _reserve(number, cores, patience)
        crew: list[tuple[str, Any]] = []
        try:
            for node in _nodes_of(group, number):
                crew.append((node, self._take(node)))
            crew = self._living(crew)
            yield [actor for _, actor in crew]
        finally:
            self._give_back(crew)
            _release(group)

    def close(self) -> None:
        """End the idle workers."""
        with self._own:
            idle, self._idle = self._idle, {}
        for actors in idle.values():
            for actor in actors:
                kill(actor)

    def _take(self, node: str):
        with self._own:
            if self._idle.get(node):
                return self._idle[node].pop()
        return self._start(node)

    def _start(self, node: str):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(RayWorker).options(num_cpus=0, scheduling_strategy=strategy)
        return actor.remote(self._directory)

    def _living(self, crew: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """The crew once all of it answers, with new actors for those that are gone."""
        import ray

        end = time.monotonic() + _START_S
        answers = [actor.pid.remote() for _, actor in crew]
        for place, (node, _) in enumerate(crew):
            while True:
                try:
                    ray.get(answers[place], timeout=_LOOK_S)
                    break
                except ray.exceptions.GetTimeoutError:
                    if time.monotonic() > end:
                        raise WorkerLost(
                            f"A worker on node {node} did not start within {_START_S:g} s"
                        ) from None
                except ray.exceptions.RayActorError as error:
                    if time.monotonic() > end:
                        raise WorkerLost(f"A worker could not be started: {error}") from None
                    actor = self._start(node)
                    crew[place] = node, actor
                    answers[place] = actor.pid.remote()
                    time.sleep(_LOOK_S)
        return crew

    def _give_back(self, crew):
        with self._own:
            for node, actor in crew:
                self._idle.setdefault(node, []).append(actor)


def kill(actor) -> None:
    """End an actor's process."""
    import ray

    with contextlib.suppress(Exception):
        ray.kill(actor)


def _reserve(number, cores, patience):
    """A placement group of a bundle for every worker, spread over the nodes."""
    from ray.util import placement_group

    group = placement_group([{"CPU": cores}] * number, strategy="SPREAD")
    end = time.monotonic() + patience
    cluster = RayCluster.from_active()
    try:
        while not group.wait(_LOOK_S):
            room = cluster.room(cores)
            if time.monotonic() < end:
                continue
            if room < number:
                raise NoRoom(room)
            raise UsageError(
                f"{number} workers of {cores} CPUs were asked for, but others use too many of "
                f"Ray's {cluster.slots()} CPUs; wait for them, or ask for fewer workers"
            )
    except BaseException:
        _release(group)
        raise
    return group


def _nodes_of(group, number) -> list[str]:
    from ray.util import placement_group_table

    places = placement_group_table(group)["bundles_to_node_id"]
    return [places[index] for index in range(number)]


def _release(group):
    from ray.util import remove_placement_group

    with contextlib.suppress(Exception):  # Ray may be gone
        remove_placement_group(group)
