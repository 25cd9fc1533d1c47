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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import ray

from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.orca.automl.trial import Job, Step, TrialRun

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from bigdl.runtime.channel import Line

__all__ = ["TrialWorkers"]

_TIMEOUT_S = 1800.0  # seconds after which a collective without progress fails
_CLEAN_UP_S = 1.0  # seconds that the end of a process group may hold up its report
_GRACE_S = 30.0  # seconds in which a failure of one worker must reach the others


class _NoDriver:
    """There is nobody to report to but rank 0, who hears results of calls."""

    def options(self) -> dict:
        return {}


class _Member:
    """One worker of the trial, in its own process.

    Parameters
    ----------
    rank, size : int
    address : bigdl.runtime.channel.Address
    """

    def __init__(self, rank: int, size: int, address):
        self._rank, self._size, self._address = rank, size, address
        self._worker: Any = None
        self.run: Any = None

    def begin(self, number: int, job: Job, config: Mapping[str, Any]) -> None:
        """Meet the others and make the model of a trial; `number` tells trials apart."""
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
        from bigdl.runtime.worker import Worker

        self.end()
        self._worker = Worker(
            self._rank,
            self._size,
            threads=1,
            shards={},
            line=self._address.connect(number),
            uplink=_NoDriver(),
            host=ray.util.get_node_ip_address(),
            local_dir="",
            timeout=_TIMEOUT_S,
        )
        sync = TorchDistributedSync(self._worker)
        sync.start()
        _use_gpu(sync, job.gpus)
        self.run = TrialRun(job, config, sync)

    def end(self, patience: float | None = None) -> None:
        """Leave the others, who then fail if they wait for this worker."""
        if self._worker is not None:
            self._worker.clean_up(patience)
        self._worker = self.run = None

    def outcome(self, call: Callable[[], Any]) -> tuple[Any, tuple[str, str, str] | None]:
        """Return the result of a call, and its failure: origin, class and traceback."""
        from bigdl.runtime.task import is_peer_failure

        try:
            return call(), None
        except Exception as error:
            origin = "peer" if is_peer_failure(error) else "user"
            failure = origin, type(error).__name__, traceback.format_exc()
            self.end(_CLEAN_UP_S)
            return None, failure


def _use_gpu(sync, gpus: float) -> None:
    import torch

    if gpus and torch.cuda.is_available():
        sync.use_device(torch.device("cuda", 0), is_alone=gpus >= 1)


class Peer:
    """A worker of rank 1 or higher; an actor."""

    def __init__(self, rank: int, size: int, address):
        self._member = _Member(rank, size, address)

    def begin(self, number: int, reference: list, config: Mapping[str, Any]):
        """See :meth:`TrialWorkers.begin`; returns how it has failed, if it has."""

        def begin():
            job = ray.get(reference[0]).opened()
            self._member.begin(number, job, config)

        return self._member.outcome(begin)[1]

    def step(self):
        """Train for an epoch; returns how it has failed, if it has."""
        return self._member.outcome(lambda: self._member.run.step())[1]

    def restore(self, state: dict):
        """Go on from a state; returns how it has failed, if it has."""
        return self._member.outcome(lambda: self._member.run.restore(state))[1]


class TrialWorkers:
    """All workers of a trial, in the process of rank 0; has the face of a TrialRun.

    Parameters
    ----------
    workers : int
        As many as the placement group of this process has bundles.
    """

    def __init__(self, workers: int):
        from bigdl.runtime.channel import Channel

        self._channel = Channel(ray.util.get_node_ip_address())
        self._number = 0
        self._line: Line | None = None
        self._member = _Member(0, workers, self._channel.address)
        self._peers = [_start(rank, workers, self._channel.address) for rank in range(1, workers)]

    def begin(self, reference: list, job: Job, config: Mapping[str, Any]) -> None:
        """Begin a trial.

        Parameters
        ----------
        reference : list
            The reference of the job.
        job : Job
            The same with its data at hand.
        config : dict
        """
        self._number += 1
        number = self._number
        self._line = self._channel.line(number)
        self._together(
            lambda: self._member.begin(number, job, config), "begin", number, reference, config
        )

    @property
    def model(self):
        """Model of rank 0."""
        return self._member.run.model

    def step(self) -> Step:
        """Train for one epoch and look at the result."""
        return self._together(self._member.run.step, "step")

    def state(self) -> dict:
        """Return what other workers need to go on with the trial."""
        return self._member.run.state()

    def restore(self, state: dict) -> None:
        """Go on from a state."""
        self._together(lambda: self._member.run.restore(state), "restore", state)

    def close(self) -> None:
        """End the peers."""
        self._member.end(_CLEAN_UP_S)
        for peer in self._peers:
            with contextlib.suppress(Exception):  # Ray may be gone
                ray.kill(peer)
        self._peers = []
        self._channel.close()

    def _together(self, call: Callable[[], Any], name: str, *arguments):
        """Make a call here and on all peers.

        Raises
        ------
        WorkerLost
            When the process of a peer is lost.
        WorkerError
            When user code has failed on a peer.
        """
        calls = [getattr(peer, name).remote(*arguments) for peer in self._peers]
        with _Watch(calls, self._line):
            result, failure = self._member.outcome(call)
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


def _start(rank: int, workers: int, address):
    """Start the peer of a rank, in its bundle of the placement group of this process."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = cast("PlacementGroup", ray.util.get_current_placement_group())
    resources = dict(group.bundle_specs[rank])
    options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0)}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    make = ray.remote(Peer).options(**options, resources=resources, scheduling_strategy=strategy)
    return make.remote(rank, workers, address)


def _failures(calls: list, patience: float | None) -> list:
    """Return the failure of each call, None where there is none."""
    ray.wait(calls, num_returns=len(calls), timeout=patience, fetch_local=False)
    return [_failure(call) for call in calls]


def _failure(call):
    try:
        return ray.get(call, timeout=0)
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
