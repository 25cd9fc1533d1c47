"""Tunnels of TLS for what gloo sends from worker to worker.

The gloo of PyTorch's wheels cannot encrypt.  Where a cluster asks for it, gloo listens and connects
on the loopback interface only, and :class:`Tunnels` carry its connections to the other workers.
The workers tell each other their addresses at the process group's store; the :class:`TunnelStore`
adds to each where the tunnel of its worker ends, and puts in its place an entrance on this machine.
Of two workers the one of the higher rank connects, as gloo does from the greater to the smaller
address.
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
from typing import Any

from bigdl.common.timeouts import TUNNEL_OPEN_S
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.group_store import GroupStore
from bigdl.runtime.key_value_store import keep_alive

LOOPBACK = "127.0.0.1"
_NOBODY = socket.inet_aton("127.255.255.254")  # greater than LOOPBACK, and never connected to
_ADDRESS = re.compile(  # a sockaddr_in as it lies in memory
    re.escape(struct.pack("=H", socket.AF_INET)) + rb"(..)" + re.escape(socket.inet_aton(LOOPBACK)),
    re.DOTALL,
)
_MARK = b"\0tunnel of bigdl\0"
_PORT = struct.Struct("!H")
_TRIES = 5000  # random ports until one is free


class Pump(asyncio.Protocol):
    """One end of a connection, whose data goes to the other end of a tunnel.

    What comes before the other end is there waits for it.
    """

    def __init__(self) -> None:
        self.transport: Any = None
        self._other: Pump | None = None
        self._early = bytearray()
        self._is_closed = False

    def join(self, other: Pump) -> None:
        """Pass data on, in both directions."""
        for one, two in ((self, other), (other, self)):
            one._other = two
            two.transport.write(bytes(one._early))
            one._early.clear()
            if one._is_closed:
                two.transport.close()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early += data
            self.early_data(self._early)
        else:
            self._other.transport.write(data)

    def early_data(self, data: bytearray) -> None:
        """Look at what has come before the other end is there."""

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


class _Exit(Pump):
    """Where a tunnel ends: the other end says to which port of gloo it leads."""

    def __init__(self, tunnels: Tunnels):
        super().__init__()
        self._tunnels, self._is_led = tunnels, False

    def early_data(self, data: bytearray) -> None:
        if self._is_led or len(data) < _PORT.size:
            return
        (port,) = _PORT.unpack(data[: _PORT.size])
        del data[: _PORT.size]
        self._is_led = True
        if port in self._tunnels.ports:
            self._tunnels.spawn(self, LOOPBACK, port)
        else:
            self.transport.abort()


class _Entrance(Pump):
    """Where a tunnel begins: gloo has connected to it."""

    def __init__(self, tunnels: Tunnels, host: str, port: int, led_to: int):
        super().__init__()
        self._tunnels, self._where, self._led_to = tunnels, (host, port), led_to

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._tunnels.spawn(self, *self._where, led_to=self._led_to)


class Tunnels:
    """The tunnels of one worker; a thread of its own carries what goes through them.

    Parameters
    ----------
    certificate : Certificate
    host : str
        Address of this worker that the others can reach.

    Attributes
    ----------
    end : tuple of (str, int)
        Host and port where the others' tunnels to this worker end.
    ports : set of int
        Ports of gloo on the loopback interface, to which they may lead.
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
            self._loop.create_server(lambda: _Exit(self), host, 0, ssl=self._tls[True])
        )
        self._servers.append(server)
        self.end = host, server.sockets[0].getsockname()[1]

    def entrance(self, host: str, port: int, led_to: int, below: int) -> int:
        """Open the way to a port of gloo on another machine.

        Parameters
        ----------
        host, port
            Where its tunnel ends.
        led_to : int
            The port of gloo there.
        below : int
            gloo's own port here, than which it must take the new one for a smaller.

        Returns
        -------
        int
            A port on the loopback interface.
        """
        listener = socket.socket()
        for _ in range(_TRIES):
            chosen = random.randrange(1024, 65536)
            if _as_gloo_compares(chosen) >= _as_gloo_compares(below):
                continue
            with contextlib.suppress(OSError):
                listener.bind((LOOPBACK, chosen))
                break
        else:
            raise RuntimeError(f"no port is free that gloo takes for smaller than {below}")
        make = self._loop.create_server(lambda: _Entrance(self, host, port, led_to), sock=listener)
        self._servers.append(self._call(make))
        return chosen

    def spawn(self, pump: Pump, host: str, port: int, led_to: int | None = None) -> None:
        """Connect the other end of a pump: to gloo, or by TLS to the tunnel of another worker."""
        task = self._loop.create_task(self._connect(pump, host, port, led_to))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, pump: Pump, host: str, port: int, led_to: int | None) -> None:
        tls: dict[str, Any] = {}
        if led_to is not None:
            tls = {
                "ssl": self._tls[False],
                "server_hostname": "",
                "ssl_handshake_timeout": TUNNEL_OPEN_S,
            }
        try:
            _, other = await self._loop.create_connection(Pump, host, port, **tls)
        except OSError:
            pump.transport.abort()
            return
        if led_to is not None:
            other.transport.write(_PORT.pack(led_to))
        pump.join(other)

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

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TUNNEL_OPEN_S)


def _as_gloo_compares(port: int) -> int:
    """The number of a port in the order of its bytes on the network, read as this machine does."""
    return int(struct.unpack("=H", _PORT.pack(port))[0])


class TunnelStore(GroupStore):
    """The store of a process group whose workers reach each other through tunnels.

    Parameters
    ----------
    board, prefix
        See :class:`~bigdl.runtime.group_store.GroupStore`.
    tunnels : Tunnels
    rank : int
        Of this worker.
    """

    def __init__(self, board: Any, prefix: str, tunnels: Tunnels, rank: int):
        super().__init__(board, prefix)
        self._tunnels, self._rank = tunnels, rank
        self._own: dict[str, int] = {}  # gloo's port by the folder of its key
        self._seen: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        match = _ADDRESS.search(value) if isinstance(value, bytes) else None
        if match is not None and isinstance(value, bytes):
            (port,) = _PORT.unpack(match[1])
            self._tunnels.ports.add(port)
            self._own[_folder(key)] = port
            said = json.dumps([self._rank, *self._tunnels.end, port]).encode()
            value = value + _MARK + said
        super().set(key, value)

    def _read(self, key: str, value: bytes) -> bytes:
        value, mark, said = value.partition(_MARK)
        if not mark:
            return value
        if key not in self._seen:
            self._seen[key] = self._through_tunnel(_folder(key), value, *json.loads(said))
        return self._seen[key]

    def _through_tunnel(
        self, folder: str, value: bytes, rank: int, host: str, port: int, led_to: int
    ) -> bytes:
        """The address of a worker as this one shall see it."""
        if rank == self._rank:
            return value
        family = struct.pack("=H", socket.AF_INET)
        if rank > self._rank:  # it connects to this worker
            address = family + _PORT.pack(led_to) + _NOBODY
        else:
            entrance = self._tunnels.entrance(host, port, led_to, self._own[folder])
            address = family + _PORT.pack(entrance) + socket.inet_aton(LOOPBACK)
        return _ADDRESS.sub(lambda _: address, value)


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
