"""The shuffle transport: groups of steps as one Spark job of stateless tasks.

A step is two shuffles (three, if ranks tell each other about their sums): weights to everybody,
gradients to the owners.  The steps of a group are chained before anything runs, so that Spark
schedules them as stages of one job and the driver is asked nothing in between.  The state after a
group is kept by the executors, where there are several in two copies, and its lineage is cut; only
then the shuffles of the group are removed.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bigdl.common.errors import WorkerLost, require
from bigdl.orca.cluster.environment import ship_modules
from bigdl.orca.cluster.plan import quiet
from bigdl.orca.cluster.spark import user_import_path
from bigdl.orca.cluster.spark_calls import SparkCall, job_error
from bigdl.orca.parameter_layer.frames import Inbox, frames_of
from bigdl.orca.parameter_layer.messages import unpack
from bigdl.orca.parameter_layer.pairs import Pairs, key
from bigdl.orca.parameter_layer.plan import LayerPlan
from bigdl.orca.parameter_layer.rows import Rows
from bigdl.orca.parameter_layer.state import RankState
from bigdl.orca.parameter_layer.tasks import (
    AWAY,
    FOR_GRADIENTS,
    FOR_UPDATE,
    Tasks,
)
from bigdl.orca.parameter_layer.transport import Transport
from bigdl.runtime.jobs import job_number, user_error

__all__ = ["ShuffleTransport"]

_SMALL = 2 << 20  # bytes of all weights; see Pairs
_GONE = "Checkpoint block"  # what Spark says of state that was kept and is gone


class ShuffleTransport(Transport):
    """Everything through Spark's shuffle.

    Parameters
    ----------
    cluster : SparkCluster
    plan : LayerPlan
        There may be more ranks than the cluster runs tasks at once, and fewer slices than ranks.
    program : callable
        ``program(rank, shards)`` gives the rank's :class:`~.rank.Replica`; shipped by value.
    feed : FeedGroup
        Of one feed.
    threads : int
        Threads of a task.
    """

    def __init__(self, cluster, plan: LayerPlan, program, feed, *, threads: int = 1):
        cloudpickle = require("cloudpickle", "orca")
        self._cluster, self._sc, self._plan = cluster, cluster.sc, plan
        self._resources = contextlib.ExitStack()
        are_small = 4 * plan.geometry.total <= _SMALL
        self._pairs = Pairs(self._sc, plan.ranks, are_small=are_small)
        self._state = None
        try:
            self._resources.enter_context(quiet(self._sc))  # again for each job takes its time
            ship_modules(self._sc)
            number = self._resources.enter_context(job_number())
            shipped = self._sc.broadcast(cloudpickle.dumps(program))
            self._resources.callback(shipped.unpersist)
            self._tasks = Tasks(
                secrets.token_hex(8), plan, shipped, threads, tuple(user_import_path())
            )
            self._rows = self._call(lambda: Rows(cluster, self._pairs, feed, number))
            self._resources.callback(self._rows.close)
            self._known: list[dict] | None = None
        except BaseException:
            self.close()
            raise

    def rows(self):
        if self._known is None:

            def describe():
                known = self._pairs.mapped(self._rows.handles, self._tasks.describe())
                found = self._pairs.values(known)
                return found.mapPartitionsWithIndex(_descriptions).collect()

            found = sorted(self._call(describe), key=lambda d: d["rank"])
            _raise_first(found)
            self._known = [doc["known"] for doc in found]
        return self._known

    def start(self, states):
        if self._state is not None:  # again: what was lost may be the rows
            self._call(self._rows.renew)
        self.recut(states)

    def recut(self, states):
        def begin():
            if self._state is not None:
                self._pairs.drop_for_good(self._state)
            self._cut(len(states))
            packed = dict(enumerate(map(_packed, states)))
            shipped = self._sc.broadcast(packed)

            def give(index, items):
                for _ in items:
                    pass
                for kind, data in shipped.value.get(index, ()):
                    for frame in frames_of(kind, index, data):
                        yield key(index)
                        yield frame

            made = self._pairs.mapped(self._pairs.tokens(), give)
            self._take(made)
            self._pairs.values(made).count()
            shipped.unpersist()

        self._call(begin)

    def _cut(self, slices):
        """Have so many owners of slices from now on."""
        self._plan = replace(self._plan, slices=slices)
        self._tasks = replace(self._tasks, plan=self._plan)

    def run(self, steps):
        found = self._call(lambda: self._group(steps))
        _raise_first(found)
        return [doc["records"] for doc in sorted(found, key=lambda d: d["rank"])]

    def _group(self, steps):
        pairs, tasks, shuffles = self._pairs, self._tasks, []

        def shuffled(source, task):
            shuffles.append(pairs.shuffled(source, task))
            return shuffles[-1]

        def with_state(found, update):
            return pairs.beside(found, pairs.on_lines(update, *FOR_UPDATE))

        update = shuffled(self._state, tasks.begin())
        for number, step in enumerate(steps, 1):
            weights = pairs.on_lines(update, *FOR_GRADIENTS)
            found = shuffled(pairs.beside(self._rows.handles, weights), tasks.gradients(step))
            if self._plan.needs_statistics:
                found = shuffled(with_state(found, update), tasks.reduce())
            found = with_state(found, update)
            if number < len(steps):
                update = shuffled(found, tasks.update(step, last=False))
        state = pairs.mapped(found, tasks.update(steps[-1], last=True))
        before = self._state
        self._take(state)
        found = None
        try:
            found = _agreed(pairs.values(state).mapPartitionsWithIndex(_records).collect())
        finally:
            if found is None or any(doc["error"] for doc in found):
                self._state = before
                pairs.drop_for_good(state)
            else:
                pairs.drop_for_good(before)
            pairs.remove_shuffles(shuffles)
        return found

    def _take(self, state):
        """Let executors keep a state; in two copies, where one of them may be lost."""
        copies = 2 if self._cluster.nodes > 1 else 1
        self._pairs.keep(state, copies)
        self._pairs.forget_lineage(state)
        self._state = state

    def states(self):
        def collect():
            inbox = Inbox(self._pairs.values(self._state).collect())
            residuals = inbox.messages(b"R") or [None] * self._plan.owners
            return [
                RankState.unpack(data, _residual(residual))
                for data, residual in zip(inbox.messages(b"S"), residuals, strict=True)
            ]

        return self._call(collect)

    def close(self):
        if self._state is not None:
            self._pairs.drop_for_good(self._state)
            self._state = None
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._resources.close()

    def _call(self, function):
        """Run Spark jobs so that Ctrl-C ends them, and say what became of them."""

        def call():
            with quiet(self._sc):
                return function()

        try:
            return SparkCall(self._sc, call).wait()
        except Exception as error:
            text = str(error)
            if AWAY in text:
                reason = text.partition(AWAY)[2].partition("\n")[0].strip()
                raise WorkerLost(f"Rows were lost: {reason}") from None
            if _GONE in text:
                raise WorkerLost("The weights were lost with all executors that had them") from None
            raise job_error(error, []) from None


def _raise_first(found) -> None:
    """Raise the first error of user code among the answers of the ranks."""
    for doc in sorted(found, key=lambda d: d["rank"]):
        if doc["error"]:
            raise user_error(doc["error"])


def _agreed(found):
    """The answers of the owners, if the same contributions came late for all of them.

    A contribution that Spark has computed again, since its executor was lost, may be late once and
    in time once; then some owners have added it and others have not.
    """
    late = {json.dumps([r["late"] for r in doc["records"]]) for doc in found if not doc["error"]}
    if len(late) > 1:
        raise WorkerLost("An executor was lost while a contribution was late")
    return found


def _descriptions(index, frames):
    """What a replica said of its rows, or what went wrong."""
    inbox = Inbox(frames)
    error, known = inbox.messages(b"E"), inbox.message(b"D")
    yield {
        "rank": index,
        "error": unpack(error[0])[0] if error else None,
        "known": None if known is None else unpack(known)[0],
    }


def _packed(state: RankState) -> list:
    found = [(b"S", state.pack())]
    if state.residual is not None:
        found.append((b"R", state.residual.tobytes()))
    return found


def _residual(data):
    return None if data is None else np.frombuffer(data, np.float32)


def _records(index, frames):
    """What the driver wants to know of a group: times, or what went wrong."""
    inbox = Inbox(frames)
    errors: Sequence = inbox.messages(b"E")
    state = inbox.message(b"S")
    if errors:
        yield {"rank": index, "error": unpack(errors[0])[0], "records": []}
    elif state is not None:
        yield {"rank": index, "error": None, "records": unpack(state)[0]["records"]}
