"""Trials that several workers run together.

All workers of a trial run the same objective, as ``torchrun`` does. Rank 0 talks to the driver; the
other ranks receive the results of its calls in the same order, so all ranks see the same
parameters and take the same pruning decisions. Values that the other ranks report are ignored.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import CLEAN_UP_S, PEER_LOOK_S
from bigdl.runtime.engine import PeerLost
from bigdl.runtime.worker import Worker

if TYPE_CHECKING:
    from bigdl.runtime.channel import AttemptChannel

T = TypeVar("T")


def group_channel(channel: AttemptChannel, number: int) -> AttemptChannel:
    """Return the view of a channel that the workers of one trial share."""
    return channel.part(f"trial/{number}")


class TrialGroup:
    """The workers that run one trial together, as one of them sees it.

    Parameters
    ----------
    worker : bigdl.runtime.worker.Worker
        The worker in its job.
    number : int
        Number of the trial.
    rank, world_size : int
        Rank in the trial, and number of workers of the trial.
    """

    def __init__(self, worker: Worker, number: int, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self._channel = group_channel(worker.channel, number)
        self._calls = self._exchanges = 0
        self._is_joined = False
        self._worker = Worker(
            rank,
            world_size,
            threads=worker.threads,
            channel=self._channel,
            host=worker.host,
            local_dir=worker.local_dir,
            timeout=worker.timeout,
            certificate=worker.certificate,
        )

    @property
    def channel(self) -> AttemptChannel:
        """The keys that the workers of the trial share."""
        return self._channel

    @property
    def host(self) -> str:
        """IP address of this worker."""
        return self._worker.host

    def shared(self, call: str, compute: Callable[[], T]) -> T:
        """Return the result of a call that rank 0 makes for all ranks.

        Parameters
        ----------
        call : str
            The call, which must be the same on all ranks.
        compute : callable
            Makes the call; its result is JSON-serializable.
        """
        if self.world_size == 1:
            return compute()
        key, self._calls = f"call/{self._calls}", self._calls + 1
        if self.rank == 0:
            try:
                value = compute()
            except Exception as error:
                failure = [type(error).__name__, str(error)]
                self._channel.set_json(key, {"call": call, "error": failure})
                raise
            self._channel.set_json(key, {"call": call, "value": value})
            return value
        self._await({key: 0}, call)
        answer = self._channel.get_json(key)
        if answer["call"] != call:
            raise self._other_order(call, f"when rank 0 called {answer['call']}")
        if "error" in answer:
            name, message = answer["error"]
            raise getattr(builtins, name, RuntimeError)(message)
        return cast("T", answer["value"])

    def broadcast(self, value: T) -> T:
        """Return the JSON-serializable value of rank 0 on all ranks."""
        return self.shared("broadcast", lambda: value)

    def all_gather(self, value: T) -> list[T]:
        """Return the JSON-serializable values of all ranks in rank order."""
        key, self._exchanges = f"gather/{self._exchanges}", self._exchanges + 1
        self._channel.set_json(f"{key}/{self.rank}", value)
        keys = {f"{key}/{rank}": rank for rank in range(self.world_size)}
        self._await(keys, "all_gather")
        return [self._channel.get_json(each) for each in keys]

    def init_process_group(self) -> None:
        """Make the trial's workers the default process group of ``torch.distributed``.

        It uses gloo, with the network, encryption and time limit of a fit, until the trial ends.
        """
        if self._is_joined:
            return
        self._is_joined = True
        if self.world_size > 1:
            from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

            TorchDistributedSync(self._worker).start()
            return
        from torch import distributed

        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def close(self) -> None:
        """Leave the process group, which releases ranks that wait for this one."""
        if self.world_size > 1 or self._is_joined:
            self._worker.clean_up(CLEAN_UP_S)

    def _await(self, keys: dict[str, int], call: str) -> None:
        """Wait for keys that ranks set; raise an error if a rank fails, or ends without its key."""
        channel = self._channel
        while not channel.has(*keys, seconds=PEER_LOOK_S):
            if channel.count("failed"):
                raise PeerLost("another worker of the trial failed")
            for key, rank in keys.items():
                if channel.has(f"ended/{rank}") and not channel.has(key):
                    raise self._other_order(call, f"after rank {rank} had ended")

    def _other_order(self, call: str, when: str) -> UsageError:
        return UsageError(
            "All workers of a trial must call the methods of the trial in the same order, but "
            f"rank {self.rank} called {call} {when}",
            code="function-result",
        )
