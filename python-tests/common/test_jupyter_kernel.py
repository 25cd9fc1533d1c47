"""Errors, interrupts, progress and displays in a Jupyter kernel."""

import queue
import re
import time

import pytest

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SETUP = """
import time
import numpy as np
import psutil
import torch
from bigdl.orca.learn.pytorch import Estimator


class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


def estimator(model):
    return Estimator.from_torch(
        model=model, optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(), backend="local", workers_per_node=2)


x = np.zeros((64, 1), "float32")
est = estimator(lambda config: torch.nn.Linear(1, 1))
"""


class Kernel:
    """A kernel, and what its cells print and show."""

    def __init__(self, folder):
        self.manager, self.client = manager.start_new_kernel(cwd=str(folder))

    def run(self, code, until=None, timeout=300):
        """Return the messages of a cell; interrupt it after an output that matches `until`."""
        request = self.client.execute(code)
        messages, end = [], time.monotonic() + timeout
        while time.monotonic() < end:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            messages.append((message["msg_type"], content))
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return messages
            if until and re.search(until, str(content)):
                until = None
                self.manager.interrupt_kernel()
        raise TimeoutError(str(messages))


def of(messages, *types):
    return [content for name, content in messages if name in types]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    one = Kernel(tmp_path_factory.mktemp("kernel"))
    assert not of(one.run(SETUP), "error")
    yield one
    one.client.stop_channels()
    one.manager.shutdown_kernel(now=True)


def traceback_of(messages):
    (error,) = of(messages, "error")
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"])), error


def test_an_error_shows_the_line_of_the_cell_and_one_sentence(kernel):
    text, error = traceback_of(kernel.run("est.fit((x, x), epochs=1, batch_size=0)"))
    assert error["ename"] == "UsageError"
    assert "batch_size should be a positive integer, got 0" in text.splitlines()[-1]
    assert "----> 1 est.fit((x, x), epochs=1, batch_size=0)" in text
    assert "site-packages" not in text, text
    assert "/bigdl/" not in text, text
    assert len(text.splitlines()) <= 8, text  # a line of dashes, the head, the cell, the sentence


def test_a_fit_shows_one_bar_without_a_warning_about_widgets(kernel):
    messages = kernel.run("history = est.fit((x, x), epochs=3, batch_size=32)")
    assert not of(messages, "error")
    printed = "".join(each["text"] for each in of(messages, "stream"))
    assert "IProgress" not in printed, printed
    assert "Warning" not in printed, printed
    assert len(printed.strip().split("\n")) <= 4, printed  # three phases and a bar


def test_objects_show_themselves(kernel):
    for code in ("est", "est.report()", "est.plot()"):
        (shown,) = of(kernel.run(code), "execute_result")
        assert "<svg" in shown["data"]["text/html"], code
    shown = of(kernel.run("est.fit((x, x), epochs=5, report='fit.html');"), "display_data")
    assert any("<svg" in each["data"].get("text/html", "") for each in shown)


def test_an_interrupted_fit_leaves_the_kernel_usable(kernel):
    kernel.run("slow = estimator(lambda config: Slow(1, 1))")
    messages = kernel.run("slow.fit((x, x), epochs=4000, batch_size=8)", until="loss")
    text, error = traceback_of(messages)
    assert error["ename"] == "KeyboardInterrupt", text
    messages = kernel.run("len(slow.fit((x, x), epochs=2, batch_size=32))")
    (result,) = of(messages, "execute_result")
    assert int(result["data"]["text/plain"]) >= 2
    (found,) = of(
        kernel.run("[each.status() for each in psutil.Process().children(recursive=True)]"),
        "execute_result",
    )
    assert "zombie" not in found["data"]["text/plain"]
