"""The programs of examples/llm, with the small models of PyPI packages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import deltalake
import film_search
import pytest
import ticket_classifier
import tickets
from text_models import minilm, smollm

PROGRAM = Path(__file__).parents[2] / "examples" / "llm" / "support_tickets.py"


@pytest.fixture(scope="module")
def sentence_encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield minilm(folder / "minilm")


def test_tickets_have_all_kinds():
    frame = tickets.generate(100)
    assert set(frame["kind"]) == set(tickets.KINDS)
    assert frame.equals(tickets.generate(100))


@pytest.mark.slow
def test_films_are_found_by_words(orca_spark, sentence_encoder):
    best, found, chance = film_search.main(["--encoder", str(sentence_encoder), "-k", "5"])
    assert all("science fiction" in text for text in best)
    assert found > 2 * chance


@pytest.mark.slow
def test_a_classifier_of_tickets_is_trained_and_served(sentence_encoder):
    found = ticket_classifier.main(["--encoder", str(sentence_encoder), "--rows", "400"])
    assert min(found) > 0.9


def answers(folder):
    return sum(path.stat().st_size // 16 for path in folder.glob("*.keys"))


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_pipeline_of_tickets_is_continued(sentence_encoder, tmp_path):
    argv = ["--rows", "300", "--encoder", str(sentence_encoder), "--decoder", str(smollm())]
    command = [sys.executable, str(PROGRAM), *argv]
    journal = tmp_path / "journal" / "prompt"
    first = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    while not answers(journal) and first.poll() is None:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = answers(journal)
    subprocess.run(command, cwd=tmp_path, check=True)
    frame = deltalake.DeltaTable(tmp_path / "answered").to_pandas()
    assert sorted(frame["id"]) == list(range(300))
    assert frame["mood"].isin(["angry", "neutral", "happy"]).all()
    texts = frame["text"].nunique()
    assert 0 < before <= texts == answers(journal)  # no text was computed twice
