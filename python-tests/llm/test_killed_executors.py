"""Killed executors, Python workers and engines lose no row of an AI function."""

import contextlib
import random
import threading

import numpy as np
import pandas as pd
import psutil
import pytest
from text_models import tiny_decoder

from bigdl.llm import TextModel, prompt

ROWS, POISONED = 10_000, 100
MARKS = {
    "executor": "CoarseGrainedExecutorBackend",
    "worker": "pyspark.daemon",
    "engine": "bigdl.llm.engine import serve",
}


def running(kind, cache):
    """Return the processes of one kind that descend from this program, and its engines."""
    found = []
    children = psutil.Process().children(recursive=True)
    for process in psutil.process_iter() if kind == "engine" else children:
        with contextlib.suppress(psutil.Error):
            is_marked = MARKS[kind] in " ".join(process.cmdline())
            if is_marked and (kind != "engine" or cache in " ".join(process.cmdline())):
                found.append(process)
    return found


class Killer(threading.Thread):
    """Thread that kills ten processes of the three kinds while a job runs."""

    def __init__(self, cache):
        super().__init__()
        self._cache = cache
        self.finished, self.killed = threading.Event(), []
        self._random = random.Random(4)

    def run(self):
        kinds = ["executor"] * 2 + ["worker"] * 4 + ["engine"] * 4
        self._random.shuffle(kinds)
        while kinds and not self.finished.wait(2):
            processes = running(kinds[-1], self._cache)
            if processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._random.choice(processes).kill()
                    self.killed.append(kinds.pop())


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(1200)
def test_ten_kills_lose_and_double_no_row(local_cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = TextModel(tiny_decoder(tmp_path / "model"))
    poisoned = set(np.random.default_rng(0).choice(ROWS, POISONED, replace=False).tolist())
    poison = [None, "word " * 300]  # a null, and more tokens than the model's limit
    texts = [poison[n % 2] if n in poisoned else f"row {n} of the text" for n in range(ROWS)]
    frame = pd.DataFrame({"id": range(ROWS), "text": texts})
    data = local_cluster.createDataFrame(frame).repartition(40, "id")
    killer = Killer(str(tmp_path / "cache"))
    killer.start()
    try:
        result = prompt(
            data, "{text}", model=model, max_new_tokens=12, journal=str(tmp_path / "journal")
        ).toPandas()
    finally:
        killer.finished.set()
        killer.join()
    assert len(killer.killed) == 10, killer.killed
    assert sorted(result["id"]) == list(range(ROWS))
    assert set(result["id"][result["answer"].isna()]) == poisoned
    named = result["answer_error"].notna()
    assert set(result["id"][named]) == {n for n in poisoned if n % 2}
    sample = result[result["answer"].notna()].sample(200, random_state=0)
    again = prompt(sample[["id", "text"]], "{text}", model=model, max_new_tokens=12)
    assert again["answer"].tolist() == sample["answer"].tolist()
    answers = sum(path.stat().st_size // 16 for path in (tmp_path / "journal").glob("*.keys"))
    assert ROWS - POISONED <= answers < 1.1 * ROWS  # only unfinished rows were repeated
