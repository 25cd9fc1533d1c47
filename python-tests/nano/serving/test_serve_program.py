"""``bigdl-serve`` as a process: its start, its reload, its end, and its sentences."""

import logging
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from bigdl.nano.serving import Client

ROWS = np.ones((1, 3), "float32")
PROGRAM = [sys.executable, "-m", "bigdl.nano.serving.main"]


class Program:
    """A running server."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [*PROGRAM, *map(str, arguments), "--http-port", "0", "--grpc-port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.line = self.process.stdout.readline()
        ports = re.search(r"http://127.0.0.1:(\d+) and grpc://127.0.0.1:(\d+)", self.line)
        assert ports, self.line + self.process.stderr.read()
        self.urls = [f"http://127.0.0.1:{ports[1]}", f"grpc://127.0.0.1:{ports[2]}"]

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(60), self.process.stdout.read(), self.process.stderr.read()


@pytest.fixture
def program():
    started = []

    def start(*arguments):
        started.append(Program(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        each.process.stdout.close()
        each.process.stderr.close()


def test_a_request_under_way_at_the_end_is_answered(scale_directory, tmp_path, program):
    served = program(scale_directory(tmp_path / "scale", 3))
    assert "scale 1 at" in served.line
    answers, refused = [], []
    with Client(served.urls[0]) as first, Client(served.urls[1]) as second:

        def ask(client):
            while True:
                try:
                    answers.append(float(client.infer("scale", {"x": ROWS})[0, 0]))
                except Exception as error:
                    refused.append(error)
                    return

        threads = [threading.Thread(target=ask, args=(each,)) for each in (first, second) * 2]
        for thread in threads:
            thread.start()
        while len(answers) < 100:
            time.sleep(0.01)
        code, out, errors = served.stop()
        for thread in threads:
            thread.join(60)
    assert (code, out, errors) == (0, "bigdl-serve: ended\n", "")
    assert set(answers) == {3}
    # what was refused had come after the end, and was told so
    assert all(error.status in (0, 503, "UNAVAILABLE", "CANCELLED") for error in refused), refused


def test_a_new_version_is_found_and_a_network_needs_no_framework(
    scale_directory, tmp_path, program
):
    scale_directory(tmp_path / "1", 1)
    served = program(tmp_path, "--name", "scale", "--reload", "0.1")
    with Client(served.urls[0]) as client:
        assert client.infer("scale", ROWS)[0, 0] == 1
        scale_directory(tmp_path / "2", 2)
        end = time.monotonic() + 60
        while client.infer("scale", ROWS)[0, 0] != 2:
            assert time.monotonic() < end
            time.sleep(0.05)
    with open(f"/proc/{served.process.pid}/maps") as maps:
        libraries = maps.read()
    assert "libtorch" not in libraries
    assert "libtensorflow" not in libraries
    assert served.stop(signal.SIGINT)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "There is no directory 'none'"),
        (["."], "holds no model"),
        ([], "directory; see bigdl-serve -h"),
        ([".", "--max-batch-size", "0"], "max_batch_size should be a positive integer, got 0"),
        ([".", "--tls-cert", "x"], "TLS needs both"),
        ([".", "--token-file", "none"], "The token cannot be read from 'none'"),
    ],
)
def test_what_cannot_be_served_is_told_in_a_sentence(
    tmp_path, monkeypatch, capsys, arguments, sentence
):
    from bigdl.nano.serving.main import main

    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main(arguments) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.captureWarnings(False)
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
