"""``bigdl-nano-init``, ``bigdl-nano-unset-env`` and ``bigdl-nano-run``, in real shells."""

import ctypes.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bigdl.nano.cli
from bigdl.nano.runtime import best_thread_count

SCRIPTS = ["bigdl-nano-init", "bigdl-nano-unset-env"]
OURS = ("BIGDL_", "GLIBC_TUNABLES", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "OMP_", "TF_")

bash_and_zsh = pytest.mark.parametrize(
    "shell",
    [
        ["bash", "-euc"],
        pytest.param(
            ["zsh", "-feuc"],
            marks=pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh"),
        ),
    ],
    ids=["bash", "zsh"],
)


@pytest.fixture(scope="module")
def bin_directory(tmp_path_factory) -> Path:
    """Return a directory with the commands and a Python, as after an installation."""
    directory = tmp_path_factory.mktemp("bin")
    home = Path(*bigdl.nano.cli.__path__)
    for name in SCRIPTS:
        shutil.copy(home / name, directory)
    python = shlex.quote(sys.executable)
    for name, start in {"python": "", "bigdl-nano-run": "-m bigdl.nano.cli.run"}.items():
        (directory / name).write_text(f'#!/bin/sh\nexec {python} {start} "$@"\n')
        (directory / name).chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> Path:
    """Return a prefix with empty libraries of the right names, which can be preloaded."""
    prefix = tmp_path_factory.mktemp("prefix")
    (prefix / "lib").mkdir()
    for name in ("libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libiomp5.so"):
        source = next(Path("/").glob(f"lib*/**/{ctypes.util.find_library('m')}"))
        shutil.copy(source, prefix / "lib" / name)
    return prefix


@pytest.fixture
def run(bin_directory, tmp_path):
    """Run a command line where the commands are installed and nothing of ours is set."""

    def start(command, *, check=True, **environ):
        own = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
        own["PATH"] = f"{bin_directory}{os.pathsep}{own['PATH']}"
        own["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        result = subprocess.run(
            command, env=own | environ, cwd=tmp_path, capture_output=True, text=True
        )
        assert not check or result.returncode == 0, result.stderr
        return result

    return start


def variables(text):
    """Variables in the output of ``env`` that the commands may have set, our record left out."""
    pairs = (line.partition("=") for line in text.splitlines())
    kept = (pair for pair in pairs if pair[0].startswith(OURS))
    return {name: value for name, _, value in kept if name != "BIGDL_NANO_STATE"}


def names(preload):
    return [Path(path).name for path in preload.split(":")]


# --- init


@bash_and_zsh
def test_sourcing_sets_the_environment(run, libraries, shell):
    result = run([*shell, "source bigdl-nano-init && env"], CONDA_PREFIX=str(libraries))
    found = variables(result.stdout)
    assert names(found.pop("LD_PRELOAD")) == ["libiomp5.so", "libjemalloc.so.2"]
    assert found == {
        "KMP_AFFINITY": "granularity=fine,none",
        "KMP_BLOCKTIME": "1",
        "MALLOC_CONF": "oversize_threshold:1,background_thread:false,metadata_thp:always,"
        "dirty_decay_ms:-1,muzzy_decay_ms:-1",
        "OMP_NUM_THREADS": str(best_thread_count()),
        "TF_ENABLE_ONEDNN_OPTS": "1",
    }
    assert result.stderr == ""


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_evaluating_what_is_printed_is_the_same(run, shell):
    sourced = run(["bash", "-c", "source bigdl-nano-init -c -r 3; env"])
    evaluated = run([shell, "-euc", 'eval "$(bigdl-nano-init -c -r 3)"; env'])
    assert variables(evaluated.stdout) == variables(sourced.stdout)
    assert variables(evaluated.stdout)["OMP_NUM_THREADS"] == "3"


@bash_and_zsh
def test_sourcing_again_changes_nothing(run, libraries, shell):
    once = run([*shell, "source bigdl-nano-init; env"], CONDA_PREFIX=str(libraries))
    twice = run(
        [*shell, "source bigdl-nano-init; source bigdl-nano-init; env"],
        CONDA_PREFIX=str(libraries),
    )
    assert variables(twice.stdout) == variables(once.stdout)


def test_sourcing_with_other_options_replaces_the_first_ones(run, libraries):
    command = "source bigdl-nano-init -p; source bigdl-nano-init -o -t; env"
    found = variables(run(["bash", "-c", command], CONDA_PREFIX=str(libraries)).stdout)
    assert names(found.pop("LD_PRELOAD")) == ["libtcmalloc_minimal.so.4"]
    assert found == {"TF_ENABLE_ONEDNN_OPTS": "1"}


@bash_and_zsh
def test_sourcing_leaves_no_variable_of_its_own(run, shell):
    listed = run([*shell, "source bigdl-nano-init -c; typeset | cut -d= -f1"]).stdout
    assert "BIGDL_NANO_STATE" in listed
    assert "_bigdl" not in listed


def test_entries_of_ld_preload_stay_and_come_first(run, libraries):
    own = str(libraries / "lib" / "libiomp5.so")
    command = "source bigdl-nano-init -o; env; source bigdl-nano-unset-env; env"
    found = run(["bash", "-c", command], CONDA_PREFIX=str(libraries), LD_PRELOAD=own).stdout
    preloads = [line for line in found.splitlines() if line.startswith("LD_PRELOAD=")]
    first, second = (line.removeprefix("LD_PRELOAD=") for line in preloads)
    assert names(first) == ["libiomp5.so", "libjemalloc.so.2"]
    assert second == own


def test_what_the_user_has_set_stays_and_is_said(run):
    command = ["bash", "-c", "source bigdl-nano-init -c; env"]
    result = run(command, OMP_NUM_THREADS="31", MKL_NUM_THREADS="5")
    found = variables(result.stdout)
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("31", "5")
    assert "OMP_NUM_THREADS=31 stays as you set it" in result.stderr


def test_a_number_that_is_asked_for_is_set_whatever_was(run):
    command = "source bigdl-nano-init -c -r 3; env; source bigdl-nano-unset-env; env"
    seen = run(["bash", "-c", command], OMP_NUM_THREADS="31").stdout.splitlines()
    lines = [line for line in seen if line.startswith("OMP_NUM_THREADS=")]
    assert lines == ["OMP_NUM_THREADS=3", "OMP_NUM_THREADS=31"]


def test_arguments_of_the_script_that_sources_are_not_options(run, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text('source bigdl-nano-init\necho "$OMP_NUM_THREADS $*"\n')
    result = run(["bash", "-eu", str(script), "--epochs", "3"])
    assert result.stdout == f"{best_thread_count()} --epochs 3\n"
    assert "arguments of the sourcing script were ignored" in result.stderr


def test_a_modules_name_in_the_working_directory_does_no_harm(run, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('wrong module')")
    run(["bash", "-euc", "source bigdl-nano-init -c; source bigdl-nano-unset-env"])


@pytest.mark.parametrize("option", ["-h", "-d"])
def test_showing_sets_nothing(run, option):
    result = run(["bash", "-euc", f"source bigdl-nano-init -c -r 3 {option}; env"])
    assert variables(result.stdout) == {}
    assert {"-h": "--disable-openmp", "-d": "OMP_NUM_THREADS=3"}[option] in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-r", "0"], "a number of at least 1, not '0'"),
        (["-r"], "expected one argument"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
@pytest.mark.parametrize("command", ["bigdl-nano-init", "bigdl-nano-run"])
def test_wrong_options_are_refused_in_one_line(run, command, arguments, message):
    result = run([command, *arguments], check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{command}: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_python_without_bigdl_fails_without_ending_the_shell(run, tmp_path):
    shutil.copy(Path(*bigdl.nano.cli.__path__, "bigdl-nano-init"), tmp_path)
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    result = run(["bash", "-c", f"source {tmp_path}/bigdl-nano-init || echo alive; env"])
    assert result.stdout.startswith("alive\n")
    assert variables(result.stdout) == {}


def test_the_two_scripts_differ_in_names_only():
    home = Path(*bigdl.nano.cli.__path__)
    init, unset = ((home / name).read_text().splitlines()[2:] for name in SCRIPTS)
    renamed = [
        line.replace("bigdl-nano-init", "bigdl-nano-unset-env").replace("cli.init", "cli.unset_env")
        for line in init
    ]
    assert [line.split() for line in renamed] == [line.split() for line in unset]


# --- unset-env


@bash_and_zsh
def test_unset_env_brings_back_what_was(run, libraries, shell):
    own = {
        "OMP_NUM_THREADS": "31",
        "MALLOC_CONF": "narenas:2, it's mine",
        "LD_PRELOAD": str(libraries / "lib" / "libjemalloc.so.2"),
    }
    command = "source bigdl-nano-init -p -r 2; source bigdl-nano-unset-env; env"
    result = run([*shell, command], CONDA_PREFIX=str(libraries), **own)
    assert variables(result.stdout) == own
    assert "BIGDL_NANO_STATE" not in result.stdout


def test_unset_env_keeps_what_the_user_set_in_between(run, libraries):
    command = (
        "source bigdl-nano-init; export OMP_NUM_THREADS=9 "
        f'LD_PRELOAD="$LD_PRELOAD:{libraries}/lib/libtcmalloc_minimal.so.4"; '
        "source bigdl-nano-unset-env; env"
    )
    found = variables(run(["bash", "-c", command], CONDA_PREFIX=str(libraries)).stdout)
    assert names(found.pop("LD_PRELOAD")) == ["libtcmalloc_minimal.so.4"]
    assert found == {"OMP_NUM_THREADS": "9"}


@pytest.mark.parametrize("state", [None, "", "{}", "nonsense", '{"values": {"A": 1}}', "[]"])
def test_unset_env_without_an_init_does_nothing(run, state):
    environ = {} if state is None else {"BIGDL_NANO_STATE": state}
    result = run(["bash", "-euc", "source bigdl-nano-unset-env; env"], **environ)
    assert variables(result.stdout) == {}
    assert ("has set nothing in this shell" in result.stderr) is (state is None)


# --- run


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("import os, sys\nprint(sys.argv, os.environ.get('OMP_NUM_THREADS'))\n")
    return path


def test_run_gives_a_script_its_arguments_and_the_environment(run, script):
    result = run(["bigdl-nano-run", "-c", "-r", "3", script.name, "-r", "x y", "--help"])
    assert result.stdout == "['program.py', '-r', 'x y', '--help'] 3\n"


def test_run_starts_modules_and_commands(run, script):
    assert run(["bigdl-nano-run", "-cr3", "-m", "program", "a"]).stdout.endswith("'a'] 3\n")
    assert run(["bigdl-nano-run", "-c", "--", "printf", "%s", "-c"]).stdout == "-c"


def test_torch_has_the_threads_that_were_asked_for(run, tmp_path):
    (tmp_path / "count.py").write_text("import torch; print(torch.get_num_threads())")
    assert run(["bigdl-nano-run", "-r", "1", "count.py"]).stdout == "1\n"


def test_run_becomes_the_program(run, tmp_path, bin_directory):
    (tmp_path / "fails.py").write_text("import sys; sys.exit(7)")
    assert run(["bigdl-nano-run", "-c", "fails.py"], check=False).returncode == 7
    (tmp_path / "waits.py").write_text("import os; print(os.getpid(), flush=True); input()")
    program = subprocess.Popen(
        [sys.executable, "-m", "bigdl.nano.cli.run", "-c", str(tmp_path / "waits.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with program:
        assert int(program.stdout.readline()) == program.pid
        program.send_signal(signal.SIGTERM)
    assert program.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no program to run"),
        (["-m"], "there is no program to run"),
        (["nowhere"], "nowhere is neither a Python program nor a command on PATH"),
    ],
)
def test_nothing_to_run_is_said_in_one_line(run, arguments, message):
    result = run(["bigdl-nano-run", *arguments], check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_run_shows_values_and_runs_nothing(run, script):
    result = run(["bigdl-nano-run", "-c", "-r", "3", "-d", script.name])
    assert result.stdout == ""
    assert "OMP_NUM_THREADS=3\n" in result.stderr
