"""Models by name and version: found, shared, replaced and refused, while requests come."""

import gc
import os
import shutil
import threading
import time
import weakref

import numpy as np
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.nano.serving import ModelRepository, UnknownModelError

ONE = np.ones((1, 3), "float32")


def answer_of(repository, name, version=None, key=None):
    with repository.lease(name, version, key) as deployed:
        return float(deployed.model.predict(ONE)[0, 0])


@pytest.fixture
def versions(scale_directory, tmp_path):
    """Return the directory of a model in three versions, which multiply by their numbers."""
    for number in (1, 2, 10):
        scale_directory(tmp_path / "models" / "scale" / str(number), number)
    return tmp_path / "models"


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_latest_version_answers_unless_another_is_named(versions):
    with ModelRepository(versions) as repository:
        repository.load_all()
        assert repository.names() == ["scale"]
        assert repository.versions("scale") == ["1", "2", "10"]
        assert answer_of(repository, "scale") == 10
        assert answer_of(repository, "scale", "2") == 2
        with refused("name-unknown", "'3'", "1", "2"):
            repository.find("scale", "3")
        with refused("name-unknown", "'../x'"):
            repository.find("../x")


@pytest.mark.parametrize("layout", ["model", "versions", "models"])
def test_a_directory_may_be_a_model_versions_or_models(versions, layout):
    root = {"models": versions, "versions": versions / "scale", "model": versions / "scale" / "1"}
    with ModelRepository(root[layout], name=None if layout == "models" else "own") as repository:
        repository.load_all()
        name = "scale" if layout == "models" else "own"
        assert answer_of(repository, name) == (1 if layout == "model" else 10)


def test_requests_are_shared_by_weight_and_by_key(versions):
    with ModelRepository(versions) as repository:
        repository.load_all()
        repository.set_traffic("scale", {"1": 3, "2": 1})
        answers = [answer_of(repository, "scale") for _ in range(400)]
        assert set(answers) == {1, 2}
        assert 230 < answers.count(1) < 370
        by_key = [answer_of(repository, "scale", key=f"user-{n % 50}") for n in range(200)]
        assert by_key[:50] * 4 == by_key
        assert set(by_key) == {1, 2}
        assert answer_of(repository, "scale", "10") == 10
        repository.set_traffic("scale")
        assert answer_of(repository, "scale") == 10
        for shares, sentence in [
            ({"3": 1}, "no version '3'"),
            ({"1": -1}, "The share of version 1 should be"),
            ({"1": 0}, "has to be above 0"),
        ]:
            with pytest.raises(UsageError, match=sentence):
                repository.set_traffic("scale", shares)


def test_a_shadow_computes_and_nobody_sees_it(versions):
    with ModelRepository(versions) as repository:
        repository.load_all()
        repository.set_traffic("scale", {"1": 1}, shadow="2")
        rows, answered = [], threading.Event()
        repository.find("scale", "2").model.observe(lambda report: rows.append(report.rows))
        with repository.lease("scale") as deployed:
            repository.mirror(deployed, [ONE], lambda well: answered.set())
            assert deployed.version == "1"
        assert answered.wait(30)
        assert rows == [1]


@pytest.mark.slow
def test_fifty_reloads_under_load_lose_no_request(scale_directory, tmp_path):
    path = scale_directory(tmp_path / "scale", 1)
    with ModelRepository(path) as repository:
        repository.load_all()
        stopped, answers, errors = threading.Event(), [], []

        def ask():
            while not stopped.is_set():
                try:
                    answers.append(answer_of(repository, "scale"))
                except Exception as error:
                    errors.append(error)
                time.sleep(0.001)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(50):
            scale_directory(path, 1 + (number + 1) % 2)
            repository.load("scale")
        assert answer_of(repository, "scale") == 1
        scale_directory(path, 2)
        repository.load("scale")
        assert answer_of(repository, "scale") == 2
        stopped.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert set(answers) == {1, 2}


@pytest.mark.parametrize("damage", ["truncated", "text", "no weights", "no meta"])
def test_a_damaged_model_is_refused_and_the_old_one_goes_on(versions, damage):
    path = versions / "scale" / "10"
    with ModelRepository(versions) as repository:
        repository.load_all()
        xml = path / "ov_saved_model.xml"
        if damage == "truncated":
            xml.write_bytes(xml.read_bytes()[:300])
        elif damage == "text":
            (path / "nano_model_meta.yml").write_text("nothing: [")
        elif damage == "no weights":
            (path / "ov_saved_model.bin").write_bytes(b"")
        else:
            shutil.rmtree(path)
            path.mkdir()
            (path / "model.onnx").write_bytes(b"\0" * 100)
        with pytest.raises(UsageError, match="Version 10 of model 'scale': "):
            repository.load("scale")
        assert answer_of(repository, "scale") == 10
        states = {each["version"]: each for each in repository.index()}
        assert [each["state"] for each in states.values()] == ["READY"] * 3
        assert states["10"]["reason"]


def test_changes_in_the_directory_are_found(versions, scale_directory):
    with ModelRepository(versions) as repository:
        repository.load_all()
        repository.watch(0.05)
        scale_directory(versions / "scale" / "11", 11)
        wait_until(lambda: answer_of(repository, "scale") == 11)
        (versions / "scale" / "12").mkdir()
        (versions / "scale" / "12" / "model.onnx").write_bytes(b"nothing")
        wait_until(lambda: any(each["version"] == "12" for each in repository.index()))
        assert answer_of(repository, "scale") == 11
        shutil.rmtree(versions / "scale" / "11")
        shutil.rmtree(versions / "scale" / "12")
        scale_directory(versions / "other" / "1", 7)
        wait_until(lambda: "other" in repository.names())
        wait_until(lambda: answer_of(repository, "scale") == 10)
        shutil.rmtree(versions / "other")
        wait_until(lambda: repository.names() == ["scale"])


def test_a_model_that_is_taken_out_answers_what_it_has_begun(repository_of, slow_model):
    repository = repository_of(slow=slow_model)
    slow_model.close()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(answer_of(repository, "slow")))
    asking.start()
    assert slow_model.entered.acquire(timeout=30)
    repository.unload("slow")
    with pytest.raises(UnknownModelError):
        repository.find("slow")
    slow_model.open.set()
    asking.join(30)
    assert answers == [2]
    repository.close()


def test_a_directory_without_a_model_is_refused(tmp_path):
    with refused("file-format"):
        ModelRepository(tmp_path).load_all()
    with refused("path-missing"):
        ModelRepository(tmp_path / "none").load_all()


def test_a_replaced_model_takes_its_threads_with_it(versions):
    def threads():
        return len(os.listdir("/proc/self/task"))

    with ModelRepository(versions / "scale" / "1", name="scale") as repository:
        repository.load_all()
        gc.collect()
        gc.disable()  # nothing may wait for it
        try:
            for _ in range(3):
                repository.load("scale")
            begin = threads()
            for _ in range(20):
                assert answer_of(repository, "scale") == 1
                old = weakref.ref(repository.find("scale").model)
                repository.load("scale")
                wait_until(lambda gone=old: gone() is None)
            assert threads() < begin + 20
        finally:
            gc.enable()
