"""Waits for the clients of a server to be disconnected."""

import time

import psutil


def wait_until_disconnected(port: int, seconds: float = 30) -> None:
    """Wait until a server's port has no connections; fail after `seconds`."""
    end = time.monotonic() + seconds
    while any(
        each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
        for each in psutil.Process().net_connections("tcp")
        if each.raddr
    ):
        assert time.monotonic() < end
        time.sleep(0.05)
