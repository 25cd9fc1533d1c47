"""BigDL in processes that imitate macOS or Windows (``pytest --portable``)."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import other_platform
import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, platform: str = "darwin", *args: object) -> str:
    """Run a program in a new process that imitates a platform, and return its output."""
    imitated = {**os.environ, **other_platform.environment(platform)}
    path = os.pathsep.join([imitated["PYTHONPATH"], str(ROOT / "src")])
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        env={**imitated, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


SEES = """\
import ctypes, multiprocessing, os, socket, sys

def error_of(call, *args):
    try:
        return call(*args)
    except Exception as error:
        return type(error).__name__

print(
    sys.platform,
    [name for name in ("memfd_create", "sched_getaffinity", "fork") if hasattr(os, name)],
    [name for name in ("SO_REUSEPORT", "SCM_RIGHTS", "send_fds") if hasattr(socket, name)],
    *[error_of(open, path) for path in ("/proc/self/status", "/dev/shm/x")],
    os.path.exists("/proc"),
    error_of(lambda: ctypes.CDLL(None).prctl),
    error_of(multiprocessing.get_context, "fork"),
)
"""


def test_this_process_and_those_that_it_starts_have_nothing_of_linux():
    """Packages of others keep it: psutil reads ``/proc``."""
    program = f"{SEES}\nimport psutil, subprocess\nassert psutil.virtual_memory().available\n"
    program += f"subprocess.run([sys.executable, '-P', '-c', {SEES!r}], check=True)"
    seen = "[] [] FileNotFoundError FileNotFoundError False AttributeError ValueError"
    assert run(program).splitlines() == [f"darwin {seen}"] * 2


WINDOWS = """\
import os, sys
for name in ("fcntl", "resource"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        print(name)
print(sys.platform, os.name, hasattr(os, "killpg"), hasattr(os, "getuid"))
"""


def test_windows_has_neither_fcntl_nor_process_groups():
    assert run(WINDOWS, "win32").split() == ["fcntl", "resource", "win32", "nt", "False", "False"]


WINDOWS_FILES = """\
import os, sys
from bigdl.common.platform import files

folder = sys.argv[1]
path = os.path.join(folder, "bytes")
file = os.open(path, os.O_RDWR | os.O_CREAT)
files.write_at(file, memoryview(b"a\\nb"), 0)
print(files.read_part(file, 9, 0), os.stat(path).st_size)
files.unlink_open(path)
print(os.path.exists(path))
os.close(file)
files.sync_folder(folder)
first, second = (os.open(path, os.O_RDWR) for _ in range(2))
files.lock(first, shared=True)
try:
    files.lock(second, wait=False)
except BlockingIOError:
    print("locked")
os.close(first)
files.lock(second, wait=False)
os.close(second)
"""


def test_files_on_windows_keep_their_bytes_and_their_locks(tmp_path):
    """Files are text unless told otherwise, and cannot be removed while they are open."""
    printed = run(WINDOWS_FILES, "win32", tmp_path).splitlines()
    assert printed[:3] == [r"b'a\nb' 3", "True", "locked"]
    assert not (tmp_path / "bytes").exists(), "it is removed at exit"


def test_a_test_that_calls_linux_itself_is_skipped():
    def error_of(file: object) -> Exception:
        text = "AttributeError: module 'os' has no attribute 'fork'"
        return RuntimeError(f'In worker 0:\n  File "{file}", line 1, in program\n{text}')

    other_platform.skip_test_of_linux(error_of(ROOT / "src" / "bigdl" / "common" / "cpu.py"))
    with pytest.raises(pytest.skip.Exception, match=r"the test itself needs Linux: .* 'fork'"):
        other_platform.skip_test_of_linux(error_of(__file__))


LOCAL = """\
import sys, tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from bigdl.data import TableLoader
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.orca.learn.pytorch import Estimator

if __name__ == "__main__":
    rows = np.random.default_rng(0).random((64, 4), dtype=np.float32)
    data = {"x": rows, "y": rows.sum(1, keepdims=True)}
    estimator = Estimator.from_torch(
        model=lambda config: nn.Linear(4, 1),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.MSELoss(), metrics=["mse"], backend="local", workers_per_node=2)
    losses = [epoch["train_loss"] for epoch in estimator.fit(data, epochs=2, batch_size=16)]
    assert losses[1] < losses[0], losses
    assert estimator.evaluate(data, batch_size=16)["num_samples"] == 64
    predicted = estimator.predict({"x": rows})
    print("predicted", len(predicted), sys.platform)

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    sample = torch.from_numpy(rows)
    for name, fast, bound in (
        ("traced", InferenceOptimizer.trace(model, accelerator="openvino",
                                              input_sample=sample), 1e-5),
        ("quantized", InferenceOptimizer.quantize(model, accelerator="openvino",
                                                  calib_data=sample), 0.1),
    ):
        with InferenceOptimizer.get_context(fast):
            print(name, bool((fast(sample) - model(sample)).abs().max() < bound))

    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.table({"row": np.arange(100)}), f"{folder}/rows.parquet")
        loader = TableLoader(folder, batch_size=10, shuffle=True, seed=1)
        read = np.concatenate([batch["row"] for batch in loader])
        print("read", sorted(read.tolist()) == list(range(100)))
"""


@pytest.mark.parametrize("platform", ["darwin", pytest.param("win32", marks=pytest.mark.slow)])
def test_the_local_half_runs_without_what_only_linux_has(tmp_path, platform):
    """Fit, evaluate and predict with two workers; trace and quantize; read a table."""
    program = tmp_path / "local.py"
    program.write_text(LOCAL, encoding="utf-8")
    start = f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"
    printed = run(start, platform)
    expected = [f"predicted 64 {platform}", "traced True", "quantized True", "read True"]
    assert [line for line in printed.splitlines() if line in expected] == expected


IMPORTS = """\
import importlib, pkgutil, sys
import bigdl
from bigdl.common.dropped import DROPPED

names = [module.name for module in pkgutil.walk_packages(bigdl.__path__, "bigdl.", lambda _: None)]
names = [name for name in names if not name.endswith("__main__")]
names = [name for name in names if not any(f"{name}.".startswith(f"{each}.") for each in DROPPED)]
names = sys.argv[1:] or names
for name in names:
    importlib.import_module(name)
print(len(names))
"""


LIBRARIES = (
    *("bigdl.orca.learn.pytorch", "bigdl.data", "bigdl.tuning", "bigdl.nano.pytorch"),
    *("bigdl.nano.serving.main", "bigdl.friesian.feature", "bigdl.friesian.serving.program"),
)


@pytest.mark.slow
def test_the_libraries_can_be_imported_on_windows():
    assert run(IMPORTS, "win32", *LIBRARIES).splitlines()[-1] == str(len(LIBRARIES))


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_every_module_can_be_imported(platform):
    assert int(run(IMPORTS, platform).splitlines()[-1]) > 500


def test_the_page_of_platforms_has_the_table_of_the_code():
    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "platform_page.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.losses_table() in page, "run: python scripts/platform_page.py"


REMOVED = {  # from the standard library in Python 3.12 to 3.14
    *("aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils"),
    *("imghdr", "imp", "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes"),
    *("smtpd", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib", "pkg_resources"),
    *("ast.Num", "ast.Str", "ast.Bytes", "ast.NameConstant", "ast.Ellipsis", "pkgutil.find_loader"),
    *("pkgutil.get_loader", "asyncio.get_child_watcher", "asyncio.set_child_watcher"),
    *("asyncio.iscoroutinefunction", "locale.resetlocale", "unittest.makeSuite"),
    *("configparser.SafeConfigParser", "sqlite3.version", "importlib.find_loader"),
}


def test_sources_use_nothing_that_python_3_14_lacks():
    """Imports and attributes by name; a `return` in `finally` is a warning there."""
    uses = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [f"{node.value.id}.{node.attr}"]
            elif isinstance(node, ast.Try):
                final = [each for part in node.finalbody for each in ast.walk(part)]
                names = [ast.unparse(each) for each in final if isinstance(each, ast.Return)]
                uses += [f"{path.name}:{node.lineno}: {name}" for name in names]
            if isinstance(node, ast.Import | ast.ImportFrom):
                names += [name.split(".")[0] for name in names]
            hits = sorted(REMOVED.intersection(names))
            uses += [f"{path.name}:{node.lineno}: {name}" for name in hits]
    assert uses == []
