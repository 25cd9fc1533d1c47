"""Test the conversion of arguments to Spark's configuration in each mode, without starting any."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest
from refusals import refused

from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.dllib import nncontext
from bigdl.orca import arguments, init_orca_context
from bigdl.orca.cluster import (
    environment,
    kubernetes,
    launch,
    spark,
    standalone,
    submit,
    submit_main,
    yarn,
)
from bigdl.orca.cluster.environment import environment_hash, packed_environment, zip_modules
from bigdl.orca.cluster.submit import (
    ContextRequest,
    Machine,
    check_reachable,
    kubernetes_address,
    resource_managers,
    standalone_masters,
    submission,
)

MODES = (
    "yarn",
    "yarn-client",
    "yarn-cluster",
    "k8s",
    "k8s-client",
    "k8s-cluster",
    "standalone",
)
# Required arguments of each family.
NEEDED = {
    "yarn": {},
    "k8s": {"master": "k8s://https://api:6443", "container_image": "bigdl:3"},
    "standalone": {"master": "spark://boss:7077"},
}
MACHINE = Machine(
    environ={"HADOOP_CONF_DIR": "/etc/hadoop"},
    python="/opt/env/bin/python",
    address="10.0.0.5",
    program=("train.py", "--epochs", "3 4"),
    spark_submit="/opt/spark/bin/spark-submit",
    environment_archive="/cache/env.tar.gz",
)


def made(mode, machine=MACHINE, conf=None, **options):
    needed = {**NEEDED[submit.family(mode)], **options}
    request = ContextRequest(
        mode, cores=3, memory="5g", num_nodes=4, conf=conf or {}, options=needed
    )
    return submission(request, machine)


def conf_of(submission):
    """Return the properties in the command of a submission."""
    command = submission.command
    pairs = [b for a, b in itertools.pairwise(command) if a == "--conf"]
    return dict(pair.split("=", 1) for pair in pairs)


@pytest.fixture
def no_context(monkeypatch):
    monkeypatch.setattr(spark, "active_context", lambda: None)
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)


@pytest.fixture
def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]  # bound, but not listening


# The configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_asks_for_the_executors_of_its_arguments(mode):
    properties = made(mode).properties
    assert properties["spark.executor.instances"] == "4"
    assert properties["spark.executor.cores"] == "3"
    assert properties["spark.executor.memory"] == "5g"
    assert (properties["spark.driver.cores"], properties["spark.driver.memory"]) == ("4", "2g")
    assert properties["spark.dynamicAllocation.enabled"] == "false"
    assert properties["spark.scheduler.minRegisteredResourcesRatio"] == "1.0"
    # a container's folder may be too long for a socket path
    assert not any("unix.domain.socket" in name for name in properties)
    deploy = "cluster" if mode.endswith("-cluster") else "client"
    assert properties["spark.submit.deployMode"] == deploy


@pytest.mark.parametrize("mode", MODES)
def test_the_users_conf_wins_in_every_mode(mode):
    user_conf = {"spark.executor.memory": "9g", "spark.app.name": "mine", "a": "b=c"}
    submission = made(mode, conf=user_conf)
    assert submission.properties.items() >= user_conf.items()
    if submission.command:
        assert conf_of(submission).items() >= user_conf.items()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("option", "value", "key", "expected"),
    [
        ("driver_cores", 7, "spark.driver.cores", "7"),
        ("driver_memory", "8g", "spark.driver.memory", "8g"),
        ("extra_executor_memory_for_ray", "3g", "spark.executor.memoryOverhead", "3g"),
        ("jars", "a.jar, b.jar", "spark.jars", "a.jar,b.jar"),
        ("extra_python_lib", "x.py,y.zip", "spark.submit.pyFiles", "x.py,y.zip"),
    ],
)
def test_options_of_every_family(mode, option, value, key, expected):
    assert key not in made(mode).properties or option.startswith("driver")
    assert made(mode, **{option: value}).properties[key] == expected


@pytest.mark.parametrize("mode", MODES)
def test_every_option_that_a_family_takes_changes_something(mode):
    values = {
        "additional_archive": "/data/more.zip#more",
        "container_image": "other:1",
        "driver_cores": 9,
        "driver_memory": "9g",
        "extra_executor_memory_for_ray": "1g",
        "extra_python_lib": "lib.py",
        "hadoop_conf": "/other/conf",
        "hadoop_user_name": "ann",
        "jars": "a.jar",
        "master": "k8s://https://other" if mode.startswith("k8s") else "spark://other:1",
        "penv_archive": "/envs/mine.tar.gz",
        "python_location": "/mine/python",
        "spark_yarn_archive": "hdfs:///spark.zip",
    }
    family = submit.family(mode)
    # Read earlier: packing of the environment, and the start of a local cluster.
    taken = {n for n, (families, _) in arguments.CLUSTER_OPTIONS.items() if family in families}
    for name in taken - {"conda_name", "enable_numa_binding"}:
        assert made(mode, **{name: values[name]}) != made(mode), name


@pytest.mark.parametrize("mode", ["yarn", "yarn-client", "yarn-cluster"])
def test_yarn_ships_the_environment_and_its_python(mode):
    submission = made(
        mode, additional_archive="/data/more.zip#more", spark_yarn_archive="hdfs:///s.zip"
    )
    archives = submission.properties["spark.yarn.dist.archives"].split(",")
    assert archives == ["/cache/env.tar.gz#python_env", "/data/more.zip#more"]
    assert submission.properties["spark.yarn.archive"] == "hdfs:///s.zip"
    assert submission.properties["spark.master"] == "yarn"
    assert submission.environment["PYSPARK_PYTHON"] == "python_env/bin/python"
    assert submission.environment["HADOOP_CONF_DIR"] == "/etc/hadoop"
    archive = made(mode, penv_archive="hdfs:///e.tar.gz").properties["spark.yarn.dist.archives"]
    assert archive == "hdfs:///e.tar.gz#python_env"
    assert ContextRequest(mode).packs_environment
    assert not ContextRequest(mode, options={"penv_archive": "e"}).packs_environment
    assert not ContextRequest(mode, conf={"spark.pyspark.python": "/p"}).packs_environment


def test_yarn_takes_the_user_from_the_argument_then_the_environment():
    alice = {"HADOOP_CONF_DIR": "/etc/hadoop", "HADOOP_USER_NAME": "alice"}
    named = Machine(environ=alice)
    assert made("yarn").environment["HADOOP_USER_NAME"] == "root"
    assert made("yarn", named).environment["HADOOP_USER_NAME"] == "alice"
    assert made("yarn", named, hadoop_user_name="bob").environment["HADOOP_USER_NAME"] == "bob"
    conf = made("yarn", named, hadoop_conf="/mine").environment
    assert conf["HADOOP_CONF_DIR"] == conf["YARN_CONF_DIR"] == "/mine"


@pytest.mark.parametrize(
    ("mode", "marker"),
    [
        ("yarn-cluster", "spark.yarn.appMasterEnv.OnAppMaster"),
        ("k8s-cluster", "spark.kubernetes.driverEnv.onDriver"),
    ],
)
def test_a_cluster_mode_runs_the_program_again(mode, marker):
    submission = made(mode)
    master = NEEDED[submit.family(mode)].get("master", "yarn")
    head = ("/opt/spark/bin/spark-submit", "--master", master, "--deploy-mode", "cluster")
    assert submission.command[:5] == head
    script = os.path.abspath("train.py")
    prefix = "local://" if mode == "k8s-cluster" else ""
    assert submission.command[-3:] == (prefix + script, "--epochs", "3 4")
    assert conf_of(submission)[marker] == "True"
    name = marker.rpartition(".")[2]
    assert submit.is_inside(mode, {name: "True"})
    assert not submit.is_inside(mode, {})
    assert not submit.is_inside(mode.replace("cluster", "client"), {name: "True"})


def test_yarn_cluster_gives_its_python_and_modules_to_the_driver():
    machine = Machine(environ=MACHINE.environ, program=("/a/t.py",), modules="/tmp/m.zip")
    submission = made("yarn-cluster", machine, penv_archive="/e.tar.gz", extra_python_lib="x.py")
    assert conf_of(submission)["spark.submit.pyFiles"] == "x.py,/tmp/m.zip"
    assert conf_of(submission)["spark.yarn.appMasterEnv.PYSPARK_PYTHON"] == "python_env/bin/python"
    assert conf_of(submission)["spark.pyspark.python"] == "python_env/bin/python"


@pytest.mark.parametrize("program", [("",), ("-c",), ("/env/bin/ipykernel_launcher",)])
def test_a_cluster_mode_needs_a_file_to_run_again(program):
    machine = Machine(environ=MACHINE.environ, program=program)
    with refused("unsupported", '"yarn-client"'):
        made("yarn-cluster", machine)


def test_a_script_that_the_cluster_can_upload_is_not_expected_in_the_image():
    conf = {"spark.kubernetes.file.upload.path": "s3a://bucket"}
    assert made("k8s-cluster", conf=conf).command[-3] == os.path.abspath("train.py")
    machine = Machine(environ={}, program=("local:///opt/t.py",))
    assert made("k8s-cluster", machine).command[-1] == "local:///opt/t.py"


def test_pods_satisfy_the_restricted_standard_unless_a_template_says_otherwise():
    name = "spark.kubernetes.{}.podTemplateFile".format
    for mode, roles in (("k8s-client", ["executor"]), ("k8s-cluster", ["driver", "executor"])):
        properties = made(mode).properties
        assert [role for role in ("driver", "executor") if name(role) in properties] == roles
        for role in roles:
            assert "runAsNonRoot: true" in Path(properties[name(role)]).read_text()
    mine = made("k8s-cluster", conf={name("executor"): "/code/pod.yaml"}).properties
    assert mine[name("executor")] == "/code/pod.yaml"
    administrators = Machine(environ={}, defaults=frozenset({name("executor")}))
    assert name("executor") not in made("k8s-client", administrators).properties


def test_names_of_sparks_own_configuration_are_read(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert launch.default_properties() == frozenset()
    lines = ["# of the site", "", "spark.a  1", "  spark.b=2", "spark.c:3"]
    (tmp_path / "spark-defaults.conf").write_text("\n".join(lines))
    assert launch.default_properties() >= {"spark.a", "spark.b", "spark.c"}


def test_an_image_of_root_is_named_with_what_to_do():
    waiting = {
        "name": "orca-exec-1",
        "phase": "Pending",
        "lost": False,
        "waiting": "CreateContainerConfigError",
        "image": "mine:1",
        "message": "container has runAsNonRoot and image will run as root",
    }
    reason = kubernetes.start_problem(waiting, is_late=False)
    assert "of the image mine:1 (container has runAsNonRoot and image will run as root)" in reason
    assert "or runAsUser in a pod template" in reason
    assert "template" not in kubernetes.start_problem({**waiting, "message": "no secret"}, False)


def test_kubernetes_runs_the_python_of_the_image_or_of_the_archive():
    submission = made("k8s-client")
    assert submission.properties["spark.kubernetes.container.image"] == "bigdl:3"
    assert submission.properties["spark.driver.host"] == "10.0.0.5"
    assert submission.environment["PYSPARK_PYTHON"] == "python3"
    assert made("k8s", python_location="/p/python").environment["PYSPARK_PYTHON"] == "/p/python"
    packed = made("k8s-cluster", penv_archive="local:///envs/e.tar.gz")
    assert conf_of(packed)["spark.archives"] == "local:///envs/e.tar.gz#python_env"
    assert conf_of(packed)["spark.pyspark.python"] == "./python_env/bin/python"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": None}, ("argument-value", 'master="k8s://https://host:port"')),
        ({"master": "https://api"}, ("argument-value", "'https://api'")),
        ({"container_image": None}, ("argument-missing", "container_image")),
    ],
)
def test_kubernetes_says_what_it_cannot_do_without(options, message):
    with refused(*message):
        made("k8s-client", **options)


def test_executors_of_a_cluster_of_ours_keep_temporary_files_in_its_folder():
    name, option = "spark.executor.extraJavaOptions", '"-Djava.io.tmpdir=/a b"'
    assert launch.executor_temporary({}, "/a b") == {name: option}
    assert launch.executor_temporary({name: "-Xss2m"}, "/a b") == {name: f"{option} -Xss2m"}
    assert launch.executor_temporary({name: "-Djava.io.tmpdir=/mine"}, "/a b") == {}


def test_standalone_limits_the_cores_of_the_application():
    submission = made("standalone")
    assert submission.properties["spark.cores.max"] == "12"
    assert submission.properties["spark.master"] == "spark://boss:7077"
    assert submission.environment["PYSPARK_PYTHON"] == "/opt/env/bin/python"


# Arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("yarn", {"driver_cores": 0}, ("argument-value", "driver_cores")),
        ("k8s", {"driver_memory": "2"}, ("argument-value", "driver_memory")),
        ("yarn", {"hadoop_conf": "/no/such"}, ("path-missing", "hadoop_conf", "'/no/such'")),
        ("yarn", {"penv_archive": "/no/e.tgz"}, ("path-missing", "penv_archive")),
        ("standalone", {"enable_numa_binding": 1}, ("argument-type", "enable_numa_binding")),
        ("k8s", {"container_image": 3}, ("argument-type", "container_image", "3")),
        (
            "yarn",
            {"extra_executor_memory_for_ray": "x"},
            ("argument-value", "extra_executor_memory_for_ray"),
        ),
    ],
)
def test_a_wrong_option_is_one_clear_sentence(no_context, mode, options, message):
    with refused(*message) as error:
        init_orca_context(mode, **options)
    assert "\n" not in str(error.value)


def test_lists_of_files_may_be_lists():
    options = arguments.check_cluster_options(
        "yarn", {"jars": ["a.jar", "b.jar"], "extra_python_lib": ("x.py",), "master": "ignored"}
    )
    assert options == {"jars": "a.jar,b.jar", "extra_python_lib": "x.py"}


# What cannot be reached --------------------------------------------------------------------------


def test_yarn_without_hadoops_files_says_so(no_context, tmp_path, caplog):
    with pytest.raises(UsageError, match="set HADOOP_CONF_DIR, or pass hadoop_conf"):
        init_orca_context("yarn-client", container_image="x")
    assert "container_image: no effect" in caplog.text
    assert "cores is not set: this program uses 2 cores of each node" in caplog.text
    with pytest.raises(UsageError, match=r"Cannot read yarn-site\.xml in"):
        init_orca_context("yarn-client", cores=2, hadoop_conf=str(tmp_path))


@pytest.mark.parametrize("mode", ["yarn-client", "yarn-cluster"])
def test_an_absent_resource_manager_is_named_at_once(
    no_context, tmp_path, closed_port, mode, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    write_yarn(tmp_path, {"yarn.resourcemanager.address": f"127.0.0.1:{closed_port}"})
    expected = rf"resource manager of YARN cannot be reached at 127\.0\.0\.1:{closed_port} \(Conn"
    with pytest.raises(UsageError, match=expected):
        init_orca_context(mode, cores=2, hadoop_conf=str(tmp_path))


@pytest.mark.parametrize("mode", ["k8s-client", "k8s-cluster"])
def test_an_absent_api_server_is_named_at_once(no_context, closed_port, mode, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with refused("cluster-unreachable", "127"):
        init_orca_context(
            mode, cores=2, master=f"k8s://https://127.0.0.1:{closed_port}", container_image="i"
        )


def test_an_absent_standalone_master_is_named_at_once(no_context, closed_port):
    with pytest.raises(UsageError, match="master of the standalone cluster cannot be reached"):
        init_orca_context("standalone", cores=2, master=f"spark://127.0.0.1:{closed_port}")
    with refused("argument-value", '"spark://host:port"', "'boss:7077'"):
        init_orca_context("standalone", cores=2, master="boss:7077")


def test_one_of_several_addresses_is_enough(closed_port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = server.getsockname()[:2]
        assert check_reachable([("127.0.0.1", closed_port), there], "It", "wait") == there


def write_yarn(directory, properties):
    entries = "".join(
        f"<property><name>{k}</name><value>{v}</value></property>" for k, v in properties.items()
    )
    (directory / "yarn-site.xml").write_text(f"<configuration>{entries}</configuration>")


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"yarn.resourcemanager.hostname": "rm"}, [("rm", 8032)]),
        ({"yarn.resourcemanager.address": "rm:9"}, [("rm", 9)]),
        (
            {
                "yarn.resourcemanager.ha.rm-ids": "a, b",
                "yarn.resourcemanager.hostname.a": "one",
                "yarn.resourcemanager.address.b": "two:1",
            },
            [("one", 8032), ("two", 1)],
        ),
        (
            {
                "yarn.resourcemanager.hostname": "rm",
                "yarn.resourcemanager.address": "${yarn.resourcemanager.hostname}:8050",
            },
            [("rm", 8050)],
        ),
        ({}, [("0.0.0.0", 8032)]),
    ],
)
def test_resource_managers_are_read_from_hadoops_file(tmp_path, properties, expected):
    write_yarn(tmp_path, properties)
    assert resource_managers(str(tmp_path)) == expected


def test_addresses_of_masters():
    assert kubernetes_address("k8s://https://api:6443") == ("api", 6443)
    assert kubernetes_address("k8s://api") == ("api", 443)
    assert kubernetes_address("k8s://http://api") == ("api", 80)
    assert kubernetes_address("k8s://https://[::1]:1") == ("::1", 1)
    assert standalone_masters("spark://a:1,b") == [("a", 1), ("b", 7077)]
    with pytest.raises(UsageError, match="must be of the form"):
        kubernetes_address("k8s://https://api:port")


# The environment ---------------------------------------------------------------------------------


@pytest.fixture
def venv(tmp_path):
    root = tmp_path / "venv"
    site = root / "lib" / "python3.11" / "site-packages"
    for package in ("one-1.dist-info", "two-2.dist-info"):
        (site / package).mkdir(parents=True)
        (site / package / "RECORD").write_text(package)
    (root / "pyvenv.cfg").write_text("home = /usr/bin")
    return root


def packer(name, packed):
    module = types.ModuleType(name)

    def pack(prefix, output, format, **options):
        packed.append((prefix, options))
        with tarfile.open(output, "w:gz"):
            pass

    module.pack = pack
    return module


def test_an_environment_is_packed_once_until_it_changes(venv, tmp_path, monkeypatch):
    packed = []
    monkeypatch.setitem(sys.modules, "venv_pack", packer("venv_pack", packed))
    cache = tmp_path / "cache"
    first = packed_environment(str(venv), str(cache))
    assert packed_environment(str(venv), str(cache)) == first
    assert packed == [(str(venv), {})]
    (venv / "lib/python3.11/site-packages/three-3.dist-info").mkdir()
    (venv / "lib/python3.11/site-packages/three-3.dist-info/RECORD").write_text("")
    os.utime(first, (0, 0))
    second = packed_environment(str(venv), str(cache))
    assert second != first
    assert [each.name for each in cache.iterdir()] == [
        os.path.basename(second)
    ]  # the old one was removed
    (venv / "conda-meta").mkdir()
    (venv / "conda-meta" / "python-3.11.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "conda_pack", packer("conda_pack", packed))
    packed_environment(str(venv), str(cache))
    assert packed[-1] == (str(venv), {"ignore_editable_packages": True})


def test_a_hash_sees_what_is_installed_again(venv):
    before = environment_hash(venv)
    assert environment_hash(venv) == before
    record = venv / "lib/python3.11/site-packages/one-1.dist-info/RECORD"
    os.utime(record, (1, 1))
    assert environment_hash(venv) != before


def test_a_packer_that_is_missing_or_fails_says_what_to_do(venv, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "venv_pack", None)
    with pytest.raises(MissingExtraError, match="run: pip install venv-pack") as error:
        packed_environment(str(venv), str(tmp_path / "cache"))
    assert "\n" not in str(error.value)
    broken = types.ModuleType("venv_pack")
    broken.pack = lambda **options: 1 / 0
    monkeypatch.setitem(sys.modules, "venv_pack", broken)
    with pytest.raises(UsageError, match=r"venv-pack cannot pack .*division by zero"):
        packed_environment(str(venv), str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []
    with refused("cluster-config"):
        packed_environment(str(tmp_path), str(tmp_path / "cache"))


def test_a_conda_environment_is_found_by_its_name(tmp_path, monkeypatch):
    for name in ("envs/one", "envs/two"):
        (tmp_path / name / "conda-meta").mkdir(parents=True)
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "envs/one"))
    assert environment.conda_prefix("two") == str(tmp_path / "envs/two")
    assert environment.conda_prefix("one") == str(tmp_path / "envs/one")
    assert environment.conda_prefix(None) is None
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    assert environment.conda_prefix("two") == str(tmp_path / "envs/two")
    with refused("argument-value", "conda_name='three'"):
        environment.conda_prefix("three")


@pytest.mark.slow
def test_modules_beside_the_program_and_imported_ones_are_zipped(tmp_path, monkeypatch):
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    for file, text in {
        "beside/train.py": "",
        "beside/helper.py": "value = 1",
        "beside/package/__init__.py": "",
        "beside/package/inner/deep.py": "value = 2",
        "beside/data/big.py": "",  # not a package, but another folder
        "beside/table.csv": "1",
        "elsewhere/used_space_xyz/part.py": "value = 3",
        "elsewhere/unused_xyz.py": "",
    }.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(beside / "train.py"), raising=False
    )
    import used_space_xyz.part as part

    assert part.value == 3
    files = [tmp_path / "one.zip", tmp_path / "two.zip"]
    for file in files:
        assert zip_modules(file, [str(beside), str(elsewhere)])
    assert files[0].read_bytes() == files[1].read_bytes()
    names = {n for n in zipfile.ZipFile(files[0]).namelist() if not n.endswith("/")}
    assert names == {
        "train.py",
        "helper.py",
        "package/__init__.py",
        "package/inner/deep.py",
        "used_space_xyz/part.py",
    }
    program = "import helper, package.inner.deep, used_space_xyz.part as p; print(p.value)"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(files[0])}, capture_output=True, check=True, cwd="/"
    )
    assert done.stdout.split() == [b"3"]
    monkeypatch.setattr(environment, "LARGEST_MODULES", 10)
    # Only the imported modules remain.
    assert zip_modules(files[1], [str(beside), str(elsewhere)])
    assert "helper.py" not in zipfile.ZipFile(files[1]).namelist()
    monkeypatch.setattr(environment, "LARGEST_MODULES", 1)
    assert not zip_modules(tmp_path / "none.zip", [str(beside), str(elsewhere)])


# NUMA --------------------------------------------------------------------------------------------


def test_numa_binding_is_a_prefix_per_node(monkeypatch, tmp_path):
    monkeypatch.setattr(standalone.shutil, "which", lambda name: None)
    with refused("package-missing"):
        standalone.numa_prefixes(2)
    monkeypatch.setattr(standalone.shutil, "which", lambda name: f"/usr/bin/{name}")
    two = types.SimpleNamespace(numa_nodes=((0, 1), (4, 5)))
    monkeypatch.setattr("bigdl.common.cpu.topology", lambda: two)
    for core, node in {0: 0, 4: 2}.items():
        (tmp_path / f"sys/devices/system/node/node{node}/cpu{core}").mkdir(parents=True)
    nodes = standalone.numa_numbers(two.numa_nodes, str(tmp_path))
    monkeypatch.setattr(standalone, "numa_numbers", lambda groups: nodes)
    assert standalone.numa_prefixes(4) == [
        ["/usr/bin/numactl", "-m", "0", "-C", "0,1"],
        ["/usr/bin/numactl", "-m", "2", "-C", "4,5"],
    ]
    with pytest.raises(UsageError, match="multiple of this machine's 2 NUMA nodes"):
        standalone.numa_prefixes(3)


# Commands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ([], {}, {"PYSPARK_PYTHON"}),
        (["--master", "local[2]"], {}, {"PYSPARK_PYTHON"}),
        (["--master=yarn"], {}, {"PYSPARK_DRIVER_PYTHON"}),
        (["--master", "yarn", "--deploy-mode", "cluster"], {}, set()),
        ([], {"PYSPARK_PYTHON": "/p"}, set()),
        (["--conf", "spark.pyspark.python=env/bin/python"], {}, set()),
    ],
)
def test_bigdl_submit_uses_this_python_where_no_other_was_asked_for(options, environ, expected):
    assert set(submit_main.python_variables([*options, "train.py"], environ)) == expected


def test_a_command_gives_its_exit_code_and_its_environment(capfd):
    program = "import os, sys; print(os.environ['WORD']); sys.exit(7)"
    assert submit.run([sys.executable, "-c", program], {"WORD": "passed on"}) == 7
    assert capfd.readouterr().out == "passed on\n"
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert submit.run([sys.executable, "-c", kill], {}) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_a_cluster_mode_ends_with_the_exit_code_of_the_command(
    no_context, tmp_path, monkeypatch, capsys
):
    """Replace ``spark-submit`` and the JVM by stubs, and YARN by a listening socket."""
    log = "".join(f"line {number}\n" for number in range(100))
    monkeypatch.setattr(launch, "hadoop_jvm", lambda variables: contextlib.nullcontext())
    monkeypatch.setattr(
        yarn, "upload_shared_files", lambda *_: {"spark.yarn.archive": "hdfs:///kept"}
    )
    monkeypatch.setattr(yarn, "driver_output", lambda *_: {"stdout": "there\n", "stderr": log})
    home = tmp_path / "spark"
    (home / "bin").mkdir(parents=True)
    command = home / "bin" / "spark-submit"
    command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\nexit 5\n')
    command.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(home))
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "2"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        write_yarn(
            tmp_path, {"yarn.resourcemanager.address": f"127.0.0.1:{server.getsockname()[1]}"}
        )
        with pytest.raises(SystemExit) as end:
            init_orca_context(
                "yarn-cluster",
                cores=2,
                hadoop_conf=str(tmp_path),
                conf={"spark.pyspark.python": "/usr/bin/python3"},
            )
    assert end.value.code == 5
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:4] == ["--master", "yarn", "--deploy-mode", "cluster"]
    assert arguments[-3:] == [os.path.abspath("train.py"), "--epochs", "2"]
    assert "spark.yarn.archive=hdfs:///kept" in arguments
    printed = capsys.readouterr()
    assert printed.out == "there\n"
    assert printed.err == log[log.index("line 80") :]


# The names of BigDL 2.x --------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(nncontext, "init_orca_context", lambda *a, **k: made.append((*a, k)))
    return made


def test_functions_of_nncontext_come_down_to_one(calls):
    nncontext.init_spark_on_local(3)
    nncontext.init_spark_on_yarn("/conf", "env", 2, 4, "3g", jars="a.jar")
    nncontext.init_spark_on_yarn_cluster("/conf", None, 2, 4)
    nncontext.init_spark_on_k8s("k8s://a", "image", 2, 4)
    nncontext.init_spark_on_k8s_cluster("k8s://a", "image", 2, 4, penv_archive="e")
    nncontext.init_spark_standalone(2, 4, enable_numa_binding=True)
    nncontext.init_nncontext(cluster_mode="k8s-client", num_executors=5)
    assert [mode for mode, _ in calls] == [
        "local",
        "yarn-client",
        "yarn-cluster",
        "k8s-client",
        "k8s-cluster",
        "standalone",
        "k8s-client",
    ]
    assert calls[0][1]["cores"] == 3
    assert (
        calls[1][1].items()
        >= {
            "num_nodes": 2,
            "cores": 4,
            "memory": "3g",
            "hadoop_conf": "/conf",
            "conda_name": "env",
            "jars": "a.jar",
        }.items()
    )
    assert calls[5][1]["enable_numa_binding"] is True
    assert calls[6][1]["num_nodes"] == 5
    for _, keywords in calls:
        arguments.check_names({k: v for k, v in keywords.items() if k not in arguments_of_init()})


def arguments_of_init():
    return ("cores", "memory", "num_nodes")


def test_a_star_import_of_nncontext_has_its_names():
    names = {}
    exec("from bigdl.dllib.nncontext import *", names)
    assert {"init_nncontext", "init_spark_conf", "getOrCreateSparkContext"} <= set(names)
    assert {"ZooContext", "tempfile"} <= set(names)


def test_optimizer_versions_are_remembered(caplog):
    assert nncontext.get_optimizer_version() == "optimizerV1"
    nncontext.set_optimizer_version("optimizerV2")
    try:
        assert nncontext.get_optimizer_version() == "optimizerV2"
        assert "no effect" in caplog.text
        with refused("argument-value", "'optimizerV1'", "'optimizerV2'"):
            nncontext.set_optimizer_version("V3")
    finally:
        nncontext.set_optimizer_version("optimizerV1")


@pytest.mark.slow
def test_an_active_context_is_the_one_of_nncontext(orca_spark):
    sc = orca_spark.sparkContext
    assert nncontext.init_nncontext() is sc
    assert nncontext.init_nncontext("a name") is sc
    assert nncontext.getOrCreateSparkContext() is sc
    assert nncontext.init_spark_conf({"a": True, "b": 2}).get("a") == "true"
    nncontext.stop_spark_standalone()  # it started no context
    assert sc._jsc is not None
    with pytest.raises(UsageError, match="conf must be a SparkConf, a dict"):
        nncontext.init_nncontext(conf=3)


def test_another_spark_in_spark_home_is_named(tmp_path, monkeypatch):
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.12-3.5.4-amzn-0.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    with (
        refused("version-unsupported", "3.5.4-amzn-0", "SPARK_HOME"),
        launch.hadoop_jvm({}),
    ):
        pass
