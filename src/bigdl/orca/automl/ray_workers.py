"""The workers of one trial on Ray: the trial's own process and its peers, in its placement group.

All of them make the same trial in step: each trains with its part of every batch, and gradients
meet by ``torch.distributed``.  The trial's process, which Ray Tune knows, is rank 0.  It hosts the
channel by which the workers find each other, makes each call together with its peers, and alone
reports and saves.  Peers are actors that it owns, so they end with it, and with the placement
group.  What a worker's end means for the others is said by the sockets between them; a thread of
rank 0 watches for what the sockets do not see.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import ray

from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.orca.automl.trial import Step, TrialRun, trial_worker

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from bigdl.orca.automl.trial import Job
    from bigdl.runtime.channel import Address, Channel, Line
    from bigdl.runtime.worker import Worker

_TIMEOUT_S = 1800.0  # seconds after which a collective without progress fails
_CLEAN_UP_S = 1.0  # seconds that the end of a process group may hold up its report
_GRACE_S = 30.0  # seconds in which a failure of one worker must reach the others


class Member:
    """One worker of the trial: rank 0 in the trial's process, the others as actors.

    Parameters
    ----------
    rank, size : int
    address : bigdl.runtime.channel.Address or None
        Of several workers.
    """

    def __init__(self, rank: int, size: int, address: Address | None):
        self._rank, self._size, self._address = rank, size, address
        self._worker: Worker | None = None
        self.run: TrialRun | None = None

    def call(self, name: str, *arguments: Any) -> tuple[Any, tuple[str, str, str] | None]:
        """Return the result of a method, and its failure: origin, class and traceback."""
        from bigdl.runtime.task import is_peer_failure

        try:
            return getattr(self, name)(*arguments), None
        except Exception as error:
            origin = "peer" if is_peer_failure(error) else "user"
            failure = origin, type(error).__name__, traceback.format_exc()
            self.end(_CLEAN_UP_S)
            return None, failure

    def begin(self, number: int, reference: list, config: Mapping[str, Any]) -> None:
        """Make the model of a trial and meet the others; `number` tells trials apart."""
        self.end()
        job = ray.get(reference[0]).opened()
        self._worker = trial_worker(
            job,
            self._rank,
            self._size,
            line=self._address and self._address.connect(number),
            host=ray.util.get_node_ip_address(),
            timeout=_TIMEOUT_S,
        )
        self.run = TrialRun(job, config, self._worker)

    def step(self) -> Step:
        """Train for one epoch and compute its figures."""
        return cast("TrialRun", self.run).step()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        cast("TrialRun", self.run).restore(state)

    def end(self, patience: float | None = None) -> None:
        """Leave the others, who then fail if they wait for this worker."""
        if self._worker is not None:
            self._worker.clean_up(patience)
        self._worker = self.run = None


class TrialWorkers:
    """All workers of a trial, in the process of rank 0; has the face of a TrialRun.

    Attributes
    ----------
    job : Job
        That of the trial which has begun last.
    """

    job: Job

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._line: Line | None = None
        self._number = 0
        self._member: Member | None = None
        self._peers: list[Any] = []

    def begin(self, reference: list, config: Mapping[str, Any]) -> None:
        """Begin a trial; the workers of the one before go on.

        Parameters
        ----------
        reference : list
            The reference of the job; the placement group of this process has a bundle for each of
            its workers.
        config : dict
        """
        self.job = ray.get(reference[0])
        if self._member is None:
            self._start(self.job.workers)
        self._number += 1
        if self._channel is not None:
            self._line = self._channel.line(self._number)
        self._together("begin", self._number, reference, config)

    def _start(self, workers: int) -> None:
        from bigdl.runtime.channel import Channel

        address = None
        if workers > 1:
            self._channel = Channel(ray.util.get_node_ip_address())
            address = self._channel.address
        self._member = Member(0, workers, address)
        self._peers = [_start_peer(rank, workers, address) for rank in range(1, workers)]

    @property
    def _run(self) -> TrialRun:
        return cast("TrialRun", cast("Member", self._member).run)

    def weights(self) -> bytes:
        """Return the trained weights."""
        return self._run.model.weights()

    def step(self) -> Step:
        """Train for one epoch and compute its figures."""
        return self._together("step")

    def state(self) -> dict[str, Any]:
        """Return what other workers need to go on with the trial."""
        return self._run.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._together("restore", state)

    def close(self) -> None:
        """End the trial and the peers; another trial starts new ones."""
        if self._member is not None:
            self._member.end(_CLEAN_UP_S)
        for peer in self._peers:
            with contextlib.suppress(Exception):  # Ray may be gone
                ray.kill(peer)
        if self._channel is not None:
            self._channel.close()
        self._member, self._peers, self._channel = None, [], None

    def _together(self, name: str, *arguments: Any) -> Any:
        """Make a call here and on all peers.

        Raises
        ------
        WorkerLost
            When the process of a peer is lost.
        WorkerError
            When user code has failed on a peer.
        """
        calls = [peer.call.remote(name, *arguments) for peer in self._peers]
        with _Watch(calls, self._line):
            result, failure = cast("Member", self._member).call(name, *arguments)
        failures = _failures(calls, None if failure is None else _GRACE_S)
        lost = [each for each in failures if isinstance(each, WorkerLost)]
        if lost:
            raise lost[0]
        every = [(0, failure), *enumerate(failures, 1)]
        failed = [(rank, *each) for rank, each in every if each is not None]
        for rank, origin, error_class, text in failed:
            if origin == "user":
                raise WorkerError(rank, error_class, text)
        if failed:
            raise WorkerLost(f"The workers of a trial have lost each other: {failed[0][-1]}")
        return result


def _start_peer(rank: int, workers: int, address: Address | None) -> Any:
    """Start the peer of a rank, in its bundle of the placement group of this process."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = cast("PlacementGroup", ray.util.get_current_placement_group())
    resources = dict(group.bundle_specs[rank])
    options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0)}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    make = ray.remote(Member).options(**options, resources=resources, scheduling_strategy=strategy)
    return make.remote(rank, workers, address)


def _failures(calls: list, patience: float | None) -> list:
    """Return the failure of each call, None where there is none."""
    ray.wait(calls, num_returns=len(calls), timeout=patience, fetch_local=False)
    return [_failure(call) for call in calls]


def _failure(call):
    try:
        return ray.get(call, timeout=0)[1]
    except ray.exceptions.GetTimeoutError:  # it hangs, and is ended with the trial
        return None
    except ray.exceptions.RayActorError as error:
        return WorkerLost(f"The process of a worker of the trial was lost: {error}")


class _Watch:
    """Tells rank 0 of peers that fail where no socket does, as before all have met.

    If it does not hear even so its process is ended, and the trial is tried again.
    """

    def __init__(self, calls: list, line):
        self._calls, self._line = calls, line
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *error):
        self._over.set()

    def _look(self):
        waiting = list(self._calls)
        while waiting and not self._over.is_set():
            done, waiting = ray.wait(waiting, timeout=0.2, fetch_local=False)
            if any(_failure(call) is not None for call in done) and not self._over.is_set():
                with contextlib.suppress(Exception):  # it was closed just now
                    self._line.count("failed", 1)
                if not self._over.wait(_GRACE_S):
                    os._exit(1)
                return
