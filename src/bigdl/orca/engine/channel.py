"""The Channel: the line between the driver and the workers while a job runs.

It is one ``torch.distributed.TCPStore`` in the driver's Python process, bound to the driver's own
address (loopback in local mode).  It outlives every worker, so it carries the rendezvous, the
heartbeat, progress, logs, errors, results and the order to stop.  All keys stand under an
unguessable prefix per job.  It carries bytes and JSON: nothing that comes from a worker is ever
unpickled.  TCPStore has no authentication: who can reach the port can disturb the job, so on a
shared network the port belongs behind the cluster's own network policy.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

from bigdl.common.errors import UsageError
from bigdl.orca.engine.base import PeerLost

__all__ = ["Address", "Channel", "Line", "listen"]

CHUNK = 8 << 20  # bytes of one value


@dataclass(frozen=True)
class Address:
    """Where a channel listens and under which prefix its job's keys stand."""

    host: str
    port: int
    prefix: str

    def connect(self, attempt: int, timeout: float = 60.0) -> Line:
        """Open a line to the channel, for one attempt."""
        from torch.distributed import TCPStore

        store = TCPStore(self.host, self.port, None, False, timeout=timedelta(seconds=timeout))
        return Line(store, self.prefix, attempt)


def listen(host: str, port: int = 0):
    """Host a TCPStore on one address only.

    Returns
    -------
    store, port
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(1024)
    except OSError as error:
        server.close()
        raise UsageError(
            f"The driver cannot listen on {host}:{port} ({error.strerror}); choose another port "
            "with channel_port= or another address with spark.driver.host"
        ) from error
    port = server.getsockname()[1]
    # TCPStore owns the descriptor from here on
    store = TCPStore(
        host,
        port,
        None,
        True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    return store, port


class Channel:
    """The driver's end.

    Parameters
    ----------
    host : str
        Address of the driver that the workers can reach; nothing else is listened on.
    port : int
        0 for any free port.
    """

    def __init__(self, host: str, port: int = 0):
        self._store, port = listen(host, port)
        self.address = Address(host, port, secrets.token_hex(16))

    def line(self, attempt: int) -> Line:
        """The keys of one attempt."""
        return Line(self._store, self.address.prefix, attempt)

    def announce(self, attempt: int) -> None:
        """Tell workers that start from now on which attempt they belong to."""
        self._store.set(f"{self.address.prefix}:attempt", str(attempt))

    def close(self) -> None:
        """Stop listening."""
        self._store = None  # the server thread ends with its last reference


class Line:
    """Keys of one attempt of one job, from either end."""

    def __init__(self, store, prefix: str, attempt: int):
        self.store = store
        self._job = prefix
        self._prefix = f"{prefix}:{attempt}:"

    def announced(self) -> int:
        """Number of the attempt that the driver announced last."""
        return int(self.store.get(f"{self._job}:attempt"))

    def at(self, attempt: int) -> Line:
        """The same connection, with the keys of another attempt."""
        return Line(self.store, self._job, attempt)

    def group_store(self):
        """The store of the process group of this attempt."""
        from torch.distributed import PrefixStore

        return PrefixStore(f"{self._prefix}group", self.store)

    def set(self, key: str, value: bytes | str) -> None:
        self.store.set(self._prefix + key, value)

    def set_json(self, key: str, value) -> None:
        self.set(key, json.dumps(value))

    def has(self, key: str) -> bool:
        return self.store.check([self._prefix + key])

    def get(self, key: str) -> bytes:
        """The value; waits for it."""
        return self.store.get(self._prefix + key)

    def get_json(self, key: str):
        return json.loads(self.get(key))

    def count(self, key: str, by: int = 0) -> int:
        """Add to a counter and return it."""
        return self.store.add(self._prefix + key, by)

    def delete(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):
            self.store.delete_key(self._prefix + key)

    def meet(self, key: str, world_size: int) -> None:
        """Wait until all workers are here.

        Unlike a collective this ends by itself when one of them fails: with PeerLost.
        """
        self.count(f"meet/{key}", 1)
        pause = 0.001
        while self.count(f"meet/{key}") < world_size:
            if self.has("abort") or self.count("errors#"):
                raise PeerLost("another worker failed before all had met")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def put_bytes(self, key: str, data: bytes) -> None:
        """A value of any size, in chunks; complete once ``has(key)``."""
        view = memoryview(data)
        chunks = -(-len(view) // CHUNK)
        for i in range(chunks):
            self.set(f"{key}/{i}", bytes(view[i * CHUNK : (i + 1) * CHUNK]))
        self.set(key, str(chunks))

    def take_bytes(self, key: str, *, delete: bool = True) -> bytes:
        """The value of :meth:`put_bytes`; waits for it, and frees it in the store."""
        chunks = int(self.get(key))
        parts = []
        for i in range(chunks):
            parts.append(self.get(f"{key}/{i}"))
            if delete:
                self.delete(f"{key}/{i}")
        if delete:
            self.delete(key)
        return b"".join(parts)

    def push(self, queue: str, doc, data: bytes | None = None) -> None:
        """Append to a queue that the driver drains with :meth:`drain`."""
        index = self.count(f"{queue}#", 1) - 1
        if data is not None:
            self.put_bytes(f"{queue}@{index}/data", data)
        self.set_json(f"{queue}@{index}", doc)

    def drain(self, queue: str, start: int, *, data: bool = False) -> list:
        """Entries `start`... of a queue, as far as they are complete.

        Returns
        -------
        list of dict, or of (dict, bytes) with ``data=True``
        """
        out = []
        while start + len(out) < self.count(f"{queue}#"):
            key = f"{queue}@{start + len(out)}"
            if not self.has(key):
                break
            doc = self.get_json(key)
            self.delete(key)
            out.append((doc, self.take_bytes(f"{key}/data")) if data else doc)
        return out
