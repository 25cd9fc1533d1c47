"""``backend="local"``: Estimators on processes of this machine, without Spark and Ray."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import faults
import numpy as np
import pandas as pd
import psutil
import pytest
import ray_models as rays
import torch
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.engine import LocalEngine
from bigdl.orca.learn.pytorch import Estimator
from bigdl.runtime import local
from bigdl.runtime.process import cpu_slots

X, Y = rays.rows()


class Columns(torch.nn.Module):
    """Linear model of three columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, a, b, c):
        return self.layer(torch.stack([a, b, c], 1))[:, 0]


def of_columns(config):
    return Columns()


def adam(model, config):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def frame():
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "y": Y})


COLUMNS = {"feature_cols": ["a", "b", "c"], "label_cols": "y"}


def estimator(workers=2, model=of_columns, **options):
    return Estimator.from_torch(
        model=model,
        optimizer=adam,
        loss=torch.nn.MSELoss(),
        backend="local",
        workers_per_node=workers,
        **options,
    )


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
    before = psutil.Process().children()  # a crew of other files, maybe
    yield
    LocalEngine().shutdown()
    left = [p for p in psutil.Process().children() if p not in before]
    assert [p for p in left if "_worker_main" in " ".join(p.cmdline())] == []


def test_the_end_of_another_program_spares_the_replacements_of_a_job():
    slot = cpu_slots(1)[0]
    with local.Replacements(local.LocalProcesses()) as replacements:
        replacements.prepare(slot, [])
        worker = replacements.start(1, slot)
        assert LocalEngine().run(lambda worker: worker.rank) == [0]
        assert not worker.has_ended()
    worker.process.wait(10.0)  # a fork ends with its server
    assert worker.has_ended()
    worker.end()


def loader_creator(config, batch_size):
    tensors = (torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32))
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*tensors), batch_size=batch_size
    )


def net(config):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))


@pytest.mark.slow
def test_every_kind_of_input_gives_the_same_weights(tmp_path):
    """Check equal weights; without shuffling, a batch per epoch has the same rows."""
    path = str(tmp_path / "rows.parquet")
    frame().to_parquet(path, row_group_size=30)
    named = {name: frame()[name].to_numpy() for name in frame()}
    weights = []
    for data, options in (
        (frame(), COLUMNS),
        (named, COLUMNS),
        (path, COLUMNS),
        (loader_creator, {}),
        (loader_creator(None, 1), {}),
        ((X, Y), {}),
    ):
        model = of_columns if options else net
        est = estimator(model=model, config={"shuffle": False})
        est.fit(data, epochs=3, batch_size=len(X), validation_data=data, **options)
        weights.append(np.concatenate([p.ravel() for p in est.get_model().state_dict().values()]))
        metrics = est.evaluate(data, **options)
        assert metrics["num_samples"] == len(X)
    assert np.abs(np.array(weights) - weights[0]).max() < 1e-6


@pytest.mark.slow
def test_figures_are_those_of_spark_to_the_last_bit(orca_spark):
    weights = []
    for backend in ("spark", "local"):
        est = rays.estimator(backend=backend)
        stats = est.fit((X, Y), epochs=2, batch_size=16, seed=3)
        metrics = est.evaluate((X, Y))
        weights.append([faults.weights(est), stats, metrics["val_loss"], est.predict(X).tolist()])
    assert weights[0] == weights[1]


def test_predictions_have_the_form_and_order_of_the_input(tmp_path):
    est = estimator()
    expected = est.get_model()(*torch.tensor(X.T, dtype=torch.float32)).detach().numpy()
    path = str(tmp_path / "rows.parquet")
    frame().to_parquet(path, row_group_size=30)
    names = COLUMNS["feature_cols"]
    for data in (frame(), path):
        predicted = est.predict(data, feature_cols=names)
        assert list(predicted.columns) == ["a", "b", "c", "y", "prediction"]
        assert predicted["a"].tolist() == X[:, 0].tolist()
        assert predicted["prediction"].to_numpy() == pytest.approx(expected, abs=1e-6)
    arrays = {name: frame()[name].to_numpy() for name in names}
    assert est.predict(arrays, feature_cols=names) == pytest.approx(expected, abs=1e-6)


def test_a_model_that_raises_in_predict_is_an_error():
    def broken(config):
        class Broken(torch.nn.Linear):
            def forward(self, x):
                raise ZeroDivisionError("in the model")

        return Broken(3, 1)

    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        estimator(model=broken).predict(X.astype(np.float32))


def test_inputs_of_a_cluster_are_refused(orca_spark):
    data = orca_spark.range(4).selectExpr("double(id) as a", "double(id) as y")
    with refused("data-type", "DataFrame", 'backend="local"'):
        estimator().fit(data, feature_cols="a", label_cols="y")


def test_a_driver_that_workers_cannot_reach_is_one_sentence():
    with LocalEngine().open(lambda worker: None, num_workers=2) as job:
        job.channel._server.close()
        with pytest.raises(UsageError, match=r"^A worker cannot connect to the driver at 127.0.0"):
            job.attempt()


def test_a_program_starts_although_strangers_fill_the_channel():
    with LocalEngine().open(lambda worker: worker.rank, num_workers=2) as job:
        where = ("127.0.0.1", job.channel.address.port)
        is_over = threading.Event()

        def renew():
            silent = []
            while not is_over.is_set():
                new = [socket.create_connection(where) for _ in range(300)]
                for each in silent:
                    each.close()
                silent = new
                is_over.wait(0.2)
            for each in silent:
                each.close()

        thread = threading.Thread(target=renew)
        thread.start()
        try:
            assert job.attempt() == [0, 1]
        finally:
            is_over.set()
            thread.join()


def test_fit_and_predict_go_on_when_a_cleaner_has_taken_the_files():
    est = estimator(model=net)
    est.fit((X, Y), epochs=1)
    before = est.predict(X)
    shutil.rmtree(local.session_directory())
    assert est.predict(X) == pytest.approx(before, abs=0)  # of a model that was shipped before
    shutil.rmtree(local.session_directory())
    est.fit((X, Y), epochs=2)
    assert est.predict(X).shape == before.shape


def test_processes_are_used_again():
    engine = LocalEngine(workers_per_node=2)
    engine.shutdown()  # others may wait, too
    first = engine.run(lambda worker: os.getpid())
    assert engine.run(lambda worker: os.getpid()) == first
    assert LocalEngine(workers_per_node=2).run(lambda worker: os.getpid()) == first
    engine.shutdown()
    assert not any(faults.is_running(pid) for pid in first)


def test_kept_processes_work_in_the_directory_of_the_program(tmp_path, monkeypatch):
    engine = LocalEngine(workers_per_node=2)
    engine.run(lambda worker: os.getpid())
    monkeypatch.chdir(tmp_path)
    assert engine.run(lambda worker: os.getcwd()) == [str(tmp_path)] * 2


@pytest.mark.slow
def test_no_more_processes_wait_than_two_for_each_core_or_the_last_program_had(monkeypatch):
    monkeypatch.setattr(local, "usable_cores", lambda: [0])
    LocalEngine().shutdown()
    two = LocalEngine(workers_per_node=2).run(lambda worker: os.getpid())
    one = LocalEngine(workers_per_node=1).run(lambda worker: os.getpid())
    assert [faults.is_running(pid) for pid in [*two, *one]] == [False, True, True]
    three = LocalEngine(workers_per_node=3).run(lambda worker: os.getpid())
    assert LocalEngine(workers_per_node=3).run(lambda worker: os.getpid()) == three
    LocalEngine().shutdown()


@pytest.mark.slow
@pytest.mark.fault
def test_only_the_process_that_died_is_replaced():
    engine = LocalEngine(workers_per_node=2)
    first = engine.run(lambda worker: os.getpid())
    os.kill(first[1], signal.SIGKILL)
    time.sleep(0.5)
    second = engine.run(lambda worker: os.getpid())
    assert second[0] == first[0]
    assert second[1] != first[1]


@pytest.mark.fault
def test_a_process_that_dies_in_predict_is_a_lost_worker():
    def deadly(config):
        class Deadly(torch.nn.Linear):
            def forward(self, x):
                os.kill(os.getpid(), signal.SIGKILL)

        return Deadly(3, 1)

    with pytest.raises(WorkerLost, match="ended unexpectedly"):
        estimator(model=deadly).predict(X.astype(np.float32))


# -- in the calling process ---------------------------------------------------------------------


def test_a_worker_in_this_process():
    events = []
    feed = as_feed((X.astype(np.float32), Y))

    def program(worker):
        worker.progress(step=1)
        worker.send("topic", {"n": 1}, b"data")
        shard = worker.shard
        return [os.getpid(), worker.rank, worker.world_size, shard.rows, worker.options["a"]]

    with LocalEngine(in_process=True).open(program, feed) as job:
        for n in range(2):  # the second reads the spool of the first
            actual = job.attempt({"a": n}, None, lambda *event: events.append(event))
            assert actual == [[os.getpid(), 0, 1, len(X), n]]
    assert [event for event in events if event[0] != "phase"][:2] == [
        ("progress", {"step": 1}),
        ("message", ({"topic": "topic", "rank": 0, "n": 1}, b"data")),
    ]
    with pytest.raises(WorkerError, match=r"KeyError in worker 0:\nTraceback"):
        LocalEngine(in_process=True).run(lambda worker: {}["missing"])
    with pytest.raises(UsageError, match=r"^mine$"):
        LocalEngine(in_process=True).run(_raise_usage_error)
    with refused("argument-value", "num_workers", "1", "2"):
        LocalEngine(in_process=True).run(program, num_workers=2)


def _raise_usage_error(worker):
    raise UsageError("mine")


@pytest.mark.linux("os.fork")
def test_os_exit_is_an_error_of_the_program_and_not_a_loss():
    def program(worker):
        child = os.fork()
        if not child:
            os._exit(5)  # a process of its own really ends
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        os._exit(7)

    with pytest.raises(WorkerError, match=r"SystemExit: os._exit\(7\) was called") as error:
        LocalEngine(in_process=True).run(program)
    text = str(error.value)
    assert text.startswith(
        f'SystemExit in worker 0:\nTraceback (most recent call last):\n  File "{__file__}"'
    )
    assert len(text.splitlines()) <= 12


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_told_once_with_its_step_and_columns(caplog):
    bad = frame()
    bad.loc[len(bad) - 1, "b"] = np.nan
    with caplog.at_level("WARNING", "bigdl.orca"):
        estimator(config={"shuffle": False}).fit(bad, epochs=2, batch_size=len(bad), **COLUMNS)
        (messages,) = [each.getMessage() for each in caplog.records if "nan" in each.getMessage()]
        assert messages == (
            "The loss is nan at step 1 of epoch 1, and the rows have nan in 'b'; fill or drop them"
        )
        caplog.clear()
        huge = frame().assign(a=1e30, y=1.0)
        estimator(1).fit(huge, epochs=2, batch_size=len(huge) // 2, **COLUMNS)
    (messages,) = [each.getMessage() for each in caplog.records if "nan" in each.getMessage()]
    assert "but its rows have none" in messages


def test_ctrl_c_in_a_worker_in_this_process():
    def program(worker):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalEngine(in_process=True).run(program)


# -- what a program starts and leaves -----------------------------------------------------------

_PROGRAM = """
import json, os, sys
import numpy as np
import psutil

{head}
def net(config):
    import torch
    return torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))

def sgd(model, config):
    import torch
    return torch.optim.SGD(model.parameters(), lr=0.1)

if __name__ == "__main__":
    import torch
    from bigdl.orca.learn.pytorch import Estimator
    est = Estimator.from_torch(
        model=net, optimizer=sgd, loss=torch.nn.MSELoss(), backend="local", workers_per_node=2
    )
    data = (np.ones((8, 3), np.float32), np.ones(8, np.float32))
    est.fit(data, epochs=EPOCHS)
    est.predict(data[0])
    children = psutil.Process().children(recursive=True)
    print(json.dumps([[p.pid, p.name()] for p in children]))
    print(json.dumps(sorted({{"ray", "jpype", "py4j.java_gateway"}} & set(sys.modules))))
"""


def start_program(tmp_path, epochs):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(_PROGRAM.format(head=f"EPOCHS = {epochs}")))
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    environ.pop("JAVA_HOME", None)
    (tmp_path / "tmp").mkdir()
    return subprocess.Popen([sys.executable, path], env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_program_starts_no_jvm_and_leaves_nothing(tmp_path):
    process = start_program(tmp_path, 1)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    children, modules = map(json.loads, out.splitlines()[-2:])
    assert len(children) == 2
    assert not any("java" in name for _, name in children)
    assert modules == []
    assert not any(faults.is_running(pid) for pid, _ in children)
    assert [name for name in os.listdir(tmp_path / "tmp") if name.startswith("bigdl")] == []


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("number", ["SIGINT", "SIGKILL"])
def test_a_program_that_is_stopped_leaves_no_process(tmp_path, number):
    process = start_program(tmp_path, 1_000_000)
    children = []
    give_up = time.monotonic() + 120
    while len(children) < 2 and time.monotonic() < give_up:
        time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
    time.sleep(3)
    process.send_signal(getattr(signal, number))
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
