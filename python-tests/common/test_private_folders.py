"""Private folders: access rights, and removal by other programs."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import other_users as others
import pytest
from refusals import refused

from bigdl.common import private_folders
from bigdl.common.errors import UsageError
from bigdl.common.private_folders import (
    LockedFolder,
    private_folder,
    private_root,
    process_folder,
    scratch_folder,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="no namespace of processes can be made here",
)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Create a directory for temporary files like /tmp, for this process and its children."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    for each in [tmp_path, *tmp_path.parents]:
        if each == Path("/tmp"):
            break
        each.chmod(each.stat().st_mode | 0o011)  # others reach it
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("BIGDL_SCRATCH_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(private_folders, "process_folders", {})
    return folder


def is_private(path):
    actual = os.lstat(path)
    return stat.S_ISDIR(actual.st_mode) and actual.st_mode & 0o777 == 0o700


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_only_the_user_can_enter_what_a_program_makes(base, umask):
    before = os.umask(umask)
    try:
        with scratch_folder("rows") as path:
            folders = [path, process_folder(), private_root()]
            assert all(map(is_private, folders))
            assert Path(path).parent == Path(folders[1])
            assert Path(folders[1]).parent == Path(folders[2])
    finally:
        os.umask(before)
    assert not os.path.exists(path)


@needs_root
def test_another_user_can_neither_read_nor_plant_files(base):
    folder = LockedFolder("rows")
    Path(folder.path, "data").write_text("secret")
    root = private_root()
    assert not others.can(lambda: os.listdir(root))
    assert not others.can(lambda: Path(folder.path, "data").read_text())
    assert not others.can(lambda: Path(folder.path, "planted").write_text("x"))
    assert not others.can(lambda: os.rename(folder.path, base / "away") is None)


@needs_root
@pytest.mark.parametrize("plant", ["folder", "link", "file"])
def test_a_root_that_another_user_has_planted_is_not_used(base, plant, caplog):
    planted = base / f"bigdl-{os.geteuid()}"
    names = {
        "folder": lambda: planted.mkdir(0o777),
        "link": lambda: planted.symlink_to("/var/tmp"),
        "file": planted.touch,
    }
    others.can(names[plant])
    assert os.lstat(planted).st_uid == others.NOBODY
    folder = LockedFolder("rows")
    root = Path(folder.path).parent
    assert root.name.startswith(planted.name + "-")
    assert is_private(root)
    assert f"{planted} is not private to this user" in caplog.text
    with pytest.raises(UsageError, match="another user"):
        private_folder(planted)
    folder.close()
    assert not root.exists()


def test_a_root_that_another_user_has_replaced_is_not_used(base, caplog):
    base.chmod(0o777)  # without the sticky bit

    def swap():
        root.rename(base / "stolen")
        Path(path).mkdir(0o777, parents=True)

    folder = LockedFolder("process")
    path, root = folder.path, Path(folder.path).parent
    assert "sticky bit is not set" in caplog.text
    assert others.can(swap)
    with refused("path-unusable", path, "cannot be created again"):
        folder.path  # noqa: B018 (it is the property that looks)


def test_rights_that_a_umask_gave_to_others_are_taken_away(base):
    root = base / f"bigdl-{os.geteuid()}"
    root.mkdir()
    root.chmod(0o777)
    with scratch_folder("rows"):
        assert is_private(root)


def test_a_folder_that_stays_is_private_and_refused_where_others_can_replace_it(base):
    logs = private_folder(Path(private_root(), "logs", "search"))
    assert is_private(logs)
    assert is_private(logs.parent)
    private_folder(logs).chmod(0o755)
    assert is_private(private_folder(logs))
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    with pytest.raises(UsageError, match="another user"):
        private_folder(base / "open" / "logs")


def test_a_folder_is_made_anew_when_a_cleaner_took_it(base):
    folder = LockedFolder("rows")
    first = folder.path
    for taken in (first, private_root()):
        shutil.rmtree(taken)
        assert folder.path == first
        assert is_private(first)
    with scratch_folder("rows"):
        shutil.rmtree(process_folder())
        assert is_private(process_folder())
    folder.close()
    assert not os.path.exists(first)


PROGRAM = """
import sys, time
from bigdl.common.private_folders import LockedFolder, process_folder
folder = LockedFolder("first", remover=False)
print(folder.path, flush=True)
sys.stdin.read()
print(folder.path, flush=True)
"""


def program(*prefix):
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_a_killed_program_left_goes_and_what_another_uses_stays(base):
    with program() as killed, program() as running:
        left, used = killed.stdout.readline().strip(), running.stdout.readline().strip()
        Path(used, "file").touch()
        killed.kill()
        killed.wait()
        assert os.path.exists(left)
        private_folders.cleaned_roots.clear()
        with scratch_folder("next"):
            assert not os.path.exists(left)
            assert Path(used, "file").exists()
        running.communicate("")
    assert not os.path.exists(used)


@needs_namespaces
def test_a_program_in_another_container_leaves_the_folders_of_this_one(base):
    folder = LockedFolder("rows")
    Path(folder.path, "file").touch()
    with program("unshare", "--pid", "--fork", "--mount-proc") as other:
        assert other.stdout.readline().strip() != folder.path
        other.communicate("")
    assert Path(folder.path, "file").exists()


def test_a_process_that_inherits_the_lock_keeps_the_folder(base):
    folder = LockedFolder("ray", remover=False)
    path = folder.path
    with subprocess.Popen(["sleep", "60"], pass_fds=[folder.descriptor]) as heir:
        folder.hand_over()
        private_folders.cleaned_roots.clear()
        LockedFolder("next").close()
        assert os.path.exists(path)
        heir.kill()
    private_folders.cleaned_roots.clear()
    LockedFolder("next").close()
    assert not os.path.exists(path)


def test_a_forked_process_has_a_folder_of_its_own_and_leaves_that_of_its_parent(base):
    mine = process_folder()
    child = os.fork()
    if child == 0:
        other = process_folder()
        for folder in list(private_folders.process_folders.values()):
            folder.close()
        os._exit(int(other == mine or os.path.exists(other)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.path.isdir(mine)


def test_programs_that_end_and_begin_at_once_do_not_disturb_each_other(base):
    code = (
        "from bigdl.common.private_folders import LockedFolder, cleaned_roots\n"
        "import os\n"
        "for _ in range(200):\n"
        "    cleaned_roots.clear(); folder = LockedFolder('rows', remover=False)\n"
        "    assert os.path.isdir(folder._path); folder.close()\n"
    )
    programs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [each.wait() for each in programs] == [0, 0, 0]
    assert not list(base.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_folder_of_a_killed_process_goes_at_once(base, number):
    code = (
        "from bigdl.common.private_folders import process_folder\n"
        "import time; print(process_folder(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        folder = process.stdout.readline().decode().strip()
        assert os.path.isdir(folder)
        process.send_signal(number)
    deadline = time.monotonic() + 10
    while os.path.exists(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(folder)
