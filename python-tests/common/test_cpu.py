import os
import subprocess
import sys

import pytest

from bigdl.common import cpu
from bigdl.common.cpu import Topology, thread_scope, topology
from bigdl.common.errors import UsageError

V2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def machine(tmp_path):
    """Write the system files of a fake machine, passed as path=text, and return its root."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def hyperthreaded(sockets, cores_per_socket):
    """System files where core k and core k + (number of physical cores) are siblings."""
    physical = sockets * cores_per_socket
    files = {}
    for core in range(2 * physical):
        about = f"sys/devices/system/cpu/cpu{core}/topology"
        first = core % physical
        files[f"{about}/physical_package_id"] = f"{first // cores_per_socket}\n"
        files[f"{about}/core_cpus_list"] = f"{first},{first + physical}\n"
    for socket in range(sockets):
        first = socket * cores_per_socket
        last = first + cores_per_socket - 1
        files[f"sys/devices/system/node/node{socket}/cpulist"] = (
            f"{first}-{last},{first + physical}-{last + physical}\n"
        )
    return files


# --- what may be used


def test_usable_cores_are_those_of_the_affinity_mask():
    core = min(os.sched_getaffinity(0))
    program = "from bigdl.common.cpu import *; print(usable_cores(), core_count())"
    seen = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}]); {program}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout.split("\n")[0] == f"[{core}] 1"


def test_no_control_group_means_no_quota(tmp_path):
    assert cpu.cpu_quota(tmp_path) is None
    assert cpu.core_count(tmp_path) == len(cpu.usable_cores())


def test_quota_of_v2_is_the_lowest_on_the_way_to_the_root(machine):
    root = machine(
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/kubepods/pod7/main\n",
            "sys/fs/cgroup/kubepods/cpu.max": "800000 100000\n",
            "sys/fs/cgroup/kubepods/pod7/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/kubepods/pod7/main/cpu.max": "max 100000\n",
        }
    )
    assert cpu.cpu_quota(root) == 1.5


def test_quota_of_v1_is_read_from_the_mount_of_the_cpu_controller(machine):
    root = machine(
        {
            "proc/self/mountinfo": (
                "30 24 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
                "31 30 0:27 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                "32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
            ),
            "proc/self/cgroup": "4:memory:/jobs\n3:cpu,cpuacct:/jobs/mine\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/mine/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/mine/cpu.cfs_period_us": "100000\n",
        }
    )
    assert cpu.cpu_quota(root) == 0.5


def test_quota_is_found_in_a_container_that_knows_its_group_by_the_name_on_the_host(machine):
    root = machine(
        {
            "proc/self/mountinfo": (
                "35 24 0:30 /docker/3f2a /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
            ),
            "proc/self/cgroup": "0::/docker/3f2a\n",
            "sys/fs/cgroup/cpu.max": "300000 100000\n",
        }
    )
    assert cpu.cpu_quota(root) == 3.0


def test_quota_is_found_when_the_own_group_lies_outside_of_what_is_mounted(machine):
    root = machine(
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/../elsewhere\n",
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
        }
    )
    assert cpu.cpu_quota(root) == 2.0


@pytest.mark.parametrize(("quota", "cores"), [(20000, 1), (199999, 1), (200000, 2), (9900000, 4)])
def test_core_count_rounds_the_quota_down_but_not_to_zero(machine, monkeypatch, quota, cores):
    monkeypatch.setattr(cpu, "usable_cores", lambda: [0, 1, 2, 3])
    root = machine(
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": f"{quota} 100000\n",
        }
    )
    assert cpu.core_count(root) == cores


# --- topology


def test_topology_finds_nodes_and_siblings(machine):
    actual = topology(machine(hyperthreaded(sockets=2, cores_per_socket=2)), usable=range(8))
    assert actual.numa_nodes == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert actual.cores == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_topology_shows_only_usable_cores(machine):
    root = machine(hyperthreaded(sockets=2, cores_per_socket=2))
    assert topology(root, usable=[4, 2, 6]) == Topology(
        numa_nodes=((2, 6), (4,)), cores=((4,), (2, 6))
    )


def test_topology_without_system_files_is_one_socket_without_hyperthreads(tmp_path):
    assert topology(tmp_path, usable=[0, 1]) == Topology(numa_nodes=((0, 1),), cores=((0,), (1,)))


def test_topology_of_this_machine_has_each_usable_core_once():
    actual = topology()
    for groups in (actual.numa_nodes, actual.cores):
        assert sorted(core for group in groups for core in group) == cpu.usable_cores()


def test_topology_keeps_each_core_once_when_files_contradict_each_other(machine):
    about = "sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
    root = machine({about.format(0): "0-1\n", about.format(1): "1-2\n", about.format(2): "1-2\n"})
    assert topology(root, usable=[0, 1, 2]).cores == ((0, 1), (2,))


def test_physical_count_counts_siblings_once():
    actual = Topology(numa_nodes=(), cores=((0, 4), (1, 5)))
    assert actual.physical_count([0, 4]) == 1
    assert actual.physical_count([4, 5]) == 2


# --- the split


def test_split_keeps_siblings_and_sockets_together(machine):
    actual = topology(machine(hyperthreaded(sockets=2, cores_per_socket=2)), usable=range(8))
    assert cpu.split_cores(2, actual) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert cpu.split_cores(3, actual) == [[0, 4], [1, 5], [2, 6, 3, 7]]


def test_split_separates_siblings_only_for_want_of_cores(machine):
    actual = topology(machine(hyperthreaded(sockets=1, cores_per_socket=2)), usable=range(4))
    assert cpu.split_cores(3, actual) == [[0], [2], [1, 3]]


@pytest.mark.parametrize("n", range(1, 9))
def test_split_is_disjoint_and_uses_every_core(machine, n):
    actual = topology(machine(hyperthreaded(sockets=2, cores_per_socket=2)), usable=range(8))
    shares = cpu.split_cores(n, actual)
    assert len(shares) == n
    assert sorted(core for share in shares for core in share) == list(range(8))


def test_more_processes_than_cores_share_them_in_turn():
    actual = Topology(numa_nodes=(), cores=((3,), (5,)))
    assert cpu.split_cores(5, actual) == [[3], [5], [3], [5], [3]]


def test_split_among_no_processes_is_refused():
    with pytest.raises(UsageError, match=r"number of processes .*, got 0"):
        cpu.split_cores(0)


# --- instruction sets


def test_isa_flags_of_x86_are_those_that_all_processors_have(machine):
    root = machine(
        {
            "proc/cpuinfo": (
                "processor\t: 0\nmodel name\t: A: B\nflags\t\t: fpu avx2 avx512f amx_tile\n\n"
                "processor\t: 1\nflags\t\t: fpu avx2 avx512f\nvmx flags\t: vnmi\n"
            )
        }
    )
    assert cpu.isa_flags(root) == {"fpu", "avx2", "avx512f"}


def test_isa_flags_of_arm_are_its_features(machine):
    root = machine({"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n"})
    assert cpu.isa_flags(root) == {"fp", "asimd", "bf16", "i8mm"}


def test_isa_flags_are_empty_without_cpuinfo(tmp_path):
    assert cpu.isa_flags(tmp_path) == frozenset()


# --- threads


def environment():
    return {name: os.environ.get(name) for name in cpu.THREAD_VARIABLES}


def test_thread_scope_holds_in_torch_and_for_children():
    import torch

    with thread_scope(3):
        assert torch.get_num_threads() == 3
        assert set(environment().values()) == {"3"}


def test_thread_scope_holds_in_blas():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    import numpy  # noqa: F401 - brings its OpenBLAS

    with thread_scope(1):
        pools = threadpoolctl.threadpool_info()
        assert pools
        assert {pool["num_threads"] for pool in pools} == {1}


def test_thread_scopes_nest_and_restore_what_was(monkeypatch):
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = torch.get_num_threads(), environment()
    with thread_scope(3):
        with thread_scope(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        assert os.environ["MKL_NUM_THREADS"] == "3"
    assert (torch.get_num_threads(), environment()) == before
    assert "MKL_NUM_THREADS" not in os.environ


def test_thread_scope_restores_after_an_exception():
    import torch

    before = torch.get_num_threads(), environment()
    with pytest.raises(KeyError), thread_scope(3):
        raise KeyError
    assert (torch.get_num_threads(), environment()) == before


@pytest.mark.slow_cases("outside1-None")
@pytest.mark.parametrize(("outside", "expected"), [({"OMP_NUM_THREADS": "3"}, 3), ({}, None)])
def test_torch_that_is_imported_inside_a_scope_is_not_bound_by_it_afterwards(outside, expected):
    if expected is None:
        expected = min(topology().physical_count(cpu.usable_cores()), cpu.core_count())
    program = (
        "from bigdl.common.cpu import thread_scope\n"
        "with thread_scope(1):\n"
        "    import torch\n"
        "    assert torch.get_num_threads() == 1\n"
        "print(torch.get_num_threads())\n"
    )
    clean = {key: value for key, value in os.environ.items() if key not in cpu.THREAD_VARIABLES}
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env=clean | {"PYTHONPATH": os.pathsep.join(sys.path)} | outside,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(seen.stdout) == expected


def test_thread_scope_does_not_import_torch():
    program = (
        "import sys; from bigdl.common.cpu import thread_scope\n"
        "with thread_scope(1): pass\n"
        "print('torch' in sys.modules)"
    )
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout == "False\n"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", None, True])
def test_thread_scope_refuses_what_is_no_count(wrong):
    with pytest.raises(UsageError, match="num_threads"):
        thread_scope(wrong)
