"""The report of a fit: where its time went, and advice that follows from the shares."""

import html
import json
import os
import re
import signal
import time

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.orca.learn.optimizers import SGD
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.training.journal import FitJournal
from bigdl.training.report import PHASES, FitReport
from bigdl.training.timing import StepSums, rank_times


class Slow(nn.Module):
    """Linear layer whose forward pass takes a time per batch and per row."""

    def __init__(self, batch_s=0.0, row_s=0.0, size=4):
        super().__init__()
        self.layer = nn.Linear(size, 1)
        self.batch_s, self.row_s = batch_s, row_s

    def forward(self, x):
        time.sleep(self.batch_s + self.row_s * len(x))
        return self.layer(x)


class SlowRows(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


def rows(count=64, size=4):
    x = np.random.default_rng(0).random((count, size), "float32")
    return x, x.sum(1, keepdims=True)


def fitted(data, model, tmp_path=None, workers=1, **keywords):
    """Return an Estimator after a fit of two epochs."""
    est = Estimator.from_torch(
        model=model,
        optimizer=SGD(0.01),
        loss=nn.MSELoss(),
        backend="local",
        workers_per_node=workers,
        model_dir=None if tmp_path is None else str(tmp_path),
    )
    est.fit(data, **{"epochs": 2, "batch_size": 16, **keywords})
    return est


# -- fits that are slow on purpose, and one that is not


def test_a_fit_that_computes_gets_no_advice():
    report = fitted(rows(), Slow(batch_s=0.2), workers=2).report()
    assert report.advice(worth_s=1.0) == []  # a disk may stall for a moment
    (first, second) = report.times()
    assert first["forward_s"] > 0.5 * first["wall_s"]
    assert first["rows"] == second["rows"] == 64
    for times in (first, second):
        assert sum(times[name] for name in PHASES) == pytest.approx(times["wall_s"], rel=0.05)


def test_a_slow_dataset_gets_advice_on_loading():
    x, y = map(torch.from_numpy, rows(32))
    report = fitted(DataLoader(SlowRows(x, y), batch_size=16), Slow()).report()
    (sentence,) = report.advice(worth_s=0.1)
    assert re.match(r"\d+ % of a step is loading batches; pass num_workers=", sentence)


def test_uneven_rows_name_the_waiting_and_the_slow_worker():
    def creator(config, batch_size):
        count = 60 if config["rank"] == 0 else 20
        return DataLoader(TensorDataset(torch.ones(count, 4), torch.ones(count, 1)), batch_size)

    report = fitted(creator, Slow(row_s=0.01), workers=2, batch_size=40).report()
    (sentence,) = report.advice(worth_s=0.1)
    assert re.match(r"Worker 1 waits \d+ % of the time for worker 0, which has 3.0 times", sentence)


class SlowNetwork(Callback):
    """Callback that delays every all-reduce of its worker."""

    def before_run(self, runner):
        self.all_reduce = all_reduce = torch.distributed.all_reduce

        def slow(*args, **keywords):
            time.sleep(0.02)
            return all_reduce(*args, **keywords)

        torch.distributed.all_reduce = slow

    def after_run(self, runner):
        torch.distributed.all_reduce = self.all_reduce


def test_a_slow_network_gets_advice_on_the_exchange():
    report = fitted(rows(), Slow(), workers=2, callbacks=[SlowNetwork()]).report()
    (sentence,) = report.advice(worth_s=0.08)
    assert "exchanging gradients between the workers; use a larger batch_size" in sentence


def test_a_checkpoint_after_every_step_gets_advice(tmp_path):
    report = fitted(rows(), Slow(), tmp_path, checkpoint_trigger=SeveralIteration(1)).report()
    (sentence,) = report.advice(worth_s=0.01)
    assert "writing checkpoints; write fewer with checkpoint_trigger=" in sentence


def test_a_slow_plan_gets_the_advice_to_pass_a_path(orca_spark):
    from pyspark.sql.functions import udf

    frame = orca_spark.range(64).selectExpr("array(float(id % 7), 1f) AS x", "float(id) AS y")
    wait = udf(lambda x: time.sleep(0.1) or x, "array<float>")
    frame = frame.withColumn("x", wait("x"))
    est = Estimator.from_torch(
        model=Slow(size=2), optimizer=SGD(0.001), loss=nn.MSELoss(), workers_per_node=2
    )
    est.fit(frame.limit(16), feature_cols="x", label_cols="y", batch_size=16)  # starts Python
    est.fit(frame, feature_cols="x", label_cols="y", batch_size=16)
    (sentence,) = est.report().advice(worth_s=0.5)
    assert "reading a DataFrame through the JVM" in sentence


# -- the page


def test_the_report_is_one_file_that_is_written_while_the_fit_runs(tmp_path):
    path = tmp_path / "fit.html"
    est = Estimator.from_torch(model=Slow(), optimizer=SGD(0.1), loss=nn.MSELoss(), backend="local")
    with refused("not-fitted"):
        est.report()
    est.fit(rows(), epochs=3, validation_data=rows(), report=path)
    page = path.read_text()
    assert "http-equiv" not in page  # the fit has ended: no reload
    assert not re.search(r"(src|href)=", page)  # no other file
    assert "prefers-color-scheme:dark" in page
    text = html.unescape(re.sub("<[^>]*>", " ", page))
    for expected in ("ended, 3 epochs", "val_loss", "worker 0", "rows/s", "batch_size", "torch"):
        assert expected in text, expected
    assert "<svg" in est.report()._repr_html_()
    with refused("path-unusable"):
        est.fit(rows(), report="/proc/fit.html")


def test_losses_and_warnings_are_in_the_report(tmp_path):
    est = fitted((np.full((16, 4), np.nan, "float32"), np.ones((16, 1), "float32")), Slow())
    (event, *_) = [text for _, text in est.report().journal.events]
    assert "nan" in event
    assert event.split(";")[0] in html.unescape(est.report()._repr_html_())


class KillOnce(Callback):
    """Callback that kills its worker in the second epoch, unless a file says that it has."""

    def __init__(self, path):
        self.path = path

    def before_train_epoch(self, runner):
        if runner.epochs == 1 and not os.path.exists(self.path):
            open(self.path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.fault
def test_a_lost_worker_and_the_resume_are_in_the_report(tmp_path):
    kill = KillOnce(str(tmp_path / "killed"))
    est = fitted(rows(), Slow(), tmp_path / "models", epochs=3, callbacks=[kill])
    report = est.report()
    (event,) = [text for _, text in report.journal.events]
    assert "was lost" in event
    assert "; resuming from" in event
    assert event in html.unescape(report._repr_html_())
    assert report.timeline()["lost attempts"] > 0
    assert sorted(report.journal.epochs) == [1, 2, 3]


@pytest.mark.slow
def test_the_parameter_layer_reports_each_rank(orca_spark, tmp_path):
    est = Estimator.from_torch(
        model=Slow(batch_s=0.01), optimizer=SGD(0.1), loss=nn.MSELoss(), backend="bigdl",
        workers_per_node=2,
    )  # fmt: skip
    est.fit(rows(), epochs=2, batch_size=32, report=tmp_path / "fit.html")
    times = est.report().times()
    assert [each["rows"] for each in times] == [64, 64]
    assert all(each["exchange_s"] > 0 and each["forward_s"] > 0 for each in times)
    assert "worker 1" in (tmp_path / "fit.html").read_text()


def test_a_report_of_a_running_fit_reloads_itself(tmp_path):
    journal = FitJournal({"model": "Net"}, began_at=time.time(), attempt_at=time.time())
    FitReport(journal).write(tmp_path / "fit.html")
    page = (tmp_path / "fit.html").read_text()
    assert 'http-equiv="refresh"' in page
    assert "No epoch has ended yet" in page


# -- the arithmetic


def test_waiting_is_the_time_beyond_the_last_arrival():
    # rows, memory, fetch, move, forward, backward, exchange, checkpoint, evaluate, wall
    numbers = [[10, 1, 0, 0, 1, 1, 3.0, 0, 0, 6], [20, 1, 0, 0, 2, 2, 1.0, 0, 0, 6]]
    fast, slow = rank_times(numbers, [[1.0, 2.0], [0.5, 0.5]])
    assert (fast["wait_s"], fast["exchange_s"], fast["other_s"]) == (2.0, 1.0, 1.0)
    assert (slow["wait_s"], slow["exchange_s"], slow["other_s"]) == (0.0, 1.0, 1.0)


def test_sums_of_steps_stay_few_and_keep_the_total():
    sums = StepSums(limit=8)
    for number in range(1000):
        sums.add(float(number))
    assert len(sums.values) <= 8
    assert sum(sums.values) == sum(range(1000))


def journal_of(ranks, **facts):
    journal = FitJournal(facts, began_at=1.0, attempt_at=1.0, ready_at=2.0, ended_at=102.0)
    journal.workers = [
        {"host": f"h{rank}", "began_at": 1.5, "read_s": 0.5} for rank in range(len(ranks))
    ]
    whole = dict.fromkeys((*PHASES, "memory"), 0.0)
    times = [{**whole, "rows": 10.0, "wall_s": 100.0, **each} for each in ranks]
    journal.add({"entry": {"epoch": 1, "train_loss": 1.0}, "ranks": times})
    return journal


@pytest.mark.parametrize(
    ("ranks", "facts", "expected"),
    [
        ([{"fetch_s": 90.0}], {"data": "array"}, []),  # there is nothing to change
        ([{"fetch_s": 45.0}], {"data": "tf.data.Dataset"}, ["cache() or prefetch()"]),
        ([{"exchange_s": 60.0}] * 2, {"backend": "bigdl"}, ["group_size="]),
        ([{"evaluate_s": 70.0}], {"framework": "keras"}, ["validation_freq="]),
        ([{"other_s": 60.0}], {}, ["callbacks"]),
        ([{"move_s": 40.0}], {}, ["moving rows to the device"]),
        ([{"wait_s": 30.0}, {}], {}, ["Worker 0 waits 30 % of the time for worker 1, which comp"]),
        # rank 0 writes the checkpoints that the others wait for
        ([{"checkpoint_s": 40.0}, {"wait_s": 40.0}], {}, ["writing checkpoints"]),
        (
            [{"exchange_s": 45.0, "other_s": 50.0}] * 2,
            {"framework": "keras"},
            ["callbacks", "exchanging"],  # the larger one first
        ),
    ],
)
def test_each_share_has_its_sentence(ranks, facts, expected):
    advice = FitReport(journal_of(ranks, **facts)).advice()
    assert len(advice) == len(expected)
    for sentence, part in zip(advice, expected, strict=True):
        assert part in sentence


def test_small_savings_are_not_worth_a_sentence():
    report = FitReport(journal_of([{"other_s": 60.0}]))
    assert report.advice()
    assert report.advice(worth_s=61.0) == []


def test_records_are_json():
    assert json.dumps(fitted(rows(), Slow()).report().journal.epochs)
