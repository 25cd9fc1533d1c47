"""Checkpoints, and runs that go on as if they had never stopped."""

import errno
import json
import logging
import os
import re
import stat
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_workers import CrewJob, shared_crew
from reference_training import rows_of
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.common.storage import (
    disk_error,
    put_folder,
    read_bytes,
    write_bytes,
    write_reason,
    writing,
)
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.pytorch.loop import FitProgram, FitSettings
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.trigger import EveryEpoch, SeveralIteration, Trigger
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.failure import FailurePolicy
from bigdl.training.checkpoint import (
    Checkpoint,
    CheckpointDirectory,
    checkpoint_name,
    find_checkpoint,
)
from bigdl.training.fit import TrainingSession
from bigdl.training.position import StoppingCriterion

# -- directories --------------------------------------------------------------------------------


def snapshot(epoch, step=0, **files):
    manifest = {"epoch": epoch, "step": step, "global_step": 10 * epoch + step, "history": []}
    return Checkpoint(
        manifest, {f"{k}.pt": v for k, v in files.items()} or {"model.pt": b"weights"}
    )


def test_a_snapshot_travels_as_one_blob():
    before = snapshot(1, model=b"abc", rng=b"", optimizer=b"de")
    doc, blob = before.pack()
    assert Checkpoint.unpack(json.loads(json.dumps(doc)), blob) == before


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_what_was_written_is_read(tmp_path, scheme):
    directory = CheckpointDirectory.create(f"{scheme}{tmp_path}/models")
    name = directory.write(snapshot(3, 7, model=b"abc", rng=b""))
    assert name == "checkpoint-000003-00000007"
    found_name, found = CheckpointDirectory.latest_run(f"{scheme}{tmp_path}/models").latest()
    assert (found_name, found.files) == (name, {"model.pt": b"abc", "rng.pt": b""})
    assert (found.position.epoch, found.position.batch) == (3, 7)


def test_a_checkpoint_is_a_folder_with_a_manifest(tmp_path):
    directory = CheckpointDirectory.create(str(tmp_path))
    name = directory.write(snapshot(1, model=b"abc"))
    (run,) = tmp_path.iterdir()
    assert re.fullmatch(r"run-\d{8}T\d{6}\.\d{6}-[0-9a-f]{6}", run.name)
    manifest = json.loads((run / name / "manifest.json").read_text())
    assert manifest["files"] == {"model.pt": {"size": 3, "crc32": zlib.crc32(b"abc")}}
    assert sorted(p.name for p in run.iterdir()) == [".probe", name]


def test_a_checkpoint_is_for_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        directory = CheckpointDirectory.create(str(tmp_path / "models"))
        directory.write(snapshot(1))
    finally:
        os.umask(before)
    (run,) = (tmp_path / "models").iterdir()
    (folder,) = run.glob("checkpoint-*")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (run, folder)] == [0o700] * 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_the_newest_two_are_kept(tmp_path):
    directory = CheckpointDirectory.create(str(tmp_path))
    for epoch, step in [(0, 5), (1, 0), (1, 10), (1, 9), (10, 0)]:
        directory.write(snapshot(epoch, step))
    assert directory.names() == ["checkpoint-000001-00000010", "checkpoint-000010-00000000"]


def damage_content(folder):
    (folder / "model.pt").write_bytes(b"weighty")


def damage_size(folder):
    (folder / "model.pt").write_bytes(b"")


def damage_manifest(folder):
    (folder / "manifest.json").write_text('{"epoch"')


def remove_file(folder):
    (folder / "model.pt").unlink()


def other_format(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"format": 1', '"format": 99'))


@pytest.mark.parametrize(
    "harm", [damage_content, damage_size, damage_manifest, remove_file, other_format]
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, harm):
    directory = CheckpointDirectory.create(str(tmp_path))
    older, newer = directory.write(snapshot(1)), directory.write(snapshot(2))
    harm(next(tmp_path.iterdir()) / newer)
    warnings = []
    assert directory.latest(warnings.append)[0] == older
    (warning,) = warnings
    assert newer in warning
    assert "cannot be read" in warning
    with refused("checkpoint-damaged"):
        directory.read(newer)


def edit_manifest(run, name, changed):
    path = next(run.glob("run-*")) / name / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changed}
    path.write_text(json.dumps({k: v for k, v in manifest.items() if v is not ...}))


SIZES = {"size": 7, "crc32": 1}
SLICE = {"shape": [2], "dtype": "<i8", **SIZES}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": ...}, "has no 'format'"),
        ({"format": "2.0"}, "is of format '2.0', this version reads 1"),
        ({"epoch": ...}, "has no 'epoch'"),
        ({"step": ..., "files": ...}, "has no 'files', 'step'"),
        ({"epoch": -1}, "'epoch' should be an integer of at least 0, got -1"),
        ({"global_step": "7"}, "'global_step' should be an integer of at least 0, got '7'"),
        ({"step": 1.5}, "'step' should be .*, got 1.5"),
        ({"step": True}, "'step' should be .*, got True"),
        ({"epoch": None}, "'epoch' should be .*, got None"),
        ({"history": {}}, r"'history' should be a list .*, got \{\}"),
        ({"history": [{"epoch": 1}]}, "'history' should be .* each with epoch and global_step"),
        ({"partial": [1]}, "'partial' should be null, or an epoch's metrics"),
        ({"ends": [3]}, "'ends' should be a dict of numbers"),
        ({"seed": "7"}, "'seed' should be an integer, got '7'"),
        ({"rows": [20, -1]}, r"'rows' should be a list of numbers of rows, got \[20, -1\]"),
        ({"sums": [{"losses": 1.0}]}, "'sums' should be a list of sums of workers"),
        (
            {"sums": [{"loss": 1.0}], "rows_since_merge": [1, 2]},
            "different numbers of workers: 1 in 'sums' and 2 in 'rows_since_merge'",
        ),
        ({"files": ["model.pt"]}, "'files' should be a dict of file names"),
        ({"files": {"model.pt": 7}}, "'files' should be .* each with size and crc32"),
        ({"files": {"../model.pt": SIZES}}, "'files' should be a dict of file names"),
        ({"files": {"rng.pt": SIZES}}, "'files' has no 'model.pt'"),
        ({"slices": {"table": [{**SLICE, "dtype": "x"}]}}, "'slices' should be the slices"),
        ({"left": [{**SLICE, "shape": 2}]}, "'left' should be the slices"),
    ],
)
def test_a_manifest_of_wrong_values_is_refused_by_field(tmp_path, changed, message):
    directory = CheckpointDirectory.create(str(tmp_path))
    older, name = directory.write(snapshot(1)), directory.write(snapshot(2))
    edit_manifest(tmp_path, name, changed)
    for read in (directory.read, directory.position):
        with pytest.raises(UsageError, match=rf"The checkpoint .*{name} .*{message}") as caught:
            read(name)
        assert "\n" not in str(caught.value)
    found = find_checkpoint(str(tmp_path), version=10)  # another one does not matter
    assert checkpoint_name(found) == older


@pytest.mark.parametrize("text", ["[]", "7", '"a"', "null", "\udcff", ""])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    directory = CheckpointDirectory.create(str(tmp_path))
    name = directory.write(snapshot(1))
    path = next(tmp_path.glob("run-*")) / name / "manifest.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=f"The checkpoint .*{name} cannot be read: "):
        directory.read(name)


def test_slices_and_figures_of_a_manifest_are_read(tmp_path):
    directory = CheckpointDirectory.create(str(tmp_path))
    name = directory.write(snapshot(1))
    figures = {"epoch": 1, "global_step": 10, "train_loss": float("nan"), "logs": {}}
    changed = {
        "slices": {"table": [SLICE, {**SLICE, "shape": [0, 4], "dtype": "|V2"}]},
        "left": [SLICE],
        "history": [figures],
        "partial": figures,
        "ends": {"after epoch 0, to step 3": 1},
        "rows": [20, 0],
        "sums": [{"loss": 0.5, "rows": 3.0}],
        "rows_since_merge": [3],
    }
    edit_manifest(tmp_path, name, changed)
    assert directory.read(name).slices.names == ["table"]


def test_without_its_manifest_a_checkpoint_does_not_exist(tmp_path):
    directory = CheckpointDirectory.create(str(tmp_path))
    older, newer = directory.write(snapshot(1)), directory.write(snapshot(2))
    (next(tmp_path.iterdir()) / newer / "manifest.json").unlink()
    assert directory.names() == [older]


def test_what_a_dead_writer_left_is_removed(tmp_path):
    directory = CheckpointDirectory.create(str(tmp_path))
    run = next(tmp_path.iterdir())
    (run / ".checkpoint-000001-00000000-abcd").mkdir()
    directory.write(snapshot(2))
    assert sorted(p.name for p in run.iterdir()) == [".probe", "checkpoint-000002-00000000"]


def test_a_repeated_checkpoint_replaces_the_first(tmp_path):
    directory = CheckpointDirectory.create(str(tmp_path))
    name = directory.write(snapshot(1, model=b"first", scheduler=b"x"))
    directory.write(snapshot(1, model=b"second"))
    assert directory.read(name).files == {"model.pt": b"second"}


def test_a_relative_folder_is_the_same_for_every_worker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = CheckpointDirectory.create("models")
    assert directory.url.startswith(f"{tmp_path}/models/run-")
    assert CheckpointDirectory.create(f"file://{tmp_path}/models").url.startswith(f"{tmp_path}/")


def test_the_latest_run_is_the_newest_that_has_a_checkpoint(tmp_path):
    assert CheckpointDirectory.latest_run(str(tmp_path / "nothing")) is None
    runs = [CheckpointDirectory.create(str(tmp_path)) for _ in range(4)]
    assert CheckpointDirectory.latest_run(str(tmp_path)) is None
    for run in runs[:3]:
        run.write(snapshot(1))
    assert CheckpointDirectory.latest_run(str(tmp_path)).url == runs[2].url


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with refused("path-unusable", "model_dir"):
        CheckpointDirectory.create(f"{tmp_path}/file/models")


def test_a_checkpoint_that_cannot_be_written_is_one_sentence_and_leaves_nothing(tmp_path):
    import resource

    directory = CheckpointDirectory.create(str(tmp_path))
    whole = directory.write(snapshot(1))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(UsageError, match="larger than a file may be here") as raised:
            directory.write(snapshot(2, model=bytes(10_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert f"below model_dir {str(tmp_path)!r}" in str(raised.value)
    assert f"{whole} is complete, and fit(resume='auto') resumes" in str(raised.value)
    (run,) = tmp_path.iterdir()
    assert sorted(each.name for each in run.iterdir()) == [".probe", whole]


def test_a_folder_that_cannot_be_written_whole_leaves_the_earlier_one(tmp_path):
    import resource

    for number, size in enumerate((10, 10_000)):
        source = tmp_path / f"source{number}"
        (source / "inner").mkdir(parents=True)
        (source / "a").write_bytes(bytes(size // 10))
        (source / "inner" / "b").write_bytes(bytes(size))
    target = tmp_path / "models" / "target"
    put_folder(str(tmp_path / "source0"), str(target))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with refused("path-unusable", str(target)), writing("The model", target):
            put_folder(str(tmp_path / "source1"), str(target))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    files = {each.name: each.stat().st_size for each in target.rglob("*") if each.is_file()}
    assert files == {"a": 1, "b": 10}
    assert [each.name for each in target.parent.iterdir()] == ["target"]
    put_folder(str(tmp_path / "source1"), str(target))
    assert (target / "inner" / "b").stat().st_size == 10_000


def test_a_disk_that_is_full_is_told_with_what_is_free(tmp_path):
    for error in (OSError(errno.ENOSPC, "No space"), OSError(errno.EDQUOT, "Quota")):
        assert re.search(
            r"\(\d+ of \d+ [MK]iB are free\); free some", write_reason(error, tmp_path)
        )
    cause = disk_error(RuntimeError("java.io.IOException: No space left on device"))
    assert cause.errno == errno.ENOSPC


def test_checkpoints_that_are_all_damaged_are_not_said_to_be_missing(tmp_path):
    directory = CheckpointDirectory.create(str(tmp_path))
    name = directory.write(snapshot(1))
    write_bytes(f"{directory.url}/{name}/model.pt", b"cut")
    with pytest.raises(UsageError, match=f"can be read: {name} of .* is damaged"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("url", ["nowhere://x/y", "s3:/"])
def test_an_unknown_kind_of_location_is_refused(url):
    with refused("path-unusable"):
        read_bytes(url)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_files_are_written_whole(tmp_path, scheme):
    url = f"{scheme}{tmp_path}/a/b.pt"
    write_bytes(url, b"one")
    write_bytes(url, b"two")
    assert read_bytes(url) == b"two"
    if scheme != "memory://":
        assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.pt"]
    with refused("path-unusable"):
        read_bytes(f"{url}.other")


# -- runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crew():
    return shared_crew(3)


def model(config=None):
    """Whatever a checkpoint must bring back: momentum, dropout, statistics of batches, a rate."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
    ).double()


def optimizer(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def scheduler(optimizer, config=None):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


PARTS = ModelParts(model, optimizer, nn.MSELoss(), scheduler)
SHARDS = rows_of([6, 9, 5])
BATCH, STEPS = 10, 2  # per epoch; batches as even as possible, for the sake of BatchNorm1d


class Run:
    """A program that trains; another object of the same `model_dir` is the program run again."""

    def __init__(self, crew, model_dir=None, shards=SHARDS):
        self._crew = crew
        self.shards = [{"data": shard} for shard in shards]
        self.training = TrainingSession(
            None if model_dir is None else str(model_dir), TorchDistributedSync
        )
        self.jobs = 0
        self.topics = []

    def fit(
        self,
        epochs=None,
        steps=None,
        *,
        resume=None,
        seed=7,
        max_failures=0,
        batch_size=BATCH,
        trigger=None,
        **settings,
    ):
        def open_job(program, feed):
            self.jobs += 1
            return Job(self._crew, self.shards, program, self.topics)

        settings = FitSettings(
            StoppingCriterion(epochs, steps),
            batch_size,
            0,
            feature_cols=["x"],
            label_cols=["y"],
            checkpoint_trigger=trigger or EveryEpoch(),
            **settings,
        )
        return self.training.fit(
            SimpleNamespace(open=open_job, num_workers=len(self.shards)),
            None,
            lambda settings: FitProgram(PARTS, settings, TorchDistributedSync),
            settings,
            seed=seed,
            resume=resume,
            policy=FailurePolicy(max_failures),
            progress="none",
        )

    @property
    def state(self):
        files = self.training.snapshot.files
        return {k: files[k] for k in ("model.pt", "optimizer.pt", "scheduler.pt", "rng.pt")}


class Job(CrewJob):
    """Calls an error that stands for it the loss of a worker, and notes what is sent."""

    def __init__(self, crew, shards, program, topics):
        super().__init__(crew, shards, program)
        self._topics = topics

    def attempt(self, options, state, on_event):
        def listen(kind, value):
            if not value[0]["topic"].startswith("records"):  # those of the report
                self._topics.append(value[0]["topic"])
            on_event(kind, value)

        try:
            return super().attempt(options, state, listen)
        except ConnectionAbortedError:
            raise WorkerLost("A worker was lost") from None


class PowerCut(Callback):
    """Raises at a step, or loses the worker there once."""

    def __init__(self, step, error=None, once=None):
        self.step, self.once = step, once
        self.error = error or RuntimeError("power cut")

    def before_train_iter(self, runner):
        if runner.global_step == self.step and runner.rank == runner.size - 1:
            if self.once is not None:
                if self.once.exists():
                    return
                self.once.touch()
            raise self.error


def without_times(figures):
    return [{k: v for k, v in entry.items() if k != "profile"} for entry in figures]


@pytest.fixture(scope="module")
def whole(crew):
    """Three epochs without interruption, with a checkpoint after each."""
    run = Run(crew)
    run.figures = run.fit(3)
    return run


def same(run, other):
    assert run.state.keys() == other.state.keys()
    for file in run.state:
        a, b = (load(r.state[file]) for r in (run, other))
        assert equal(a, b), file


def load(data):
    import io

    return torch.load(io.BytesIO(data), weights_only=True)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.slow
def test_two_runs_with_one_seed_are_equal(crew, whole):
    run = Run(crew)
    assert without_times(run.fit(3)) == without_times(whole.figures)
    same(run, whole)


def test_to_take_a_checkpoint_does_not_change_the_run(crew, whole, tmp_path):
    run = Run(crew, tmp_path)
    figures = run.fit(3, trigger=SeveralIteration(1))
    assert without_times(figures) == without_times(whole.figures)
    same(run, whole)


def test_two_fits_equal_one(crew, whole):
    run = Run(crew)
    figures = run.fit(1) + run.fit(2, seed=None)
    assert without_times(figures) == without_times(whole.figures)
    assert [f["epoch"] for f in figures] == [1, 2, 3]
    same(run, whole)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("trigger", [EveryEpoch(), SeveralIteration(1)], ids=["epoch", "step"])
def test_a_run_that_was_interrupted_goes_on(crew, whole, tmp_path, step, trigger):
    with pytest.raises(RuntimeError, match="power cut"):
        Run(crew, tmp_path).fit(3, trigger=trigger, callbacks=[PowerCut(step)])
    again = Run(crew, tmp_path)
    figures = again.fit(3, trigger=trigger, resume="auto")
    assert without_times(figures) == without_times(whole.figures)
    same(again, whole)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_that_max_steps_ended_can_be_finished(crew, whole, tmp_path, steps):
    Run(crew, tmp_path).fit(steps=steps)
    again = Run(crew, tmp_path)
    figures = again.fit(3, resume="auto")
    assert without_times(figures) == without_times(whole.figures)
    same(again, whole)


@pytest.mark.parametrize("folder", [True, False], ids=["model_dir", "no model_dir"])
@pytest.mark.parametrize("trigger", [EveryEpoch(), SeveralIteration(1)], ids=["epoch", "step"])
def test_a_fit_that_lost_a_worker_goes_on(crew, whole, tmp_path, folder, trigger, caplog):
    cut = PowerCut(3, ConnectionAbortedError(), tmp_path / "cut")
    run = Run(crew, tmp_path / "models" if folder else None)
    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        figures = run.fit(3, trigger=trigger, callbacks=[cut], max_failures=1)
    assert without_times(figures) == without_times(whole.figures)
    same(run, whole)
    step = 0 if isinstance(trigger, EveryEpoch) else 1
    assert f"resuming from epoch 2, step {step} (failure 1 of 1)" in caplog.text


def test_too_many_losses_are_raised(crew, tmp_path):
    with pytest.raises(WorkerLost, match=r"was lost \(2 failures are more than max_failures=1\)"):
        Run(crew).fit(3, callbacks=[PowerCut(3, ConnectionAbortedError())], max_failures=1)


def test_checkpoints_that_nobody_would_use_are_not_taken(crew):
    for max_failures, topics in [(1, ["checkpoint"] * 2 + ["final"]), (0, ["final"])]:
        run = Run(crew)
        run.fit(3, max_failures=max_failures)
        assert run.topics == topics


def test_a_finished_run_returns_at_once(crew, whole, tmp_path):
    first = Run(crew, tmp_path)
    first.fit(2), first.fit(1, seed=None)
    again = Run(crew, tmp_path)
    figures = again.fit(2, resume="auto") + again.fit(1, resume="auto", seed=None)
    assert without_times(figures) == without_times(whole.figures)
    assert again.jobs == 0
    same(again, whole)
    again.fit(1, seed=None)  # goes on from there
    assert again.training.position.epoch == 4


def test_a_program_of_two_fits_that_was_interrupted_in_the_second(crew, whole, tmp_path):
    first = Run(crew, tmp_path)
    first.fit(1)
    with pytest.raises(RuntimeError, match="power cut"):
        first.fit(2, callbacks=[PowerCut(3)], trigger=SeveralIteration(1))
    again = Run(crew, tmp_path)
    figures = again.fit(1, resume="auto") + again.fit(2, resume="auto")
    assert without_times(figures) == without_times(whole.figures)
    assert again.jobs == 1
    same(again, whole)


def test_an_estimator_whose_fit_failed_can_go_on_or_begin_again(crew, whole, tmp_path):
    run = Run(crew, tmp_path)
    run.fit(1)
    for resume in (None, "auto"):  # both end in the second epoch, after a checkpoint
        with pytest.raises(RuntimeError, match="power cut"):
            run.fit(2, callbacks=[PowerCut(4)], seed=None)
        assert run.training.position.epoch == 1
        figures = run.fit(2, resume=resume, seed=None)
        assert without_times(figures) == without_times(whole.figures[1:])
        same(run, whole)
        run = Run(crew, tmp_path / "second")
        run.fit(1)


def test_the_fit_after_one_that_max_steps_ended_begins_a_new_epoch(crew):
    run = Run(crew)
    first, second = run.fit(steps=3), run.fit(1)
    assert [(f["epoch"], f["num_samples"]) for f in first] == [(1, 20), (2, 10)]
    assert [(f["epoch"], f["num_samples"]) for f in second] == [(3, 20)]
    assert run.training.position.global_step == 5


class Stop(Callback):
    def __init__(self, step):
        self.step = step

    def after_train_iter(self, runner):
        runner.stop = runner.rank == 1 and runner.global_step == self.step


def test_a_run_that_a_callback_ended_has_ended(crew, tmp_path):
    first = Run(crew, tmp_path)
    before = first.fit(3, callbacks=[Stop(3)]) + first.fit(1)
    assert [(f["epoch"], f["num_samples"]) for f in before] == [(1, 20), (2, 10), (3, 20)]
    again = Run(crew, tmp_path)
    after = again.fit(3, callbacks=[Stop(3)], resume="auto") + again.fit(1, resume="auto")
    assert without_times(after) == without_times(before)
    assert again.jobs == 0


def test_a_damaged_checkpoint_costs_no_more_than_its_steps(crew, whole, tmp_path, caplog):
    Run(crew, tmp_path).fit(2)
    (newest,) = tmp_path.glob("run-*/checkpoint-000002-00000000/model.pt")
    newest.write_bytes(b"")
    again = Run(crew, tmp_path)
    figures = again.fit(3, resume="auto")
    assert "the previous checkpoint is used" in caplog.text
    assert without_times(figures) == without_times(whole.figures)
    same(again, whole)
    assert len(CheckpointDirectory.latest_run(str(tmp_path)).names()) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 5}, "batch_size=10, now it is 5"),
        ({"seed": 8}, "seed=7, now it is 8"),
        ({"shuffle": False}, "shuffle=True, now it is False"),
        ({"drop_last": True}, "drop_last=False, now it is True"),
    ],
)
def test_inside_an_epoch_the_batches_must_not_change(crew, tmp_path, changed, message):
    Run(crew, tmp_path).fit(steps=3)
    with pytest.raises(UsageError, match=f"in the middle of an epoch with {message}; resume with"):
        Run(crew, tmp_path).fit(3, resume="auto", **changed)


def test_inside_an_epoch_other_workers_read_what_is_left(crew, tmp_path):
    Run(crew, tmp_path).fit(steps=3)
    whole = {name: np.concatenate([shard[name] for shard in SHARDS]) for name in SHARDS[0]}
    shards = [{name: column[part] for name, column in whole.items()} for part in HALVES]
    figures = Run(crew, tmp_path, shards).fit(3, resume="auto")
    assert [each["num_samples"] for each in figures] == [20] * 3
    assert [each["global_step"] for each in figures] == [2, 4, 6]


HALVES = slice(0, 10), slice(10, 20)


def test_inside_an_epoch_the_rows_must_not_change(crew, tmp_path):
    Run(crew, tmp_path).fit(steps=3)
    others = Run(crew, tmp_path, rows_of([10, 10], seed=1))
    with refused("checkpoint-mismatch", "10"):
        others.fit(3, resume="auto")
    more = Run(crew, tmp_path, rows_of([10, 11]))
    with refused("checkpoint-mismatch", "20", "21"):
        more.fit(3, resume="auto")


def test_inside_an_epoch_a_manifest_needs_its_sums(crew, tmp_path):
    Run(crew, tmp_path).fit(steps=3)
    name = CheckpointDirectory.latest_run(str(tmp_path)).newest()
    edit_manifest(tmp_path, name, {"sums": ..., "partial": None})
    with pytest.raises(
        (UsageError, WorkerError), match=rf"{name} was taken .* has no 'sums'; resume"
    ):
        Run(crew, tmp_path).fit(3, resume="auto")


def test_at_the_end_of_an_epoch_everything_may_change(crew, tmp_path):
    Run(crew, tmp_path).fit(1)
    run = Run(crew, tmp_path, rows_of([9, 11]))
    figures = run.fit(2, resume="auto", batch_size=5, seed=9, shuffle=False)
    assert [f["num_samples"] for f in figures] == [20, 20]


def test_resume_takes_the_path_of_a_checkpoint(crew, whole, tmp_path):
    Run(crew, tmp_path / "a").fit(2)
    (first,) = tmp_path.glob("a/run-*/checkpoint-000001-00000000")
    run = Run(crew)
    assert without_times(run.fit(3, resume=str(first))) == without_times(whole.figures)
    same(run, whole)
    run.fit(2, resume=str(first))
    assert run.training.position.epoch == 2


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("auto", ("argument-missing", 'resume="auto"', "model_dir")),
        (True, ("argument-value", '"auto"')),
        ("somewhere/else", ("argument-value", "'somewhere/else'")),
        ("somewhere/checkpoint-000001-00000000", ("checkpoint-damaged",)),
    ],
)
def test_what_resume_cannot_mean_is_refused(crew, resume, message):
    with refused(*message):
        Run(crew).fit(1, resume=resume)


def test_a_run_without_checkpoints_starts_afresh(crew, whole, tmp_path):
    run = Run(crew, tmp_path)
    assert without_times(run.fit(3, resume="auto")) == without_times(whole.figures)


def test_a_checkpoint_of_another_model_is_refused(crew, tmp_path):
    run = Run(crew, tmp_path)
    run.fit(1)
    other = TrainingSession(str(tmp_path), TorchDistributedSync)

    def other_model(config):
        return nn.Linear(4, 1).double()

    parts = ModelParts(other_model, optimizer, nn.MSELoss(), scheduler)
    settings = FitSettings(StoppingCriterion(2), BATCH, 0, feature_cols=["x"], label_cols=["y"])
    with refused("model-mismatch"):
        other.fit(
            SimpleNamespace(
                open=lambda program, feed: CrewJob(crew, run.shards, program), num_workers=3
            ),
            None,
            lambda settings: FitProgram(parts, settings, TorchDistributedSync),
            settings,
            seed=7,
            resume="auto",
            policy=FailurePolicy(0),
            progress="none",
        )


class Moody(Trigger):
    """The ranks' answers differ: that of rank 0 counts."""

    def __call__(self, state):
        import os

        return os.getpid() % 2 == 0


def test_a_trigger_of_the_user_need_not_answer_alike_on_all_workers(crew, whole, tmp_path):
    run = Run(crew, tmp_path)
    assert without_times(run.fit(3, trigger=Moody())) == without_times(whole.figures)


# -- through the Estimator ----------------------------------------------------------------------


def make(model_dir):
    return Estimator.from_torch(
        model=lambda config: nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
        ),
        optimizer=optimizer,
        loss=nn.MSELoss(),
        scheduler_creator=scheduler,
        metrics=["mae"],
        workers_per_node=2,
        model_dir=None if model_dir is None else str(model_dir),
    )


@pytest.fixture(scope="module")
def frame(orca_spark):
    (shard,) = rows_of([40])
    rows = [(x.tolist(), float(y)) for x, y in zip(shard["x"], shard["y"], strict=True)]
    return orca_spark.createDataFrame(rows, "x array<double>, y double")


COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8}


@pytest.mark.slow
def test_the_estimator_goes_on_where_it_was_interrupted(frame, tmp_path):
    whole = make(None)
    expected = whole.fit(frame, epochs=3, seed=1, validation_data=frame, **COLUMNS)
    options = {
        "epochs": 3,
        "seed": 1,
        "validation_data": frame,
        "checkpoint_trigger": SeveralIteration(2),
        **COLUMNS,
    }
    with pytest.raises(WorkerError, match=r"RuntimeError in worker 1(.|\n)*power cut"):
        make(tmp_path).fit(frame, callbacks=[PowerCut(8)], **options)
    (run,) = tmp_path.glob("run-*")
    names = sorted(p.name for p in run.glob("checkpoint-*"))
    assert names == ["checkpoint-000001-00000001", "checkpoint-000001-00000003"]
    assert sorted(p.name for p in (run / names[1]).iterdir()) == [
        "buffers.pt",
        "classes.json",
        "manifest.json",
        "model.pt",
        "optimizer.pt",
        "rng.pt",
        "rows.left.00000.npy",
        "rows.left.00001.npy",
        "scheduler.pt",
    ]
    again = make(tmp_path)
    assert again.fit(frame, resume="auto", **options) == expected
    states = [e.get_state_dict() for e in (again, whole)]
    assert states[0]["epoch"] == 3
    assert equal(*states)
    assert Estimator.latest_checkpoint(str(tmp_path)) == f"{run}/checkpoint-000003-00000000"


def test_a_finished_run_of_the_estimator_returns_at_once(frame, tmp_path):
    options = {"epochs": 2, "seed": 1, "resume": "auto", **COLUMNS}
    first = make(tmp_path)
    before = first.fit(frame, **options)
    again = make(tmp_path)
    tracker = frame.sparkSession.sparkContext.statusTracker()
    jobs = set(tracker.getJobIdsForGroup(None))
    assert again.fit(frame, **options) == before
    assert set(tracker.getJobIdsForGroup(None)) == jobs
    assert equal(again.get_state_dict(), first.get_state_dict())


@pytest.mark.slow
def test_a_checkpoint_can_be_loaded(frame, tmp_path):
    whole = make(None)
    whole.fit(frame, epochs=3, seed=1, **COLUMNS)
    make(tmp_path).fit(frame, epochs=2, seed=1, **COLUMNS)
    again = make(None)
    again.load_checkpoint(Estimator.latest_checkpoint(str(tmp_path)))
    (stats,) = again.fit(frame, **COLUMNS)
    assert stats["epoch"] == 3
    assert equal(again.get_state_dict(), whole.get_state_dict())


@pytest.mark.slow
def test_workers_that_do_not_see_the_folder_are_refused(frame):
    with pytest.raises(UsageError, match=r"cannot read model_dir 'memory://"):
        make("memory://models").fit(frame, **COLUMNS)
