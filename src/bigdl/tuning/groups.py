"""Trials that several workers run together.

All workers of a trial run the same objective, as ``torchrun`` does. Rank 0 talks to the driver; the
other ranks receive the results of its calls in the same order, so all ranks see the same
parameters and take the same pruning decisions. Values that the other ranks report are ignored.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from optuna import exceptions

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
        self._calls = 0
        self._is_joined = False
        self._error_of_rank_0: Exception | None = None
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
    def connection(self) -> dict[str, Any]:
        """Arguments of a Worker that connects to the others: network, encryption, time limit."""
        worker = self._worker
        return {
            "channel": self._channel,
            "host": worker.host,
            "certificate": worker.certificate,
            "timeout": worker.timeout,
        }

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
        keys = self._next_keys()
        if self.rank == 0:
            try:
                value = compute()
            except Exception as error:
                self._channel.set_json(keys[0], {"call": call, "error": error_report(error)})
                raise
            self._channel.set_json(keys[0], {"call": call, "value": value})
            return value
        answer = self._answer_of_rank_0(keys, call)
        if "error" in answer:
            self._error_of_rank_0 = error_of_report(answer["error"])
            raise self._error_of_rank_0
        return cast("T", answer["value"])

    def broadcast(self, value: T) -> T:
        """Return the JSON-serializable value of rank 0 on all ranks."""
        return self.shared("broadcast", lambda: _json_value("broadcast", value))

    def all_gather(self, value: T) -> list[T]:
        """Return the JSON-serializable values of all ranks in rank order."""
        value = _json_value("all_gather", value)
        return [value] if self.world_size == 1 else self._gather("all_gather", value)

    def is_of_rank_0(self, error: BaseException | None) -> bool:
        """Return True if an error is, or was caused by, one that this rank got from rank 0."""
        while error is not None and error is not self._error_of_rank_0:
            error = error.__cause__ or error.__context__
        return error is not None

    def init_process_group(self) -> None:
        """Make the trial's workers the default process group of ``torch.distributed``.

        It uses gloo, with the network, encryption and time limit of a fit, until the trial ends.
        """
        if self._is_joined:
            return
        self._is_joined = True
        if self.world_size > 1:
            from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

            self._gather("init_process_group", None)  # its barrier does not check the order
            TorchDistributedSync(self._worker).start()
            return
        from torch import distributed

        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def close(self) -> None:
        """Leave the process group, which releases ranks that wait for this one."""
        if self.world_size > 1 or self._is_joined:
            self._worker.clean_up(CLEAN_UP_S)

    def _next_keys(self) -> list[str]:
        """Return the keys of all ranks for the next call that they make together."""
        number, self._calls = self._calls, self._calls + 1
        return [f"call/{number}/{rank}" for rank in range(self.world_size)]

    def _gather(self, call: str, value: T) -> list[T]:
        """Return the values of a call that all ranks make."""
        keys = self._next_keys()
        self._channel.set_json(keys[self.rank], {"call": call, "value": value})
        self._answer_of_rank_0(keys, call)
        self._await({key: rank for rank, key in enumerate(keys)}, call)
        return [self._channel.get_json(key)["value"] for key in keys]

    def _answer_of_rank_0(self, keys: list[str], call: str) -> dict[str, Any]:
        """Return what rank 0 published; raise an error if it made another call."""
        self._await({keys[0]: 0}, call)
        answer: dict[str, Any] = self._channel.get_json(keys[0])
        if answer["call"] != call:
            raise self._other_order(call, f"when rank 0 called {answer['call']}")
        return answer

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


def error_report(error: Exception) -> dict[str, Any]:
    """Return a JSON-serializable report of an error that another process raises again."""
    report: dict[str, Any] = {"name": type(error).__name__, "message": str(error), "code": None}
    if isinstance(error, UsageError):
        report.update(code=error.code, facts=error.facts)
    return report


def error_of_report(report: Mapping[str, Any]) -> Exception:
    """Return the error of a report: a UsageError, one of Optuna, a builtin one or RuntimeError."""
    name, message = report["name"], report["message"]
    if report["code"] is not None:
        return UsageError(message, code=report["code"], **report["facts"])
    error_class = getattr(builtins, name, getattr(exceptions, name, None))
    if isinstance(error_class, type) and issubclass(error_class, Exception):
        try:
            return error_class(message)
        except Exception:  # its constructor has other arguments
            pass
    return RuntimeError(message)


def plain_value(value: object) -> object:
    """Convert scalars and arrays of NumPy or torch to Python values."""
    if isinstance(value, Mapping):
        return {key: plain_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(each) for each in value]
    if not isinstance(value, str | int | float | bool | None):
        for name in ("tolist", "item"):
            if hasattr(value, name):
                return getattr(value, name)()
    return value


def not_json(method: str, value: object, error: Exception, advice: str) -> UsageError:
    """Return the error for a value that JSON cannot represent."""
    return UsageError(
        f"{method} on another machine takes None, bool, int, float and str, and lists and dicts of "
        f"them, got {value!r} ({error}); {advice}",
        code="argument-type",
        argument=method,
    )


def _json_value(method: str, value: T) -> T:
    """Return the JSON form of a value, which is the same on all ranks."""
    try:
        return cast("T", json.loads(json.dumps(plain_value(value))))
    except (TypeError, ValueError) as error:
        raise not_json(method, value, error, "convert it to such values") from None
