"""Workers of one trial on Ray: the Tune trial's process and its peer actors.

All workers train the same trial: each processes its part of outcomes batch, and gradients are
all-reduced with ``torch.distributed``.  The process that Ray Tune starts is rank 0.  It hosts the
channel through which the workers connect, calls all peers together with itself, and is the only one
that reports and saves.  Rank 0 owns the peer actors, so they end with it and with the placement
group.  The sockets between the workers report the loss of a worker; a thread of rank 0 detects
failures that the sockets do not report.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray import tune
from ray.util.placement_group import PlacementGroup

from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.common.storage import write_bytes
from bigdl.common.timeouts import CLEAN_UP_S, TRIAL_FAILURE_S
from bigdl.orca.automl.trial import TrialJob, TrialRun
from bigdl.orca.cluster.ray import RayCluster
from bigdl.orca.engines.ray import kill
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.channel import Address, AttemptChannel, Channel

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")

ACTOR = "bigdl_search_actor"
"""Key of a Tune configuration that holds the name of the SearchActor."""

_STATE = "state.pkl"


class SearchActor:
    """Actor that holds the job of a search and saves the weights of its trials."""

    def __init__(self, folder: str, job: list):
        self._folder, self._job = Path(folder), job
        self._numbers: dict[str, int] = {}

    def job(self) -> list:
        """Return the object reference of the job, in a list so that Ray does not resolve it."""
        return self._job

    def set_number(self, trial_id: str, number: int) -> None:
        """Set the record number of a Tune trial."""
        self._numbers[trial_id] = number

    def save(self, trial_id: str, weights: bytes) -> None:
        """Save the weights of a trial's best epoch."""
        write_bytes(str(self._folder / f"{self._numbers[trial_id]:05}"), weights)


class TrialWorker:
    """Worker of a trial: rank 0 runs in the trial's process, the others as actors.

    Parameters
    ----------
    rank, size : int
    address : bigdl.runtime.channel.Address or None
        Address of the channel, if there are several workers.
    """

    def __init__(self, rank: int, size: int, address: Address | None):
        self._rank, self._size, self._address = rank, size, address
        self.run: TrialRun | None = None

    def call(
        self, name: str, *arguments: Any
    ) -> tuple[Any, tuple[str, str, str] | None]:  # arguments: of the method
        """Call a method of the trial; return its result and its failure.

        A failure is a tuple of origin, class name and traceback. The name ``"begin"`` calls
        :meth:`begin`.
        """
        from bigdl.runtime.task import is_peer_failure

        try:
            call = self.begin if name == "begin" else getattr(self.run, name)
            return call(*arguments), None
        except Exception as error:
            origin = "peer" if is_peer_failure(error) else "user"
            failure = origin, type(error).__name__, traceback.format_exc()
            self.end(CLEAN_UP_S)
            return None, failure

    def begin(self, number: int, reference: list, config: Mapping[str, Any]) -> None:
        """Create the trial's model and connect to the other workers.

        The `number` identifies the trial on the channel.
        """
        self.end()
        job = ray.get(reference[0])
        self.run = TrialRun(
            replace(job, train=_fetch(job.train), validation=_fetch(job.validation)),
            config,
            self._rank,
            self._size,
            channel=self._address and self._address.connect(number),
            host=ray.util.get_node_ip_address(),
            certificate=self._address and self._address.certificate,
        )

    def end(self, timeout: float | None = None) -> None:
        """Disconnect from the other workers; workers that wait for this one fail."""
        if self.run is not None:
            self.run.close(timeout)
        self.run = None


def _fetch(data: T | ray.ObjectRef[T]) -> T:
    """Return rows from the node's shared memory if `data` is an object reference."""
    return ray.get(data) if isinstance(data, ray.ObjectRef) else data


class TuneTrial(tune.Trainable):
    """Tune trainable in the process of rank 0; one step is one epoch.

    An error in user code is reported as a result with the traceback in ``failure``.  The next trial
    in this process reuses its workers.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._local_worker: TrialWorker | None = None
        self._peers: list[Any] = []
        self._channel: Channel | None = None
        self._connection: AttemptChannel | None = None
        self._number = 0
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._values = dict(new_config)
        self._actor: Any = ray.get_actor(self._values.pop(ACTOR))
        self._is_begun = False
        return True

    def step(self) -> dict[str, Any]:
        try:
            run = self._begin_if_needed()
            step = self._call_all("step")
            if step.is_best:
                ray.get(self._actor.save.remote(self.trial_id, run.model.weights()))
        except WorkerLost:  # Tune treats it as the loss of this process
            raise
        except Exception:
            self.cleanup()  # other workers may wait indefinitely
            failure = {"failure": traceback.format_exc(), "done": True}
            return {**dict.fromkeys(self._job.goal.names, float("nan")), **failure}
        metrics = dict(zip(self._job.goal.names, step.metrics, strict=True))
        return {**metrics, "step": step, "done": step.is_last}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {**self._begin_if_needed().state(), "trial": self.trial_id}
        Path(checkpoint_dir, _STATE).write_bytes(pickle.dumps(state))

    def load_checkpoint(self, checkpoint: Any) -> None:  # checkpoint: a folder
        state = pickle.loads(Path(checkpoint, _STATE).read_bytes())
        if state.pop("trial") != self.trial_id:
            # the weights of the best epoch belong to another trial
            state["step"] = replace(state["step"], best=())
        self._begin_if_needed()
        self._call_all("restore", state)

    def cleanup(self) -> None:
        """End the trial and its peers; the next trial starts new peers."""
        if self._local_worker is not None:
            self._local_worker.end(CLEAN_UP_S)
        for peer in self._peers:
            kill(peer)
        if self._channel is not None:
            self._channel.close()
        self._local_worker, self._peers, self._channel = None, [], None
        # Ray ends this process by a signal; drop the handle before the handler runs __del__
        self._actor = None

    def _begin_if_needed(self) -> TrialRun:
        """Start the trial if necessary, with one peer in each of the remaining resource bundles."""
        if not self._is_begun:
            reference: list = ray.get(self._actor.job.remote())
            self._job: TrialJob = ray.get(reference[0])
            if self._local_worker is None:
                self._start(len(self._job.bundles))
            self._number += 1
            if self._channel is not None:
                self._connection = self._channel.attempt(self._number)
            self._call_all("begin", self._number, reference, self._values)
            self._is_begun = True
        return cast("TrialRun", cast("TrialWorker", self._local_worker).run)

    def _start(self, workers: int) -> None:
        address = None
        if workers > 1:
            is_encrypted = RayCluster().asks_encryption != ""
            certificate = Certificate.make() if is_encrypted else None
            host = ray.util.get_node_ip_address()
            self._channel = Channel(host, certificate=certificate)
            address = self._channel.address
        self._local_worker = TrialWorker(0, workers, address)
        self._peers = [_start_peer(rank, workers, address) for rank in range(1, workers)]

    def _call_all(self, name: str, *arguments: object) -> Any:
        """Call a method in this process and on all peers.

        Raises
        ------
        WorkerLost
            If the process of a peer is lost.
        WorkerError
            If user code fails on a peer.
        """
        calls = [peer.call.remote(name, *arguments) for peer in self._peers]
        with _watch_peer_failures(calls, self._connection):
            result, failure = cast("TrialWorker", self._local_worker).call(name, *arguments)
        failures = _failures(calls, None if failure is None else TRIAL_FAILURE_S)
        lost = [each for each in failures if isinstance(each, WorkerLost)]
        if lost:
            raise lost[0]
        outcomes = [(0, failure), *enumerate(failures, 1)]
        failed = [(rank, *each) for rank, each in outcomes if each is not None]
        for rank, origin, error_class, text in failed:
            if origin == "user":
                raise WorkerError(rank, error_class, text)
        if failed:
            raise WorkerLost(f"The workers of a trial lost their connections: {failed[0][-1]}")
        return result


def _start_peer(rank: int, workers: int, address: Address | None) -> ActorHandle:
    """Start the peer actor of a rank in the rank's bundle of this process's placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = cast("PlacementGroup", ray.util.get_current_placement_group())
    resources = dict(group.bundle_specs[rank])
    options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0)}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    make = ray.remote(TrialWorker).options(
        **options, resources=resources, scheduling_strategy=strategy
    )
    return cast("ActorHandle", make.remote(rank, workers, address))


def _failures(calls: list, timeout: float | None) -> list:
    """Wait for calls; return each call's failure, or None if it succeeded."""
    ray.wait(calls, num_returns=len(calls), timeout=timeout, fetch_local=False)
    return [_failure(call) for call in calls]


def _failure(call):
    try:
        return ray.get(call, timeout=0)[1]
    except ray.exceptions.GetTimeoutError:  # a hanging call; it ends with the trial
        return None
    except ray.exceptions.RayActorError as error:
        return WorkerLost(f"The process of a worker of the trial was lost: {error}")


@contextlib.contextmanager
def _watch_peer_failures(calls: list, connection: AttemptChannel | None) -> Iterator[None]:
    """Context manager that notifies rank 0 of peer failures that its sockets do not report.

    If rank 0 does not react, its process exits and the trial is retried.
    """
    stopped = threading.Event()

    def watch() -> None:
        waiting = calls
        while waiting and not stopped.is_set():
            done, waiting = ray.wait(waiting, timeout=0.2, fetch_local=False)
            if any(_failure(call) is not None for call in done) and not stopped.is_set():
                with contextlib.suppress(Exception):  # the connection was just closed
                    cast("AttemptChannel", connection).count("failed", 1)
                if not stopped.wait(TRIAL_FAILURE_S):
                    os._exit(1)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
