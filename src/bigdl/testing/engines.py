"""Contract tests of engines."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bigdl.common.errors import JobStopped, UsageError, WorkerError, WorkerLost
from bigdl.common.platform.processes import kill_self
from bigdl.orca.data.feeds import as_feed
from bigdl.runtime.engine import Engine

if TYPE_CHECKING:
    from pathlib import Path

    from bigdl.runtime.worker import Worker

__all__ = ["EngineContract"]

_WAIT_S = 60  # generous limit for operations that are fast on an idle machine

_CELL = """
class Thing:
    def __init__(self, value):
        self.value = value

def helper(worker):
    return Thing(worker.rank).value * 10

program = lambda worker: helper(worker)
"""


class EngineContract:
    """Contract tests of an Engine; pytest runs the subclasses named ``Test...``.

    Examples
    --------
    >>> from bigdl.orca.engine import LocalEngine
    >>> from bigdl.testing.engines import EngineContract
    >>> class TestLocalEngine(EngineContract):
    ...     def engine(self):
    ...         return LocalEngine(workers_per_node=2)
    >>> TestLocalEngine().test_results_come_in_rank_order()  # pytest runs this and the others
    """

    def engine(self) -> Engine:
        """Return an engine whose jobs have two workers by default."""
        raise NotImplementedError(f"{type(self).__name__} needs a method engine()")

    def test_results_come_in_rank_order(self) -> None:
        """Check that results are in rank order, even if the last rank ends first."""

        def program(worker: Worker) -> list[int]:
            time.sleep(0.2 * (1 - worker.rank))
            return [worker.rank, worker.world_size]

        engine = self.engine()
        assert isinstance(engine, Engine)
        assert engine.run(program) == [[0, 2], [1, 2]]

    def test_results_are_bytes_or_json(self) -> None:
        """Check that bytes and JSON results are accepted and other results are refused."""
        values = [b"", b"\x00\xff", None, 1.5, "ü", [1, {"a": [True]}], {"nan": 1}, bytearray(b"a")]
        engine = self.engine()
        with engine.open(lambda worker: values[worker.options["i"]], num_workers=1) as job:
            assert [job.attempt({"i": i}) for i in range(len(values))] == [[v] for v in values]
        for value in (object(), {1, 2}, 1j, {"a": b"b"}):
            with pytest.raises(UsageError, match=type(value).__name__) as error:
                engine.run(lambda worker, value=value: value, num_workers=1)
            assert error.value.code == "function-result"

    def test_functions_and_classes_of_a_notebook_work(self) -> None:
        """Check that functions of ``__main__`` are pickled by value."""
        cell: dict[str, object] = {"__name__": "__main__"}
        exec(_CELL, cell)
        program = cell["program"]
        assert callable(program)
        assert self.engine().run(program) == [0, 10]

    def test_every_row_reaches_one_worker_in_order(self) -> None:
        """Check that array rows are assigned to workers round-robin."""
        feed = as_feed((np.arange(7, dtype=np.float32), np.arange(7)))

        def program(worker: Worker) -> list[list[float]]:
            return [array.tolist() for array in worker.shard.arrays]

        expected = [[[0, 2, 4, 6], [0, 2, 4, 6]], [[1, 3, 5], [1, 3, 5]]]
        assert self.engine().run(program, feed) == expected

    def test_the_threads_of_a_worker_are_its_share_of_the_cores(self) -> None:
        """Check that two workers on one node each get half of its cores."""

        def program(worker: Worker) -> list[int]:
            import torch

            return [worker.threads, torch.get_num_threads()]

        engine = self.engine()
        cores = engine.cluster.cores_per_node
        assert engine.run(program, num_workers=1) == [[cores, cores]]
        half = max(1, cores // 2)
        assert engine.run(program, num_workers=2) == [[half, half]] * 2

    def test_programs_of_several_threads_of_the_driver(self) -> None:
        """Check that jobs that several threads run concurrently return their results."""
        engine = self.engine()
        results: dict[int, list[object]] = {}

        def run(n: int) -> None:
            results[n] = engine.run(lambda worker: [n, worker.rank])

        threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _WAIT_S)
        assert results == {n: [[n, 0], [n, 1]] for n in range(3)}

    def test_options_state_progress_and_messages(self) -> None:
        """Check that options, state, messages and progress are delivered."""
        events: list[tuple[str, object]] = []

        def program(worker: Worker) -> list[object]:
            worker.send("hello", {"n": worker.rank}, b"x" * worker.rank)
            for step in range(3):
                worker.progress(step=step)
                time.sleep(0.6)
            worker.progress(step="end")
            state = worker.state()
            return [worker.options, state and state.decode(), worker.shard]

        with self.engine().open(program, num_workers=1) as job:
            options = {"a": [1, {"b": None}]}
            results = job.attempt(
                options, b"state", lambda event, value: events.append((event, value))
            )
        assert results == [[options, "state", None]]
        assert ("message", ({"topic": "hello", "rank": 0, "n": 0}, b"")) in events
        steps = [value["step"] for event, value in events if event == "progress"]  # type: ignore[index]
        assert steps[-1] == "end"
        assert steps[:-1] == sorted(steps[:-1])

    def test_a_job_runs_again_with_other_options(self) -> None:
        """Check that a job can run several attempts with different options."""
        with self.engine().open(lambda worker: worker.options["n"] * 2) as job:
            assert [job.attempt({"n": n}) for n in range(3)] == [[0, 0], [2, 2], [4, 4]]

    def test_what_workers_print_arrives_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Check that stdout, stderr and log lines arrive once, with the worker's rank."""

        def program(worker: Worker) -> None:
            print("one", worker.rank)
            print("two\nthree", end="")
            sys.stderr.write("\nto stderr\n")
            sys.stdout.write("10%\r50%\r100%\n")
            logging.getLogger("anything").warning("logged %d", worker.rank)
            print("last", end="")

        self.engine().run(program)
        lines = capsys.readouterr().out.splitlines()
        for rank in (0, 1):
            start = f"[worker {rank}]"
            mine = [x.removeprefix(start + " ") for x in lines if x.startswith(start)]
            expected = ["two", "three", "to stderr", "100%", f"logged {rank}", "last"]
            assert mine == [f"one {rank}", *expected]

    @pytest.mark.parametrize("workers", [0, 1.5, True])
    def test_a_wrong_number_of_workers_is_refused(self, workers: int) -> None:
        """Check that an invalid number of workers is refused before anything runs."""
        with pytest.raises(UsageError, match="num_workers") as error:
            self.engine().run(lambda worker: worker.rank, num_workers=workers)
        assert error.value.code in ("argument-type", "argument-value")

    def test_a_program_that_cannot_be_shipped_is_refused(self) -> None:
        """Check that unpicklable programs and non-functions are refused."""
        lock = threading.Lock()
        with pytest.raises(UsageError) as error:
            self.engine().run(lambda worker: lock)
        assert error.value.code == "model-copy"
        text: Callable[..., object] = "program"  # type: ignore[assignment]
        with pytest.raises(UsageError) as error:
            self.engine().run(text, num_workers=1)
        assert error.value.code == "argument-type"

    def test_usage_error_of_a_worker_stays_one(self) -> None:
        """Check that a worker's UsageError arrives without a traceback."""

        def program(worker: Worker) -> None:
            raise UsageError("there is no such thing; take another", code="data-value")

        with pytest.raises(UsageError, match=r"^there is no such thing; take another$"):
            self.engine().run(program)

    def test_os_exit_names_its_status_and_is_not_tried_again(self, tmp_path: Path) -> None:
        """Check that ``os._exit`` is reported as an error of the program and is not retried."""

        def program(worker: Worker) -> None:
            (tmp_path / f"{worker.rank}-{time.monotonic_ns()}").touch()
            if worker.rank == 1:
                os._exit(7)
            while True:
                time.sleep(1)

        with pytest.raises(WorkerError, match=r"^SystemExit in worker 1:\n") as error:
            self.engine().run(program)
        assert str(error.value).endswith("SystemExit: os._exit(7) was called")
        assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["0", "1"]

    def test_the_cause_is_reported_and_not_what_it_did_to_others(self) -> None:
        """Check that the original error is reported, not the errors it causes in other workers."""

        def program(worker: Worker) -> None:
            import torch
            import torch.distributed as dist

            from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

            TorchDistributedSync(worker).start()
            if worker.rank == 1:
                raise KeyError("this one")
            try:
                dist.all_reduce(torch.ones(4))
            except RuntimeError as error:
                raise OSError("a consequence") from error

        for _ in range(3):
            with pytest.raises(WorkerError, match="KeyError in worker 1"):
                self.engine().run(program)

    def test_an_order_to_stop_is_no_loss(self) -> None:
        """Check that a job stopped on request raises JobStopped with the reason."""

        def program(worker: Worker) -> None:
            if worker.rank == 1:
                worker.channel.set("abort", "the budget is spent")
            time.sleep(_WAIT_S)

        with pytest.raises(JobStopped, match=r"^The job was stopped: the budget is spent$"):
            self.engine().run(program)

    def test_a_killed_worker_is_named_and_the_next_attempt_reads_its_spool(self) -> None:
        """Check that a killed worker is named, and that spools survive until the job ends."""
        feed = as_feed((np.arange(9, dtype=np.float32), np.arange(9)))

        def program(worker: Worker) -> list[object]:
            if worker.rank == 1 and not worker.options:
                kill_self()
            worker.channel.barrier("end", worker.world_size)
            return [worker.rank, worker.shard.spool.path, worker.shard.fingerprint]

        with self.engine().open(program, feed, keep_spools=True) as job:
            expected = r"^Worker 1 \(process \d+ on \S+\) was lost: its Python process ended une"
            with pytest.raises(WorkerLost, match=expected):
                job.attempt()
            first, second = job.attempt({"again": True}), job.attempt({"again": True})
            assert sorted(first) == sorted(second)
            assert all(os.path.isdir(path) for _, path, _ in first)
        assert not any(os.path.isdir(path) for _, path, _ in first)
