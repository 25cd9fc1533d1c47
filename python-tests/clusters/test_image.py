"""What docker/Dockerfile puts into an image: the start script, and packages that are trimmed."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"


@pytest.fixture(scope="module")
def trim():
    """The module docker/trim.py."""
    spec = importlib.util.spec_from_file_location("trim", ROOT / "docker" / "trim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_image_starts_an_executor_as_spark_asks(tmp_path):
    for name in ("bin/tini", "home/bin/java"):
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        # tini passes the command on; java shows what it was told
        text = 'shift 2; exec "$@"' if name.endswith("tini") else 'printf "%s\\n" "$@"'
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "JAVA_HOME": f"{tmp_path}/home",
        "SPARK_HOME": "/opt/spark/home",
        "SPARK_CONF_DIR": "/opt/spark/conf",
        "SPARK_EXECUTOR_MEMORY": "3g",
        "SPARK_DRIVER_URL": "spark://d:1",
        "SPARK_EXECUTOR_ID": "7",
        "SPARK_EXECUTOR_CORES": "2",
        "SPARK_APPLICATION_ID": "app",
        "SPARK_EXECUTOR_POD_IP": "10.1.1.1",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_EXECUTOR_POD_NAME": "pod",
        **{f"SPARK_JAVA_OPT_{n}": f"-Dn={n} x=y" for n in range(11)},
    }
    command = ["bash", str(ENTRYPOINT), "executor"]
    told = subprocess.check_output(command, env=variables, text=True).splitlines()
    assert told[:11] == [f"-Dn={n} x=y" for n in range(11)]
    assert told[11:14] == ["-Xms3g", "-Xmx3g", "-cp"]
    assert told[14].startswith("/opt/spark/conf:/opt/spark/home/jars/*:")
    assert told[16:] == [
        "--driver-url",
        "spark://d:1",
        "--executor-id",
        "7",
        "--cores",
        "2",
        "--app-id",
        "app",
        "--hostname",
        "10.1.1.1",
        "--resourceProfileId",
        "0",
        "--podName",
        "pod",
    ]
    assert subprocess.check_output(["bash", str(ENTRYPOINT), "echo", "a b"], env=variables) == (
        b"a b\n"
    )


def test_a_user_without_a_name_gets_one(tmp_path):
    unknown = tmp_path / "getent"  # as it answers for a user of whom nobody knows
    unknown.write_text("#!/bin/sh\nexit 2\n")
    unknown.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/spark"}
    program = 'unset LD_PRELOAD; cat "$NSS_WRAPPER_PASSWD"; rm "$NSS_WRAPPER_PASSWD"'
    command = ["bash", str(ENTRYPOINT), "bash", "-c", program]
    shown = subprocess.check_output(command, env=variables, text=True, stderr=subprocess.DEVNULL)
    user, group = os.getuid(), os.getgid()
    assert shown.splitlines()[0] == f"spark:x:{user}:{group}::/home/spark:/bin/false"
    assert shown.endswith(Path("/etc/passwd").read_text())


@pytest.mark.parametrize(
    ("path", "goes"),
    [
        ("pandas/tests/test_algos.py", True),
        ("torch/test/cpp/a.cpp", True),
        ("torch/include/torch/all.h", True),
        ("torch/bin/test_api", True),
        ("torch/bin/torch_shm_manager", False),
        ("torch/testing/_comparison.py", False),
        ("pyarrow/libarrow_flight.so.2600", True),
        ("pyarrow/libarrow.so.2600", False),
        ("pyspark/jars/connect-repl/scala-compiler-2.13.18.jar", True),
        ("pyspark/jars/spark-connect_2.13-4.3.0.jar", True),
        ("pyspark/jars/spark-yarn_2.13-4.3.0.jar", False),
        ("pyspark/jars/hive-exec-2.3.10-core.jar", False),
        ("torch-2.13.0.dist-info/licenses/third_party/test/LICENSE", False),
    ],
)
def test_rules_say_what_goes(trim, path, goes):
    assert (trim.rule_of(path) is not None) == goes


def test_libraries_of_other_processors_go_from_jars(trim, tmp_path):
    jars = tmp_path / "pyspark" / "jars"
    jars.mkdir(parents=True)
    natives = ["librocksdbjni-linux64.so", "linux/amd64/libzstd-jni.so", "a/Linux/x86_64/b.so"]
    foreign = [
        "librocksdbjni-linux64-musl.so",
        "librocksdbjni-linux-aarch64.so",
        "librocksdbjni-osx-arm64.jnilib",
        "linux/ppc64le/libzstd-jni.so",
        "win/amd64/libzstd-jni.dll",
        "librocksdbjni-win64.dll",
        "a/AIX/ppc64/b.a",
    ]
    with zipfile.ZipFile(jars / "both.jar", "w") as jar:
        for name in ("META-INF/MANIFEST.MF", "Some.class", *natives, *foreign):
            jar.writestr(name, name)
    with zipfile.ZipFile(jars / "foreign.jar", "w") as jar:
        for name in ("META-INF/MANIFEST.MF", *foreign):
            jar.writestr(name, name)
    for name in ("liba.so", "liba.so.1"):
        (tmp_path / "pyspark" / name).write_bytes(b"a library")
    freed = trim.trim(tmp_path, "x86_64")
    assert freed["second copies of libraries"] == len("a library")
    assert (tmp_path / "pyspark" / "liba.so.1").resolve().name == "liba.so"
    assert [path.name for path in jars.iterdir()] == ["both.jar"]
    with zipfile.ZipFile(jars / "both.jar") as jar:
        assert jar.testzip() is None
        assert jar.namelist() == ["META-INF/MANIFEST.MF", "Some.class", *natives]
        assert jar.read("Some.class") == b"Some.class"


IMPORT_ALL = """
import contextlib, importlib, pathlib, sys
from bigdl.common.dropped import DroppedModuleError

root = pathlib.Path(sys.argv[1])
for path in sorted(root.glob("bigdl/**/*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    with contextlib.suppress(DroppedModuleError):  # it is there to say so
        importlib.import_module(name)
"""

FIT_ON_RAY = """
import torch
from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.learn.pytorch import Estimator

init_orca_context(cores=2, memory="1g")
estimator = Estimator.from_torch(
    model=lambda config: torch.nn.Linear(3, 1),
    optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
    loss=torch.nn.MSELoss(), backend="ray", workers_per_node=2)
estimator.fit((torch.randn(32, 3).numpy(), torch.randn(32, 1).numpy()), epochs=1, batch_size=8)
stop_orca_context()
"""

ACCELERATE = """
import torch
from bigdl.nano.pytorch import InferenceOptimizer

model, x = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval(), torch.randn(2, 8)
for accelerator in ("openvino", "onnxruntime", "jit"):
    fast = InferenceOptimizer.trace(model, input_sample=x, accelerator=accelerator)
    with InferenceOptimizer.get_context(fast):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
"""


@pytest.fixture(scope="module")
def trimmed_python(trim, tmp_path_factory) -> Path:
    """The Python of a copy of this environment whose packages are trimmed."""
    environment = tmp_path_factory.mktemp("trimmed") / "environment"

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)  # nothing that trims writes into a file
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(sys.prefix, environment, symlinks=True, copy_function=link)
    [packages] = environment.glob("lib/python3*/site-packages")
    freed = trim.trim(packages)
    assert all(freed[name] for name in trim.RULES), freed
    return environment / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "program",
    [
        ["-c", IMPORT_ALL, str(ROOT / "src")],
        [str(ROOT / "examples" / "orca" / "digits.py"), "--epochs", "2"],
        ["-c", FIT_ON_RAY],
        ["-c", ACCELERATE],
    ],
    ids=["imports", "digits", "ray", "nano"],
)
def test_programs_run_with_trimmed_packages(trimmed_python, tmp_path, program):
    done = subprocess.run(
        [trimmed_python, *program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
