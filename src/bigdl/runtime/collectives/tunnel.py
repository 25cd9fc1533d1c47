"""TLS tunnels for gloo's connections between workers.

The gloo of PyTorch's wheels cannot encrypt.  If a cluster requires encryption, gloo listens and
connects on the loopback interface only, and :class:`Tunnels` forward its connections to the other
workers.  The workers exchange their addresses in the process group's store.  The
:class:`TunnelStore` adds the tunnel's end to each published address, and replaces a peer's address
by a local tunnel entrance.  Of two workers the one with the higher rank connects, as gloo connects
from the greater to the smaller address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from bigdl.common.timeouts import TUNNEL_OPEN_S
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.group_store import GroupStore
from bigdl.runtime.key_value_store import keep_alive

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
_UNREACHABLE = socket.inet_aton(
    "127.255.255.254"
)  # greater than LOOPBACK, so gloo never connects to it
_ADDRESS = re.compile(  # the memory layout of a sockaddr_in
    re.escape(struct.pack("=H", socket.AF_INET)) + rb"(..)" + re.escape(socket.inet_aton(LOOPBACK)),
    re.DOTALL,
)
_MARK = b"\0tunnel of bigdl\0"
_PORT = struct.Struct("!H")
_TRIES = 5000  # maximum random ports to try


class TunnelEnd(asyncio.Protocol):
    """Protocol of one end of a tunnel, which forwards data to the other end.

    Data that arrives before the other end is connected is buffered.
    """

    def __init__(self) -> None:
        self.transport: Any = None
        self._other: TunnelEnd | None = None
        self._early = bytearray()
        self._is_closed = False

    def join(self, other: TunnelEnd) -> None:
        """Connect two ends and forward data in both directions."""
        for one, two in ((self, other), (other, self)):
            one._other = two
            two.transport.write(bytes(one._early))
            one._early.clear()
            if one._is_closed:
                two.transport.close()

    def connection_made(self, transport: Any) -> None:  # transport: of asyncio
        self.transport = transport
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early += data
            self.early_data(self._early)
        else:
            self._other.transport.write(data)

    def early_data(self, data: bytearray) -> None:
        """Process data that arrives before the other end is connected."""

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed = True
        if self._other is not None:
            self._other.transport.close()  # once all is written

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.transport.resume_reading()


class _TunnelExit(TunnelEnd):
    """End of a tunnel at the target worker; the first bytes that it receives name gloo's port."""

    def __init__(self, tunnels: Tunnels):
        super().__init__()
        self._tunnels, self._has_target = tunnels, False

    def early_data(self, data: bytearray) -> None:
        if self._has_target or len(data) < _PORT.size:
            return
        (port,) = _PORT.unpack(data[: _PORT.size])
        del data[: _PORT.size]
        self._has_target = True
        if port in self._tunnels.ports:
            self._tunnels.spawn(self, LOOPBACK, port)
        else:
            self.transport.abort()


class _TunnelEntrance(TunnelEnd):
    """Local end of a tunnel, to which gloo in this worker connects."""

    def __init__(self, tunnels: Tunnels, host: str, port: int, target_port: int):
        super().__init__()
        self._tunnels, self._tunnel_end, self._target_port = tunnels, (host, port), target_port

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)
        self._tunnels.spawn(self, *self._tunnel_end, target_port=self._target_port)


class Tunnels:
    """The tunnels of one worker, which a background thread serves.

    Parameters
    ----------
    certificate : Certificate
    host : str
        Address of this worker for the other workers.

    Attributes
    ----------
    end : tuple of (str, int)
        Host and port of the tunnel end for this worker.
    ports : set of int
        Allowed target ports of gloo on the loopback interface.
    """

    def __init__(self, certificate: Certificate, host: str):
        self.ports: set[int] = set()
        self._tls = {side: certificate.context(server=side) for side in (True, False)}
        self._servers: list[asyncio.Server] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="bigdl-tunnels", daemon=True
        )
        self._thread.start()
        server = self._call(
            self._loop.create_server(lambda: _TunnelExit(self), host, 0, ssl=self._tls[True])
        )
        self._servers.append(server)
        self.end = host, server.sockets[0].getsockname()[1]

    def entrance(self, host: str, port: int, target_port: int, below: int) -> int:
        """Open a local port that is tunnelled to a gloo port on another machine.

        Parameters
        ----------
        host, port
            Tunnel end of the target worker.
        target_port : int
            Port of gloo on the target worker.
        below : int
            The local port of gloo; the new port must be smaller in gloo's order.

        Returns
        -------
        int
            A port on the loopback interface.
        """
        listener = socket.socket()
        for _ in range(_TRIES):
            chosen = random.randrange(1024, 65536)
            if _gloo_port_order(chosen) >= _gloo_port_order(below):
                continue
            with contextlib.suppress(OSError):
                listener.bind((LOOPBACK, chosen))
                break
        else:
            raise RuntimeError(f"no free port is smaller than {below} in the order of gloo")
        make = self._loop.create_server(
            lambda: _TunnelEntrance(self, host, port, target_port), sock=listener
        )
        self._servers.append(self._call(make))
        return chosen

    def spawn(self, end: TunnelEnd, host: str, port: int, target_port: int | None = None) -> None:
        """Connect a tunnel end in the background: to gloo, or by TLS to another worker's tunnel."""
        task = self._loop.create_task(self._connect(end, host, port, target_port))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, end: TunnelEnd, host: str, port: int, target_port: int | None) -> None:
        tls: dict[str, Any] = {}
        if target_port is not None:
            tls = {
                "ssl": self._tls[False],
                "server_hostname": "",
                "ssl_handshake_timeout": TUNNEL_OPEN_S,
            }
        try:
            _, other = await self._loop.create_connection(TunnelEnd, host, port, **tls)
        except OSError:
            end.transport.abort()
            return
        if target_port is not None:
            other.transport.write(_PORT.pack(target_port))
        end.join(other)

    def close(self) -> None:
        """Close all tunnels."""
        if not self._loop.is_closed():
            with contextlib.suppress(Exception):
                self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TUNNEL_OPEN_S)


def _gloo_port_order(port: int) -> int:
    """Return a port as gloo compares it: its network bytes read in host byte order."""
    return int(struct.unpack("=H", _PORT.pack(port))[0])


class TunnelStore(GroupStore):
    """Rendezvous store of a process group whose workers connect through tunnels.

    Parameters
    ----------
    store, prefix
        See :class:`~bigdl.runtime.group_store.GroupStore`.
    tunnels : Tunnels
    rank : int
        Rank of this worker.
    """

    def __init__(self, store: object, prefix: str, tunnels: Tunnels, rank: int):
        super().__init__(store, prefix)
        self._tunnels, self._rank = tunnels, rank
        self._local_ports: dict[str, int] = {}  # gloo's port by the folder of its key
        self._seen: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        match = _ADDRESS.search(value) if isinstance(value, bytes) else None
        if match is not None and isinstance(value, bytes):
            (port,) = _PORT.unpack(match[1])
            self._tunnels.ports.add(port)
            self._local_ports[_folder(key)] = port
            endpoint = json.dumps([self._rank, *self._tunnels.end, port]).encode()
            value = value + _MARK + endpoint
        super().set(key, value)

    def _read(self, key: str, value: bytes) -> bytes:
        value, mark, endpoint = value.partition(_MARK)
        if not mark:
            return value
        if key not in self._seen:
            self._seen[key] = self._through_tunnel(_folder(key), value, *json.loads(endpoint))
        return self._seen[key]

    def _through_tunnel(
        self, folder: str, value: bytes, rank: int, host: str, port: int, target_port: int
    ) -> bytes:
        """Return a peer's address with a local tunnel entrance instead of its port."""
        if rank == self._rank:
            return value
        family = struct.pack("=H", socket.AF_INET)
        if rank > self._rank:  # it connects to this worker
            address = family + _PORT.pack(target_port) + _UNREACHABLE
        else:
            entrance = self._tunnels.entrance(host, port, target_port, self._local_ports[folder])
            address = family + _PORT.pack(entrance) + socket.inet_aton(LOOPBACK)
        return _ADDRESS.sub(lambda _: address, value)


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
