"""Test that loops of other frameworks resume from their checkpoints, row by row."""

import json
import os
import signal
import subprocess
import sys

import loader_programs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 500
STEPS = -(-ROWS // loader_programs.BATCH)  # of an epoch
KILLED = STEPS + 8


@pytest.fixture
def folder(tmp_path):
    """Create a table with numbered rows."""
    path = tmp_path / "table"
    path.mkdir()
    numbers = np.arange(ROWS)
    x = np.random.default_rng(0).random(ROWS, dtype="f4")
    for part, rows in enumerate(np.array_split(numbers, 3)):
        table = pa.table({"id": rows, "x": x[rows], "y": 2 * x[rows]})
        pq.write_table(table, path / f"{part}.parquet")
    return tmp_path


def run(framework, folder, log, *steps, ranks=1, **variables):
    """Run a program and return its lines by rank."""
    command = [sys.executable]
    if framework == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [loader_programs.__file__, framework, str(folder), str(folder / log)]
    done = subprocess.run(
        [*command, *map(str, steps)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    if steps:
        assert done.returncode not in (0, 2), done.stderr
        assert framework == "torchrun" or done.returncode == -signal.SIGKILL, done.stderr
    else:
        assert done.returncode == 0, done.stderr[-3000:]
    return [
        [json.loads(line) for line in (folder / f"{log}.{rank}").read_text().splitlines()]
        for rank in range(ranks)
    ]


def copied(folder, name):
    other = folder / name
    other.mkdir()
    (other / "table").symlink_to(folder / "table")
    return other


FRAMEWORKS = {
    "plain": "torch",
    "lightning": "pytorch_lightning",
    "fabric": "lightning_fabric",
    "accelerate": "accelerate",
    "trainer": "accelerate",
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_killed_program_goes_on_with_the_same_rows_and_losses(folder, framework):
    pytest.importorskip(FRAMEWORKS[framework])
    check_resume(folder, framework)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_a_killed_fit_of_keras_goes_on_with_the_same_rows_and_weights(folder, backend):
    pytest.importorskip("keras")
    pytest.importorskip(backend)
    check_resume(folder, "keras", KERAS_BACKEND=backend)


def check_resume(folder, framework, **variables):
    (whole,) = run(framework, copied(folder, "whole"), "log", **variables)
    for epoch in range(loader_programs.EPOCHS):
        rows = [row for ids, _ in whole[epoch * STEPS : (epoch + 1) * STEPS] for row in ids]
        assert sorted(rows) == list(range(ROWS))
    other = copied(folder, "other")
    (before,) = run(framework, other, "before", KILLED, **variables)
    assert before == whole[:KILLED]
    (after,) = run(framework, other, "after", **variables)
    resumed = len(whole) - len(after)
    assert STEPS < resumed <= KILLED  # within the second epoch
    assert after == whole[resumed:]


@pytest.mark.slow
def test_two_killed_ranks_are_resumed_by_three(folder):
    """Use torchrun, with the state in a checkpoint of torch.distributed.checkpoint."""
    before = run("torchrun", folder, "before", KILLED // 2, ranks=2)
    after = run("torchrun", folder, "after", ranks=3)
    steps = -(-ROWS // (2 * loader_programs.BATCH))
    saved = min(map(len, before)) // loader_programs.EVERY * loader_programs.EVERY
    in_epoch = saved % steps
    kept = [ids for lines in before for ids, _ in lines[saved - in_epoch : saved]]
    three = -(-(ROWS - in_epoch * 2 * loader_programs.BATCH) // (3 * loader_programs.BATCH))
    rest = [ids for lines in after for ids, _ in lines[:three]]
    assert sorted(row for ids in kept + rest for row in ids) == list(range(ROWS))
    losses = [sum(loss for _, loss in step) / 3 for step in zip(*after, strict=True)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_worker_of_ray_train_loses_and_repeats_no_row(folder):
    """Check that both restarted workers continue the epoch with the same rows and losses."""
    pytest.importorskip("ray.train")

    def lines(name):
        return [
            [json.loads(line) for line in (folder / f"{name}.{rank}").read_text().splitlines()]
            for rank in range(2)
        ]

    steps = -(-ROWS // (2 * loader_programs.BATCH))
    helpers = os.path.dirname(loader_programs.__file__)
    command = [sys.executable, loader_programs.__file__, "ray"]
    for name, more in (("whole", []), ("killed", [str(steps + 5)])):
        other = copied(folder, name)
        done = subprocess.run(
            [*command, str(other), str(folder / name), *more],
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": helpers},
        )
        assert done.returncode == 0, done.stderr[-3000:]
    whole, before, after = lines("whole-after"), lines("killed-before"), lines("killed-after")
    assert len(before[1]) == steps + 5
    for rank in range(2):
        made = len(before[rank])
        assert before[rank] == whole[rank][:made]
        resumed = len(whole[rank]) - len(after[rank])
        assert steps < resumed <= made  # within the second epoch
        assert after[rank] == whole[rank][resumed:]
    for epoch in range(loader_programs.EPOCHS):
        those = [ids for each in whole for ids, _ in each[epoch * steps : (epoch + 1) * steps]]
        assert sorted(row for ids in those for row in ids) == list(range(ROWS))
