"""The channel between driver and workers, with both ends in one process by default."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import faults
import psutil
import pytest

from bigdl.common.errors import UsageError
from bigdl.runtime.channel import CHUNK, Address, Channel, QueueReader, Unreachable
from bigdl.runtime.engine import PeerLost
from bigdl.runtime.key_value_store import GREETING_SIZE, TRY_AGAIN, Handshake


@pytest.fixture
def channel():
    channel = Channel("127.0.0.1")
    yield channel
    channel.close()


# Life ------------------------------------------------------------------------------------------


def test_it_listens_on_its_own_address_only():
    before = faults.listening()
    channel = Channel("127.0.0.1")
    assert faults.listening() - before == {("127.0.0.1", channel.address.port)}
    channel.close()
    assert faults.listening() == before


@pytest.mark.slow
def test_close_leaves_no_port_and_no_thread_even_if_a_line_is_held():
    Channel("127.0.0.1").close()  # what torch keeps for good
    before, threads = faults.listening(), psutil.Process().num_threads()
    channel = Channel("127.0.0.1")
    line = channel.attempt(1)
    line.set("key", "value")
    channel.close()
    gc.collect()
    assert faults.listening() == before
    assert psutil.Process().num_threads() <= threads  # those of others may end meanwhile
    with pytest.raises(Unreachable):
        channel.address.connect(1)


def test_a_fixed_port_can_be_used_again_at_once():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for _ in range(3):
        channel = Channel("127.0.0.1", port)
        assert channel.address.port == port
        worker = channel.address.connect(1)
        worker.set("key", b"value")
        assert channel.attempt(1).get("key") == b"value"
        channel.close()


def test_a_taken_port_is_one_sentence(channel):
    port = channel.address.port
    expected = rf"^The driver cannot listen on 127.0.0.1:{port} \(Address already in use\); choose"
    with pytest.raises(UsageError, match=expected):
        Channel("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_one_sentence(host):
    with pytest.raises(UsageError, match=rf"cannot listen on {host}:0 .*spark.driver.host$"):
        Channel(host)


def test_nobody_there_is_told_quickly(capfd):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", probe.getsockname()[1], b"x")
        started = time.monotonic()
        with pytest.raises(Unreachable, match=rf"^127.0.0.1:{address.port} \(.*refused"):
            address.connect(1)
    assert time.monotonic() - started < 6
    assert capfd.readouterr().err == ""


def test_a_worker_is_let_in_where_others_open_more_connections_than_may_wait(channel):
    where = ("127.0.0.1", channel.address.port)
    silent = [socket.create_connection(where) for _ in range(300)]
    worker = channel.address.connect(1)
    more = [socket.create_connection(where) for _ in range(300)]
    worker.set("key", b"value")
    assert channel.attempt(1).get("key") == b"value"
    assert channel.address.connect(1).get("key") == b"value"
    for each in silent:  # the oldest ones had to go
        each.settimeout(10)
        while each.recv(100):
            pass
    for each in (*silent, *more):
        each.close()


def test_a_host_with_few_connections_loses_none_to_one_with_many(channel):
    port = channel.address.port
    few = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
    many = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    channel.address.connect(1).set("key", b"value")
    few.setblocking(False)
    assert few.recv(GREETING_SIZE)
    with pytest.raises(BlockingIOError):
        few.recv(1)
    for each in (few, *many):
        each.close()


def test_a_worker_that_is_sent_away_tries_again_and_gives_up_in_one_sentence(monkeypatch):
    monkeypatch.setattr("bigdl.runtime.channel.HANDSHAKE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        visits = []

        def send_away():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    visits.append(connection)
                    connection.sendall(Handshake(b"x").greeting() + TRY_AGAIN)
                    connection.close()

        thread = threading.Thread(target=send_away)
        thread.start()
        address = Address("127.0.0.1", server.getsockname()[1], b"x")
        with pytest.raises(Unreachable, match=r"closed every connection for 0.5 s; other programs"):
            address.connect(1)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(visits) > 1


# Keys ------------------------------------------------------------------------------------------


def test_jobs_and_attempts_do_not_see_each_other(channel):
    first, second = channel.attempt(1), channel.attempt(2)
    worker = channel.address.connect(1)
    worker.set("key", "value")
    assert first.has("key")
    assert not second.has("key")


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_bytes_of_any_size(channel, size):
    data = os.urandom(size)
    worker, driver = channel.address.connect(1), channel.attempt(1)
    worker.put_bytes("value", data)
    assert driver.take_bytes("value", delete=False) == data
    assert driver.take_bytes("value") == data
    assert not driver.has("value")
    driver.delete_bytes("value")  # may be called twice


def test_taking_frees_the_memory_of_the_driver(channel):
    worker, driver = channel.address.connect(1), channel.attempt(1)
    data = os.urandom(CHUNK)
    memory = psutil.Process().memory_info
    driver_end = []
    for i in range(64):  # half a gigabyte
        worker.put_bytes("value", data)
        assert len(driver.take_bytes("value")) == CHUNK
        if i in (8, 63):
            driver_end.append(memory().rss)
    assert driver_end[1] - driver_end[0] < 16 * CHUNK


def test_json_keeps_its_types(channel):
    worker, driver = channel.address.connect(1), channel.attempt(1)
    doc = {"a": [1, 2.5, None, True], "b": {"ü": "x"}}
    worker.set_json("doc", doc)
    assert driver.get_json("doc") == doc


def test_counting(channel):
    worker, driver = channel.address.connect(1), channel.attempt(1)
    assert worker.count("n") == 0
    assert worker.count("n", 2) == 2
    assert driver.count("n") == 2


def test_has_asks_for_all(channel):
    line = channel.attempt(1)
    line.set("a", "")
    assert line.has("a")
    assert not line.has("a", "b")


# Queues ----------------------------------------------------------------------------------------


def test_a_queue_keeps_its_order(channel):
    worker, driver = channel.address.connect(1), channel.attempt(1)
    inbox = QueueReader(driver, "q", data=True)
    assert list(inbox.take()) == []
    for i in range(5):
        worker.push("q", {"i": i}, bytes([i]))
    assert list(inbox.take()) == [({"i": i}, bytes([i])) for i in range(5)]
    worker.push("q", {"i": 5}, b"")
    assert list(inbox.take()) == [({"i": 5}, b"")]
    assert list(inbox.take(final=True)) == []


def test_a_half_written_entry_holds_the_queue_up_only_while_it_can_be_finished(channel):
    worker, driver = channel.address.connect(1), channel.attempt(1)
    inbox = QueueReader(driver, "q")
    worker.push("q", "first")
    worker.count("q#", 1)  # and the worker dies
    worker.push("q", "third")
    assert list(inbox.take()) == [("first", None)]
    assert list(inbox.take()) == []
    assert list(inbox.take(final=True)) == [("third", None)]


def test_many_workers_write_one_queue(channel):
    driver = channel.attempt(1)
    inbox, seen = QueueReader(driver, "q"), []

    def write(rank):
        line = channel.address.connect(1)
        for i in range(20):
            line.push("q", [rank, i])

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen += [doc for doc, _ in inbox.take()]
    seen += [doc for doc, _ in inbox.take(final=True)]
    assert sorted(seen) == [[rank, i] for rank in range(4) for i in range(20)]
    for rank in range(4):
        assert [i for r, i in seen if r == rank] == list(range(20))


# Meeting ---------------------------------------------------------------------------------------


def test_meet_returns_when_all_are_there(channel):
    order = []

    def come(rank, after):
        line = channel.address.connect(1)
        time.sleep(after)
        order.append(f"{rank} came")
        line.barrier("here", 3)
        order.append("met")

    threads = [threading.Thread(target=come, args=(r, 0.1 * r)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert order == ["0 came", "1 came", "2 came", "met", "met", "met"]


@pytest.mark.parametrize("why", ["abort", "failed"])
def test_barrier_ends_when_somebody_fails(channel, why):
    line = channel.address.connect(1)
    end = {"abort": lambda: line.set("abort", ""), "failed": lambda: line.count("failed", 1)}[why]
    threading.Timer(0.2, end).start()
    with pytest.raises(PeerLost, match="before all reached the barrier"):
        channel.address.connect(1).barrier("here", 2)


# A driver that stops or dies -------------------------------------------------------------------

DRIVER = """
    import sys
    from bigdl.runtime.channel import Channel

    channel = Channel("127.0.0.1")
    channel.attempt(1).set("key", "value")
    print(channel.address.port, channel.address.secret.hex(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def driver():
    """Start a process that hosts a channel and yield it with the channel's address."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    port, secret = process.stdout.readline().split()
    yield process, Address("127.0.0.1", int(port), bytes.fromhex(secret))
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.communicate()


@pytest.mark.fault
def test_a_stopped_driver_is_waited_for(driver):
    process, address = driver
    line = address.connect(1)
    process.send_signal(signal.SIGSTOP)
    give_up = time.monotonic() + 60
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    started = time.monotonic()
    threading.Timer(2, process.send_signal, [signal.SIGCONT]).start()
    assert not line.has("abort")
    assert time.monotonic() - started > 1
    assert line.get("key") == b"value"


@pytest.mark.fault
def test_a_dead_driver_is_noticed_at_once(driver):
    process, address = driver
    line = address.connect(1)
    process.kill()
    process.wait()
    with pytest.raises(RuntimeError) as error:
        line.has("abort")
    assert "timeout" not in str(error.value).lower()
