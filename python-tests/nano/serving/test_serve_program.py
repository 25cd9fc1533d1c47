"""``bigdl-serve`` as a process: its start, its reload, its end, and its sentences."""

import logging
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import psutil
import pytest
from refusals import refused

from bigdl.nano.serving import Client, ServerError
from bigdl.nano.serving.main import make_parser, started_server

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


def eventually(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not become true within 60 s"
        time.sleep(0.1)


def answers_of_connections(url, count=12):
    """Return the responses over new connections, each to any worker."""
    answers = set()
    for _ in range(count):
        with Client(url) as client:
            try:
                answers.add(float(client.infer("scale", ROWS)[0, 0]))
            except Exception as error:
                answers.add(type(error).__name__)
    return answers


@pytest.mark.slow
@pytest.mark.fault
def test_workers_share_the_ports_and_what_clients_change(scale_directory, tmp_path, program):
    scale_directory(tmp_path / "scale" / "1", 1)
    scale_directory(tmp_path / "scale" / "2", 2)
    scale_directory(tmp_path / "other" / "1", 3)
    served = program(tmp_path, "--workers", "2", "--changes", "--worker-timeout", "3")
    assert served.line.startswith("bigdl-serve: other 1, scale 1/2 at http")
    assert served.line.endswith(", 2 workers\n")
    children = psutil.Process(served.process.pid).children()
    assert len(children) == 2
    assert answers_of_connections(served.urls[1]) == {2.0}
    with Client(served.urls[0]) as client:
        client.unload("other")
    traffic = f"{served.urls[0]}/v2/repository/models/scale/traffic"
    urllib.request.urlopen(traffic, b'{"shares": {"1": 1}}').close()
    assert answers_of_connections(served.urls[0]) == {1.0}
    children[0].kill()
    eventually(lambda: workers_seen(served.urls[0]) == {"0", "1"})
    assert answers_of_connections(served.urls[1]) == {1.0}  # the new one has learned it
    for _ in range(8):
        with Client(served.urls[0]) as client:
            ready = [each["name"] for each in client.models() if each["state"] == "READY"]
            assert set(ready) == {"scale"}
    children[1].suspend()  # half of all clients would wait for it
    eventually(lambda: not children[1].is_running())
    eventually(lambda: workers_seen(served.urls[0]) == {"0", "1"})
    code, out, errors = served.stop()
    assert (code, out) == (0, "bigdl-serve: ended\n")
    assert "The worker 0 ended with -9; another is started" in errors
    assert "The worker 1 has sent no heartbeat for 3 s; killing it" in errors
    assert "Traceback" not in errors
    assert not any(each.is_running() for each in children)


def workers_seen(url):
    try:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            return set(re.findall(r'worker="(\d)"', answer.read().decode()))
    except OSError:  # of a worker that is gone
        return set()


def test_tokens_come_from_files_and_variables(scale_directory, tmp_path, program, monkeypatch):
    file = tmp_path / "admin"
    file.write_text("change\n")
    file.chmod(0o600)
    monkeypatch.setenv("BIGDL_SERVE_TOKEN", "use")
    monkeypatch.setenv("BIGDL_SERVE_METRICS_TOKEN", "look")
    served = program(scale_directory(tmp_path / "scale", 3), "--admin-token-file", file)
    for url in served.urls:
        with Client(url, token="use") as user, Client(url, token="change") as admin:
            assert user.infer("scale", ROWS)[0, 0] == 3
            with pytest.raises(ServerError, match="takes the admin token"):
                user.load("scale")
            admin.load("scale")
    metrics = urllib.request.Request(f"{served.urls[0]}/metrics")
    metrics.add_header("Authorization", "Bearer look")
    with urllib.request.urlopen(metrics) as answer:
        assert answer.status == 200
    code, _, errors = served.stop()
    assert (code, errors) == (0, "")


@pytest.mark.parametrize("token", ["", " "])
def test_a_variable_without_a_token_is_no_open_server(
    token, scale_directory, tmp_path, monkeypatch
):
    folder = str(scale_directory(tmp_path / "scale", 3))
    monkeypatch.setenv("BIGDL_SERVE_TOKEN", token)
    options = make_parser().parse_args([folder, "--http-port", "0", "--grpc-port", "-1"])
    with refused("argument-value", "BIGDL_SERVE_TOKEN", "holds no token"):
        started_server(options, shares_port=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "There is no directory 'none'"),
        (["."], "holds no model"),
        ([], "directory; see bigdl-serve -h"),
        ([".", "--max-batch-size", "0"], "max_batch_size should be a positive integer, got 0"),
        ([".", "--tls-cert", "x"], "TLS needs both"),
        ([".", "--workers", "0"], "--workers should be"),
        ([".", "--workers", "2", "--http-port", "-1", "--grpc-port", "-1"], "Pass a port"),
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


STUCK = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from bigdl.nano.serving.process_exit import exit_within

def for_ever():
    while True:
        pass

ThreadPoolExecutor(1).submit(for_ever)
exit_within(0.2, "server")
"""


def test_a_program_ends_after_its_grace_whatever_runs():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    sentence = "server: forced to exit after 0.2 s with unfinished requests\n"
    assert (done.returncode, done.stderr) == (1, sentence)


@pytest.mark.slow
def test_a_program_ends_after_its_grace_though_no_thread_of_python_runs():
    stuck = STUCK.replace("    while True:\n        pass", "    b'a' * 4 in [0] * 10**10")
    stuck = stuck.replace("    b'a'", "    sum(range(10**13))  #")
    done = subprocess.run([sys.executable, "-c", stuck], capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, -signal.SIGALRM)
