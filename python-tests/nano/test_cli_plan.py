"""What ``bigdl-nano-init`` decides to set, and where it finds libraries."""

import os
import shutil
import sys

import pytest

from bigdl.nano.cli import environment, libraries
from bigdl.nano.cli.environment import make_parser
from bigdl.nano.runtime import best_thread_count

IOMP, JEMALLOC, TCMALLOC = "/x/libiomp5.so", "/x/libjemalloc.so.2", "/x/libtcmalloc_minimal.so.4"


@pytest.fixture
def planned(monkeypatch):
    """Make a plan on a machine that has the given libraries."""

    def make(arguments="", environ=None, installed=(IOMP, JEMALLOC, TCMALLOC)):
        def find(names):
            matches = (path for path in installed for name in names if f"lib{name}.so" in path)
            return next(matches, None)

        monkeypatch.setattr(environment, "find_library", find)
        options = make_parser("test", "", "").parse_args(arguments.split())
        return environment.make_plan(options, environ or {})

    return make


@pytest.mark.linux("preloaded libraries")
@pytest.mark.parametrize(
    ("arguments", "preload"),
    [
        ("", [IOMP, JEMALLOC]),
        ("-j", [IOMP, JEMALLOC]),
        ("--enable-tcmalloc", [IOMP, TCMALLOC]),
        ("-c", [IOMP]),
        ("-t -j", [IOMP, JEMALLOC]),
        ("-o", [JEMALLOC]),
        ("-oc", []),
        ("-g", [IOMP]),
    ],
)
def test_options_choose_the_libraries(planned, arguments, preload):
    made = planned(arguments, {"ONEAPI_ROOT": "/nowhere"})
    assert made.preload == preload
    assert ("MALLOC_CONF" in made.values) is (JEMALLOC in preload)
    assert ("KMP_BLOCKTIME" in made.values) is (IOMP in preload)
    assert ("OMP_NUM_THREADS" in made.values) is ("-o" not in arguments)


def test_threads_are_the_usable_physical_cores_unless_a_number_is_given(planned):
    assert planned().values["OMP_NUM_THREADS"] == str(best_thread_count())
    assert planned("--cores 5").values["OMP_NUM_THREADS"] == "5"


def test_mkl_follows_openmp_where_it_has_a_count_of_its_own(planned):
    assert "MKL_NUM_THREADS" not in planned().values
    assert planned("-c -r 3", {"MKL_NUM_THREADS": "5"}).values["MKL_NUM_THREADS"] == "3"
    (note,) = planned("-c", {"MKL_NUM_THREADS": "99"}).notes
    assert note.startswith("MKL_NUM_THREADS=99 stays as you set it")


@pytest.mark.linux("preloaded libraries")
def test_threads_are_bound_only_when_asked_for(planned):
    assert planned("-c").values["KMP_AFFINITY"] == "granularity=fine,none"
    assert planned("-cp").values["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    gnu = planned("-cp", installed=()).values
    assert (gnu["OMP_PROC_BIND"], gnu["OMP_PLACES"]) == ("close", "cores")
    assert "OMP_PROC_BIND" not in planned("-c", installed=()).values


def test_sgx_has_variables_of_its_own(planned):
    values = planned("-s -r 3").values
    assert {name: values[name] for name in values if name.startswith("MKL") or "_S" in name} == {
        "MKL_DYNAMIC": "FALSE",
        "MKL_NUM_THREADS": "3",
        "OMP_SCHEDULE": "STATIC",
    }
    assert values["OMP_PROC_BIND"] == "close"


@pytest.mark.linux("preloaded libraries")
def test_what_is_missing_is_said_in_a_line_each(planned):
    made = planned(installed=())
    assert made.preload == []
    assert [note.partition(" was not found")[0] for note in made.notes] == ["libiomp5", "jemalloc"]
    (note,) = planned("-o -t", installed=()).notes
    assert note.startswith("tcmalloc was not found (apt install")


@pytest.mark.linux("the allocator of glibc")
def test_glibc_is_tuned_where_there_is_no_other_allocator(planned):
    tunables = planned("-o", installed=()).values["GLIBC_TUNABLES"].split(":")
    assert f"glibc.malloc.top_pad={64 << 20}" in tunables
    assert "GLIBC_TUNABLES" not in planned("-oc", installed=()).values
    assert "GLIBC_TUNABLES" not in planned("-o").values


@pytest.mark.linux("the allocator of glibc")
def test_tunables_of_the_user_win(planned):
    own = "glibc.malloc.top_pad=1:glibc.malloc.check=3"
    merged = planned("-o", {"GLIBC_TUNABLES": own}, installed=()).values["GLIBC_TUNABLES"]
    assert merged.startswith(f"{own}:glibc.malloc.mmap_threshold=")
    assert merged.count("top_pad") == 1


@pytest.mark.parametrize(
    ("own", "configured"),
    [("/mine/libjemalloc.so", True), ("/mine/libtcmalloc.so.4 /b.so", False)],
)
def test_no_second_allocator_is_preloaded(planned, own, configured):
    made = planned("-o", {"LD_PRELOAD": own})
    assert made.preload == []
    assert ("MALLOC_CONF" in made.values) is configured
    assert made.notes == [f"{own.split()[0]} stays the allocator, as LD_PRELOAD names it"]


@pytest.mark.linux("preloaded libraries")
def test_a_value_of_the_user_stays_unless_an_option_names_the_variable(planned):
    own = {"OMP_NUM_THREADS": "99", "KMP_AFFINITY": "disabled"}
    kept = planned("-c", own)
    assert not own.keys() & kept.values.keys()
    assert len(kept.notes) == 2
    forced = planned("-c -p -r 2", own)
    assert forced.values["OMP_NUM_THREADS"] == "2"
    assert forced.values["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    assert forced.notes == []


def test_oneapi_is_sourced_where_it_is(planned, tmp_path):
    (tmp_path / "setvars.sh").touch()
    assert planned("-g", {"ONEAPI_ROOT": str(tmp_path)}).scripts == [str(tmp_path / "setvars.sh")]
    (note,) = planned("-g", {"ONEAPI_ROOT": "/nowhere"}).notes
    assert note.startswith("/nowhere/setvars.sh was not found")


# --- libraries


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    return tmp_path


def test_a_library_of_the_environment_is_found(prefix):
    shutil.copy(os.path.realpath(sys.executable), prefix / "lib" / "libnever-there.so.1")
    assert libraries.find_library(("nor-this", "never-there")) == (
        prefix / "lib" / "libnever-there.so.1"
    )


@pytest.mark.parametrize("content", [b"", b"INPUT(libx.so)", b"\x7fELF\x01\x01\x01" + b"\0" * 40])
def test_a_file_that_this_processor_cannot_load_is_not_a_library(prefix, content):
    (prefix / "lib" / "libnever-there.so").write_bytes(content)
    assert libraries.find_library(("never-there",)) is None


@pytest.mark.linux("the linker's cache")
def test_a_library_of_the_system_is_found():
    found = libraries.find_library(("stdc++",))
    assert found is not None
    assert found.is_absolute()
    assert found.exists()
