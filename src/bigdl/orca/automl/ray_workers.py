"""The workers of one trial on Ray: the trial's own process and its peers, in its placement group.

All of them make the same trial in step: each trains with its part of every batch, and gradients
meet by ``torch.distributed``.  The trial's process, which Ray Tune knows, is rank 0.  It hosts the
channel by which the workers find each other, makes each call together with its peers, and alone
reports and saves.  Peers are actors that it owns, so they end with it, and with the placement
group.  What a worker's end means for the others is said by the sockets between them; a thread of
rank 0 watches for what the sockets do not see.
"""

import contextlib
import os
import pickle
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray import tune
from ray.util.placement_group import PlacementGroup

from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.common.storage import write_bytes
from bigdl.common.timeouts import CLEAN_UP_S, TRIAL_FAILURE_S
from bigdl.orca.automl.trial import TrialJob, TrialRun
from bigdl.orca.engines.ray import kill
from bigdl.runtime.channel import Address, AttemptChannel, Channel

ACTOR = "bigdl_search_actor"
"""The entry of Tune's configurations that names the SearchActor."""

_STATE = "state.pkl"


class SearchActor:
    """The job of a search and the weights of its trials; an actor."""

    def __init__(self, folder: str, job: list):
        self._folder, self._job = Path(folder), job
        self._numbers: dict[str, int] = {}

    def job(self) -> list:
        """Return the reference of the job, in a list, so that it stays one."""
        return self._job

    def set_number(self, trial_id: str, number: int) -> None:
        """Set the number in the records of one of Tune's trials."""
        self._numbers[trial_id] = number

    def save(self, trial_id: str, weights: bytes) -> None:
        """Keep the weights of a trial's best epoch."""
        write_bytes(str(self._folder / f"{self._numbers[trial_id]:05}"), weights)


class TrialWorker:
    """One worker of the trial: rank 0 in the trial's process, the others as actors.

    Parameters
    ----------
    rank, size : int
    address : bigdl.runtime.channel.Address or None
        Of several workers.
    """

    def __init__(self, rank: int, size: int, address: Address | None):
        self._rank, self._size, self._address = rank, size, address
        self.run: TrialRun | None = None

    def call(self, name: str, *arguments: Any) -> tuple[Any, tuple[str, str, str] | None]:
        """Return the result of a method of the trial, or of ``"begin"``, and its failure: origin,
        class and traceback."""
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
        """Make the model of a trial and meet the others; `number` tells trials apart."""
        self.end()
        job = ray.get(reference[0])
        self.run = TrialRun(
            replace(job, train=_at_hand(job.train), validation=_at_hand(job.validation)),
            config,
            self._rank,
            self._size,
            channel=self._address and self._address.connect(number),
            host=ray.util.get_node_ip_address(),
        )

    def end(self, patience: float | None = None) -> None:
        """Leave the others, who then fail if they wait for this worker."""
        if self.run is not None:
            self.run.close(patience)
        self.run = None


def _at_hand(data: Any) -> Any:
    """Return rows in the memory that all processes of a node share."""
    return ray.get(data) if isinstance(data, ray.ObjectRef) else data


class TuneTrial(tune.Trainable):
    """One trial of Tune in the process of rank 0; a step is an epoch.

    What fails in user code is a result, too: ``failure`` holds the traceback.  The next trial of
    this process goes on with its workers.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._member: TrialWorker | None = None
        self._peers: list[Any] = []
        self._channel: Channel | None = None
        self._line: AttemptChannel | None = None
        self._number = 0
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._values = dict(new_config)
        self._actor: Any = ray.get_actor(self._values.pop(ACTOR))
        self._is_begun = False
        return True

    def step(self) -> dict[str, Any]:
        try:
            run = self._begun()
            step = self._together("step")
            if step.is_best:
                ray.get(self._actor.save.remote(self.trial_id, run.model.weights()))
        except WorkerLost:  # Tune hears of it as of the loss of this process
            raise
        except Exception:
            self.cleanup()  # who knows what its other workers wait for
            failure = {"failure": traceback.format_exc(), "done": True}
            return {**dict.fromkeys(self._job.goal.names, float("nan")), **failure}
        figures = dict(zip(self._job.goal.names, step.figures, strict=True))
        return {**figures, "step": step, "done": step.is_last}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {**self._begun().state(), "trial": self.trial_id}
        Path(checkpoint_dir, _STATE).write_bytes(pickle.dumps(state))

    def load_checkpoint(self, checkpoint: Any) -> None:
        state = pickle.loads(Path(checkpoint, _STATE).read_bytes())
        if state.pop("trial") != self.trial_id:
            # the weights of the best epoch are another trial's
            state["step"] = replace(state["step"], best=())
        self._begun()
        self._together("restore", state)

    def cleanup(self) -> None:
        """End the trial and the peers; another trial starts new ones."""
        if self._member is not None:
            self._member.end(CLEAN_UP_S)
        for peer in self._peers:
            kill(peer)
        if self._channel is not None:
            self._channel.close()
        self._member, self._peers, self._channel = None, [], None
        # Ray ends this process by a signal, whose handler must not be the first to run in __del__
        self._actor = None

    def _begun(self) -> TrialRun:
        """Begin the trial if it has not begun; the placement group has a bundle for each worker."""
        if not self._is_begun:
            reference: list = ray.get(self._actor.job.remote())
            self._job: TrialJob = ray.get(reference[0])
            if self._member is None:
                self._start(len(self._job.bundles))
            self._number += 1
            if self._channel is not None:
                self._line = self._channel.attempt(self._number)
            self._together("begin", self._number, reference, self._values)
            self._is_begun = True
        return cast("TrialRun", cast("TrialWorker", self._member).run)

    def _start(self, workers: int) -> None:
        from bigdl.runtime.channel import Channel

        address = None
        if workers > 1:
            self._channel = Channel(ray.util.get_node_ip_address())
            address = self._channel.address
        self._member = TrialWorker(0, workers, address)
        self._peers = [_start_peer(rank, workers, address) for rank in range(1, workers)]

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
        with _watched(calls, self._line):
            result, failure = cast("TrialWorker", self._member).call(name, *arguments)
        failures = _failures(calls, None if failure is None else TRIAL_FAILURE_S)
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
    make = ray.remote(TrialWorker).options(
        **options, resources=resources, scheduling_strategy=strategy
    )
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


@contextlib.contextmanager
def _watched(calls: list, line: AttemptChannel | None) -> Iterator[None]:
    """Tell rank 0 of peers that fail where no socket does, as before all have met.

    If it does not hear even so its process is ended, and the trial is tried again.
    """
    over = threading.Event()

    def look() -> None:
        waiting = calls
        while waiting and not over.is_set():
            done, waiting = ray.wait(waiting, timeout=0.2, fetch_local=False)
            if any(_failure(call) is not None for call in done) and not over.is_set():
                with contextlib.suppress(Exception):  # it was closed just now
                    cast("AttemptChannel", line).count("failed", 1)
                if not over.wait(TRIAL_FAILURE_S):
                    os._exit(1)
                return

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        over.set()
