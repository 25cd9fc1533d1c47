"""The rendezvous store of ``torch.distributed`` process groups, over the job's channel."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from bigdl.common.timeouts import JOIN_LOOK_S


class GroupStore(Store):
    """A ``torch.distributed.Store`` whose keys are in the job's channel.

    Workers thus exchange their addresses over authenticated connections, and no further port is
    opened.

    Parameters
    ----------
    store : KeyValueStore or Connection
    prefix : str
    broken : str, optional
        Key that ends every wait with an error once it is set.
    """

    def __init__(self, store: Any, prefix: str, broken: str | None = None):
        super().__init__()
        self._store, self._prefix, self._broken = store, prefix, broken
        self._seconds = 300.0

    @property
    def timeout(self) -> timedelta:
        """Maximum wait of :meth:`get` and :meth:`wait`."""
        return timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(self._prefix + key, _bytes(value))

    def get(self, key: str) -> bytes:
        if self._broken is not None:
            self.wait([key])
        return self._read(key, self._store.get(self._prefix + key, self._seconds))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._prefix + key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.has([self._prefix + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        full = [self._prefix + key for key in keys]
        end = time.monotonic() + seconds
        while self._broken is not None and not self._store.has(full, JOIN_LOOK_S):
            if self._store.has([self._broken]):
                raise RuntimeError("another worker was lost while the workers connected")
            if time.monotonic() > end:
                break
        if not self._store.has(full, max(0.0, end - time.monotonic())):
            raise TimeoutError(f"wait timeout after {seconds:g} s for the keys {', '.join(keys)}")

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete(self._prefix + key))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return bytes(self._store.swap(self._prefix + key, _bytes(expected), _bytes(desired)))

    def has_extended_api(self) -> bool:
        """Return True, so that torch requests the addresses of many workers at once."""
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        values = self._store.get_all([self._prefix + key for key in keys])
        return [self._read(key, value) for key, value in zip(keys, values, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def _read(self, key: str, value: bytes) -> bytes:
        """Convert a stored value to the value that this worker reads; subclasses override it."""
        return value


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
