"""Authentication of a channel: unauthenticated messages are refused at both ends."""

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import DistError, TCPStore

from bigdl.runtime.certificate import Certificate
from bigdl.runtime.channel import Address, Channel, ConnectionLost, Unreachable
from bigdl.runtime.key_value_store import (
    ANSWER_SIZE,
    BODY_LIMIT,
    GREETING_SIZE,
    HEAD_LIMIT,
    PROOF_SIZE,
    AuthenticationFailed,
    Handshake,
    new_secret,
    read_sizes,
)


@pytest.fixture
def channel():
    channel = Channel("127.0.0.1")
    channel.attempt(1).set("options", "{}")
    yield channel
    channel.close()


@pytest.fixture
def closed(caplog):
    """Return a function that waits for log messages about closed connections."""
    caplog.set_level(logging.WARNING, "bigdl.orca")

    def lines(number: int) -> list[str]:
        give_up = time.monotonic() + 30
        while len(caplog.messages) < number and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(0.05)  # there are no more
        assert len(caplog.messages) == number
        assert all(
            "channel, which does not belong to this job, from 127.0.0.1" in m
            for m in caplog.messages
        )
        return [message.partition(": ")[2] for message in caplog.messages]

    return lines


def received(connection, size):
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            break
        data += piece
    return data


def proved(address):
    """Return a socket after the handshake, and the authenticator of its messages."""
    connection = socket.create_connection((address.host, address.port))
    hands = Handshake(address.secret)
    connection.sendall(hands.answer(received(connection, GREETING_SIZE)))
    hands.finish(received(connection, PROOF_SIZE))
    return connection, hands.authenticator(b"client")


def is_closed(connection):
    connection.settimeout(30)
    try:
        return connection.recv(1 << 16) == b""
    except ConnectionError:
        return True


# The pieces ------------------------------------------------------------------------------------


def test_both_ends_prove_that_they_know_the_secret():
    secret = new_secret()
    client, server = Handshake(secret), Handshake(secret)
    client.finish(server.check(client.answer(server.greeting())))
    frame = client.authenticator(b"client").sign(["has", ["ü"], 0], b"body")
    sizes, head = frame[0][:8], frame[0][8:]
    assert server.authenticator(b"client").verify(sizes, head, *frame[1:]) == (
        ["has", ["ü"], 0],
        b"body",
    )


def test_who_does_not_know_the_secret_is_not_believed():
    secret = new_secret()
    server = Handshake(secret)
    with pytest.raises(AuthenticationFailed, match="does not know the secret"):
        server.check(Handshake(b"guess").answer(server.greeting()))
    client = Handshake(secret)
    client.answer(server.greeting())
    with pytest.raises(AuthenticationFailed, match="does not know the secret"):
        client.finish(os.urandom(PROOF_SIZE))
    with pytest.raises(AuthenticationFailed, match="no channel"):
        client.answer(b"HTTP/1.1 400 Bad Request\r\n".ljust(GREETING_SIZE))


def test_the_proof_of_one_end_is_none_of_the_other():
    secret = new_secret()
    server = Handshake(secret)
    answer = Handshake(secret).answer(server.greeting())
    proof = server.check(answer)
    with pytest.raises(AuthenticationFailed):  # what the server said, said to the server
        server.check(answer[:32] + proof)


def test_two_connections_have_different_keys():
    secret = new_secret()
    tags = set()
    for _ in range(2):
        client, server = Handshake(secret), Handshake(secret)
        server.check(client.answer(server.greeting()))
        for side in (b"client", b"server"):
            tags.add(client.authenticator(side).sign(1, b"")[-1])
    assert len(tags) == 4


@pytest.mark.parametrize("sizes", [(HEAD_LIMIT + 1, 0), (0, BODY_LIMIT + 1), (2**32 - 1,) * 2])
def test_sizes_are_limited(sizes):
    with pytest.raises(AuthenticationFailed, match="exceeds the limit"):
        read_sizes(struct.pack("!II", *sizes))


def test_a_value_that_is_too_large_is_not_sent(channel):
    line = channel.address.connect(1)
    with pytest.raises(ValueError, match="too large for a channel"):
        line.set("key", bytes(BODY_LIMIT + 1))
    line.set("key", "value")  # it is of use afterwards
    assert line.get("key") == b"value"


# From other processes --------------------------------------------------------------------------


def list_keys_and_abort(port):
    store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=1))
    for key in store.list_keys():
        store.set(key.rpartition(":")[0] + ":abort", b"mine")


def test_listing_the_keys_to_set_abort_does_nothing(channel):
    worker = channel.address.connect(1)
    with pytest.raises(DistError):
        list_keys_and_abort(channel.address.port)
    assert not worker.has("abort")
    assert worker.get("options") == b"{}"


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(ANSWER_SIZE),
        bytes(ANSWER_SIZE),
        os.urandom(1 << 20),
        json.dumps(["set", "1:abort", ""]).encode().ljust(1000),
    ],
    ids=["http", "zeros", "megabyte", "request"],
)
def test_garbage_closes_its_connection(channel, closed, said):
    worker = channel.address.connect(1)
    stranger = socket.create_connection(("127.0.0.1", channel.address.port))
    with contextlib.suppress(ConnectionError):
        stranger.sendall(said)
    assert is_closed(stranger) or is_closed(stranger)  # after the greeting
    assert closed(1) == ["it does not know the secret of the job"]
    assert not worker.has("abort")
    assert worker.get("options") == b"{}"


def test_a_member_of_another_run_is_none_of_this(channel, closed):
    worker = channel.address.connect(1)
    other = Channel("127.0.0.1")
    address = Address("127.0.0.1", channel.address.port, other.address.secret)
    with pytest.raises(Unreachable, match=f"^127.0.0.1:{address.port} "):
        address.connect(1)
    other.close()
    assert closed(1) == ["it does not know the secret of the job"]
    assert worker.get("options") == b"{}"


def test_a_worker_does_not_talk_to_a_stranger(channel):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1], channel.address.secret)

        def pretend():
            connection, _ = server.accept()
            greeting = Handshake(b"guess").greeting()
            connection.sendall(greeting)
            received(connection, ANSWER_SIZE)
            connection.sendall(os.urandom(PROOF_SIZE))
            connection.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(Unreachable, match="does not know the secret of the job"):
            address.connect(1)
        thread.join()


def test_a_forged_message_changes_nothing(channel, closed):
    connection, authenticator = proved(channel.address)
    pieces = b"".join(authenticator.sign(["set", "1:about"], b"value"))
    connection.sendall(pieces.replace(b"about", b"abort"))
    assert is_closed(connection)
    assert closed(1) == ["a message is forged, repeated or out of order"]
    assert not channel.attempt(1).has("abort")


def test_a_repeated_message_changes_nothing(channel, closed):
    connection, authenticator = proved(channel.address)
    pieces = b"".join(authenticator.sign(["add", "1:failed", 1]))
    connection.sendall(pieces + pieces)
    assert closed(1) == ["a message is forged, repeated or out of order"]
    assert channel.attempt(1).count("failed") == 1
    other, _ = proved(channel.address)
    other.sendall(pieces)  # nor in another connection
    assert closed(2)[1] == "a message is forged, repeated or out of order"
    assert channel.attempt(1).count("failed") == 1
    connection.close()
    other.close()


def test_a_message_that_is_cut_off_changes_nothing(channel, closed):
    connection, authenticator = proved(channel.address)
    connection.sendall(b"".join(authenticator.sign(["set", "1:abort"], b"value"))[:-1])
    connection.close()
    assert closed(1) == ["a message is truncated"]
    assert not channel.attempt(1).has("abort")


def test_an_oversize_message_is_not_waited_for(channel, closed):
    connection, _ = proved(channel.address)
    connection.sendall(struct.pack("!II", 10, 2**32 - 1))
    assert is_closed(connection)
    assert closed(1) == [f"a message of 10 + {2**32 - 1} bytes exceeds the limit"]


@pytest.mark.parametrize("head", [["list_keys"], ["add", "k", "many"], 7, [], ["set", 1]])
def test_a_request_that_is_none_closes_its_connection(channel, closed, head):
    connection, authenticator = proved(channel.address)
    connection.sendall(b"".join(authenticator.sign(head)))
    assert is_closed(connection)
    assert closed(1)[0].startswith("a message is invalid (")
    connection.close()


def test_a_connection_that_says_nothing_is_closed(channel, closed, monkeypatch):
    monkeypatch.setattr("bigdl.runtime.key_value_store.HANDSHAKE_S", 0.2)
    connection = socket.create_connection(("127.0.0.1", channel.address.port))
    received(connection, GREETING_SIZE)
    assert is_closed(connection)
    assert closed(1) == ["it did not authenticate within 0.2 s"]
    socket.create_connection(("127.0.0.1", channel.address.port)).close()
    assert closed(2)[1] in ("it sent no message", "it disconnected")


def test_an_answer_that_was_changed_ends_the_line(channel):
    """Check that a message changed in transit ends the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1], channel.address.secret)

        def between():
            worker, _ = server.accept()
            driver = socket.create_connection(("127.0.0.1", channel.address.port))
            worker.sendall(received(driver, GREETING_SIZE))
            driver.sendall(received(worker, ANSWER_SIZE))
            worker.sendall(received(driver, PROOF_SIZE))
            driver.sendall(worker.recv(1000))
            worker.sendall(driver.recv(1000).replace(b"false", b"true"))
            driver.close()
            worker.close()

        thread = threading.Thread(target=between)
        thread.start()
        line = address.connect(1)
        with pytest.raises(ConnectionLost):
            line.has("abort")
        thread.join()


def test_the_address_does_not_show_its_secret(channel):
    address = channel.address
    assert "secret" not in repr(address)
    assert address.secret.hex() not in repr(address)


# Many ------------------------------------------------------------------------------------------


def test_a_hundred_workers_at_once(channel):
    workers = 128
    lines = [channel.address.connect(1) for _ in range(workers)]
    answers = []

    def work(rank, line):
        answers.append(line.all_gather("here", rank, rank, workers))

    threads = [threading.Thread(target=work, args=each) for each in enumerate(lines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers == [list(range(workers))] * workers


def test_one_who_waits_is_woken(channel):
    line = channel.address.connect(1)
    assert line.has("abort", seconds=0.05) is False
    threading.Timer(0.2, channel.attempt(1).set, ("abort", "")).start()
    started = time.monotonic()
    assert line.has("abort", seconds=60) is True
    assert time.monotonic() - started < 30


# Encrypted -------------------------------------------------------------------------------------


def test_an_encrypted_channel_says_the_same_and_shows_nothing(closed):
    certificate = Certificate.make()
    channel = Channel("127.0.0.1", certificate=certificate)
    with socket.create_server(("127.0.0.1", 0)) as server:
        seen = []

        def copy(source, target):
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    seen.append(data)
                    target.sendall(data)

        def between():
            worker, _ = server.accept()
            driver = socket.create_connection(("127.0.0.1", channel.address.port))
            back = threading.Thread(target=copy, args=(driver, worker))
            back.start()
            copy(worker, driver)
            with contextlib.suppress(OSError):
                driver.shutdown(socket.SHUT_RDWR)
            back.join()
            driver.close()
            worker.close()

        thread = threading.Thread(target=between)
        thread.start()
        port = server.getsockname()[1]
        line = Address("127.0.0.1", port, channel.address.secret, certificate).connect(1)
        data = b"plain text" * 1_000_000
        line.put_bytes("data", data)
        assert channel.attempt(1).take_bytes("data") == data
        line.store.close()
        thread.join()
    assert sum(map(len, seen)) > len(data)
    assert b"plain text" not in b"".join(seen)
    channel.close()


def test_an_encrypted_channel_takes_its_own_certificate_only(closed):
    channel = Channel("127.0.0.1", certificate=Certificate.make())
    address = channel.address
    with socket.create_connection(("127.0.0.1", address.port)) as plain:
        plain.sendall(Handshake(address.secret).greeting())
        assert is_closed(plain)
    closed(1)
    other = Address("127.0.0.1", address.port, address.secret, Certificate.make())
    with pytest.raises(Unreachable):
        other.connect(1).has("key")
    assert all(said.startswith("the TLS handshake failed") for said in closed(2))
    address.connect(1).set("key", "value")
    assert channel.attempt(1).get("key") == b"value"
    channel.close()
