"""The journal of answers: what was written is found, and a killed program is continued."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from text_models import tiny_encoder

from bigdl.llm.journal import Journal, key_of, prefix_of

PROGRAM = """\
import sys
from bigdl.llm import TextModel, embed
from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

init_orca_context("local", cores=2, extra_params={"spark.ui.enabled": "false"})
spark = OrcaContext.get_spark_session()
model, journal = sys.argv[1:]
frame = spark.range(0, 1200, 1, 6).selectExpr("id", "concat('row ', id) as text")
frame = embed(frame, "text", model=TextModel(model), journal=journal)
print(frame.selectExpr("count(embedding)", "count(distinct id)").first()[:], flush=True)
stop_orca_context()
"""


def test_answers_of_other_tasks_are_found(tmp_path):
    prefix = prefix_of("model", {"option": 1})
    keys = [key_of(prefix, f"text {n}") for n in range(100)]
    vectors = np.arange(100 * 3, dtype=np.float32).reshape(100, 3)
    writer = Journal(str(tmp_path))
    for low in range(0, 100, 10):
        rows = range(low, low + 10)
        writer.add([(keys[n], f"text {n}" if n % 2 else vectors[n], None) for n in rows])
        writer.flush()
    writer.add([(key_of(prefix, "bad"), None, "too long")])
    writer.flush()
    reader = Journal(str(tmp_path))
    reader.refresh()
    answers = reader.find([*keys, key_of(prefix, "new"), key_of(prefix, "bad")])
    assert len(answers) == 101
    assert answers[keys[7]] == ("text 7", None)
    assert np.array_equal(answers[keys[8]][0], vectors[8])
    assert answers[key_of(prefix, "bad")] == (None, "too long")
    assert reader.find([]) == {}


def test_files_of_killed_tasks_are_skipped(tmp_path):
    prefix = prefix_of("model", {})
    keys = [key_of(prefix, str(n)) for n in range(4)]
    journal = Journal(str(tmp_path))
    journal.add([(keys[0], "zero", None)])
    journal.flush()
    (tmp_path / "1.parquet").write_bytes(b"half of a file")
    (tmp_path / "1.parquet.keys").write_bytes(keys[1])
    (tmp_path / "2.parquet.keys").write_bytes(b"")
    (tmp_path / "3.parquet.keys").write_bytes(keys[3][:7])
    reader = Journal(str(tmp_path))
    reader.refresh()
    assert reader.find(keys) == {keys[0]: ("zero", None)}


def test_answers_without_a_file_of_keys_are_found(tmp_path):
    prefix = prefix_of("model", {})
    keys = [key_of(prefix, str(n)) for n in range(3)]
    reader = Journal(str(tmp_path))
    for key in keys[:2]:
        journal = Journal(str(tmp_path))
        journal.add([(key, "text", None)])
        journal.flush()
    for each in tmp_path.glob("*.keys"):
        each.unlink()
    (tmp_path / "1.parquet").write_bytes(b"half of a file")
    for _ in range(2):
        reader.refresh()
        assert reader.find(keys) == dict.fromkeys(keys[:2], ("text", None))
    journal = Journal(str(tmp_path))
    journal.add([(keys[2], "new", None)])
    journal.flush()
    written = next(tmp_path.glob("*.keys"))
    written.with_suffix("").rename(tmp_path / "1.parquet")  # the file is complete now
    written.rename(tmp_path / "1.parquet.keys")
    reader.refresh()
    assert reader.find(keys)[keys[2]] == ("new", None)


def keys_in(folder):
    return sum(len(path.read_bytes()) // 16 for path in folder.glob("*.keys"))


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_program_is_continued(tmp_path):
    model, journal = tiny_encoder(tmp_path / "model"), tmp_path / "journal"
    command = [sys.executable, "-P", "-c", PROGRAM, str(model), str(journal)]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = subprocess.Popen(command, env=env, start_new_session=True)
    while not keys_in(journal) and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = -1
    while before != keys_in(journal):  # running tasks end with the driver
        before = keys_in(journal)
        time.sleep(3)
    second = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "(1200, 1200)" in second.stdout
    assert keys_in(journal) == 1200  # no text was computed twice
