"""The portable ways of `bigdl.common.platform`, on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from bigdl.common.platform import cores, files, memory, processes
from bigdl.common.platform.shared_memory import SharedPages, map_shared_pages


@pytest.fixture(params=["of this system", "portable"])
def calls(request, monkeypatch):
    """The calls of this system, or what macOS has of them."""
    if request.param == "portable":
        monkeypatch.setattr(sys, "platform", "darwin")
        for name in ("memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fallocate"):
            monkeypatch.delattr(os, name, raising=False)
    return request.param


def test_shared_memory_is_seen_by_others_and_leaves_no_file(calls, tmp_path):
    folder = tmp_path / "process.1"
    folder.mkdir()
    shared = SharedPages(4096, lambda: str(folder))
    mapped = map_shared_pages(os.getpid(), shared.number, lambda: str(tmp_path))
    np.frombuffer(shared.pages, np.uint8)[:3] = 7
    assert bytes(mapped[:4]) == b"\7\7\7\0"
    with pytest.raises(TypeError, match="read"):
        mapped[0] = 1
    with pytest.raises(FileNotFoundError):
        map_shared_pages(os.getpid(), shared.number + 12345, lambda: str(tmp_path))
    del shared
    assert list(folder.iterdir()) == []
    assert mapped[0] == 7


def test_copied_ranges_are_equal(calls, tmp_path):
    content = np.random.default_rng(0).bytes(3_000_001)
    (tmp_path / "source").write_bytes(content)
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "wb") as target:
        files.copy_range(source, target, 2_000_000, 1_000_001)
        files.copy_range(source, target, 0, 2_000_000)
        with pytest.raises(EOFError):
            files.copy_range(source, target, 3_000_000, 2)
    assert (tmp_path / "target").read_bytes()[:3_000_001] == content[2_000_000:] + content[
        :2_000_000
    ]


def test_reserved_files_have_their_size_and_keep_their_bytes(calls, tmp_path):
    with open(tmp_path / "file", "wb+") as file:
        file.write(b"abc")
        file.flush()
        files.reserve(file.fileno(), 100)
        assert files.read_whole(file.fileno()) == b"abc" + bytes(97)


def test_private_maps_do_not_change_the_file(calls, tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    with open(tmp_path / "file", "rb") as file:
        mapped = files.map_private(file.fileno())
    mapped[0] = ord("x")
    assert bytes(mapped[:]) == b"xbc"
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_files_without_a_name_disappear(tmp_path):
    descriptor = files.anonymous_file(str(tmp_path))
    files.write_at(descriptor, memoryview(b"abc"), 2)
    assert files.read_whole(descriptor) == b"\0\0abc"
    os.close(descriptor)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_process_is_respected_until_that_ends(tmp_path):
    program = (
        "import sys; from bigdl.common.platform import files\n"
        "files.lock(files.open_folder(sys.argv[1]), shared=True); print(flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    folder = files.open_folder(str(tmp_path))
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        files.lock(folder, shared=True, wait=False)
        with pytest.raises(BlockingIOError):
            files.lock(folder, wait=False)
        other.stdin.write(b"\n")
    files.lock(folder, wait=False)
    files.close_folder(str(tmp_path), folder)


def test_cores_are_counted_where_there_is_no_affinity(calls):
    assert 1 <= len(cores.usable_cores()) <= os.cpu_count()
    if calls == "portable":
        assert cores.pin_process([0]) is False
        assert not cores.can_pin_threads()


def test_flags_of_an_apple_processor_have_the_names_of_linux():
    listed = "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_SME: 0\nhw.optional.neon: 1\n"
    assert cores.flags_of_sysctl(listed) == {"bf16"}
    assert cores.flags_of_sysctl("") == frozenset()


@pytest.mark.parametrize("sampled", [False, True])
def test_the_peak_of_a_block_includes_memory_that_it_has_freed(sampled, monkeypatch):
    def refuse(*arguments):
        raise OSError

    if sampled:
        monkeypatch.setattr(Path, "write_text", refuse)
        monkeypatch.setattr(memory, "read_text", lambda path: "")
    before = psutil.Process().memory_info().rss
    with memory.PeakMeter() as meter:
        for _ in range(100):
            np.ones(8_000_000).sum()
            if meter.peak - before > 50_000_000:
                break
    assert meter.peak - before > 50_000_000


def test_the_number_of_open_files_grows_by_one(tmp_path):
    before = processes.open_file_count()
    with open(tmp_path / "file", "w"):
        assert processes.open_file_count() == before + 1


def test_no_limit_of_open_files_is_below_the_present_one():
    soft, hard = processes.open_file_limits()
    assert soft is None or hard is None or soft <= hard
