"""Spark configuration and command for the arguments of ``init_orca_context``.

:func:`submission` is a pure function of a :class:`ContextRequest` (the arguments) and a
:class:`Machine` (the environment of the program) that returns a :class:`Submission`.
:func:`connect` checks that the cluster is reachable and starts Spark there, and
:func:`submit_program` runs this program on the cluster.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from xml.etree import ElementTree

from bigdl.common.errors import UsageError
from bigdl.common.hadoop import hadoop_properties
from bigdl.common.private_folders import scratch_folder
from bigdl.common.timeouts import CLUSTER_PROBE_S
from bigdl.orca.cluster import kubernetes, launch, yarn
from bigdl.orca.cluster.environment import conda_prefix, packed_environment, zip_modules
from bigdl.orca.cluster.java import find_java
from bigdl.orca.cluster.standalone import LOOPBACK, StandaloneCluster, numa_prefixes, spark_home
from bigdl.runtime.channel import outgoing_address

logger = logging.getLogger("bigdl.orca")

ENVIRONMENT = "python_env"
"""Directory of the unpacked Python environment on an executor."""

# Set in the driver process of a cluster mode, with the names of BigDL 2.x.
_MARKERS = {"yarn-cluster": "OnAppMaster", "k8s-cluster": "onDriver"}
# Pod templates that satisfy the Kubernetes Pod Security standard "restricted".
_PODS = Path(__file__).with_name("pods")
_POD_TEMPLATE = "spark.kubernetes.{role}.podTemplateFile"
_SCRIPT_ELSEWHERE = ("local:", "hdfs:", "http:", "https:", "s3a:", "gs:", "abfs:")


@dataclass(frozen=True)
class ContextRequest:
    """Checked arguments of ``init_orca_context``.

    Attributes
    ----------
    mode : str
        Cluster mode other than local and spark-submit.
    cores, memory, num_nodes
        Cores and memory of an executor, and the number of executors.
    conf : dict of str to str
        Spark properties of the user, which take precedence.
    options : dict
        Other arguments by name.
    """

    mode: str
    cores: int = 2
    memory: str = "2g"
    num_nodes: int = 1
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: object = None) -> Any:  # the option's type
        value = self.options.get(name)
        return default if value is None else value

    @property
    def master(self) -> str | None:
        """Master URL that the caller passed."""
        return self.get("master") or self.conf.get("spark.master")

    @property
    def is_cluster_mode(self) -> bool:
        """True if the driver also runs on the cluster."""
        return self.mode.endswith("-cluster")

    @property
    def python_on_nodes(self) -> str | None:
        """Python interpreter on the nodes, or None if the caller specified none."""
        return self.conf.get("spark.pyspark.python") or self.get("python_location")

    @property
    def packs_environment(self) -> bool:
        """True if the Python environment of this process must be sent to the cluster."""
        return family(self.mode) == "yarn" and not (
            self.get("penv_archive") or self.python_on_nodes
        )


@dataclass(frozen=True)
class Machine:
    """Properties of the machine and the program that a submission depends on.

    Attributes
    ----------
    environ : mapping of str to str
    python : str
        Interpreter of this program.
    address : str
        Address of this machine that the cluster can reach.
    program : tuple of str
        ``sys.argv``.
    spark_submit : str
        Path of the command.
    environment_archive : str, optional
        Packed Python environment, if it must be sent.
    modules : str, optional
        Zip file of the program's modules.
    defaults : frozenset of str
        Names of properties that Spark's configuration files set.
    """

    environ: Mapping[str, str] = field(repr=False)
    python: str = "/usr/bin/python3"
    address: str = "127.0.0.1"
    program: tuple[str, ...] = ("",)
    spark_submit: str = "spark-submit"
    environment_archive: str | None = None
    modules: str | None = None
    defaults: frozenset[str] = frozenset()

    @classmethod
    def of_this_process(cls, towards: tuple[str, int] | None = None) -> Machine:
        """Create a Machine for this process, with its address on the route to the cluster."""
        return cls(
            environ=dict(os.environ),
            python=sys.executable,
            address=local_address(towards),
            program=tuple(sys.argv),
            spark_submit=spark_submit(),
            defaults=launch.default_properties(),
        )


@dataclass(frozen=True)
class Submission:
    """Settings with which a program is submitted to Spark.

    Attributes
    ----------
    properties : dict of str to str
        Spark's configuration.
    environment : dict of str to str
        Environment variables of the JVM, or of the command.
    command : tuple of str
        The ``spark-submit`` command that runs the program on the cluster; empty if this process
        is the driver.
    """

    properties: Mapping[str, str] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)
    command: tuple[str, ...] = field(default=(), repr=False)


def submission(request: ContextRequest, machine: Machine) -> Submission:
    """Create a Submission: Spark's configuration and, for a cluster mode, the submit command.

    Raises
    ------
    UsageError
        If a required setting of the mode is missing.
    """
    parts = {"yarn": _yarn, "k8s": _kubernetes, "standalone": _standalone}
    cluster = family(request.mode)
    properties, environment = parts[cluster](request, machine)
    properties = {**_common(request), **properties}
    if request.is_cluster_mode:
        prefix = "spark.yarn.appMasterEnv" if cluster == "yarn" else "spark.kubernetes.driverEnv"
        properties[f"{prefix}.{_MARKERS[request.mode]}"] = "True"
        properties["spark.pyspark.python"] = environment["PYSPARK_PYTHON"]
    else:
        environment["PYSPARK_DRIVER_PYTHON"] = machine.python
    properties = {**_non_empty(properties), **request.conf}
    command = _command(request, machine, properties) if request.is_cluster_mode else ()
    return Submission(properties, _non_empty(environment), command)


def _non_empty(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def family(mode: str) -> str:
    """Return the cluster type of a mode: ``"yarn"``, ``"k8s"`` or ``"standalone"``."""
    return mode.partition("-")[0]


def is_inside(mode: str, environ: Mapping[str, str]) -> bool:
    """Return True if this process is the driver of a program submitted in a cluster mode."""
    return environ.get(_MARKERS.get(mode, ""), "").lower() == "true"


def join(*lists: str | Iterable[str] | None) -> str:
    """Join comma-separated strings and sequences into one comma-separated list."""
    entries = []
    for each in lists:
        parts = each.split(",") if isinstance(each, str) else map(os.fspath, each or ())
        entries += [part.strip() for part in parts if part.strip()]
    return ",".join(dict.fromkeys(entries))


def spark_submit() -> str:
    """Return the path of the ``spark-submit`` command."""
    return os.path.join(spark_home(), "bin", "spark-submit")


def run(command: Iterable[str], environment: Mapping[str, str]) -> int:
    """Run a command in the foreground and return its exit code.

    The terminal sends Ctrl-C to the command; SIGTERM is forwarded to it.
    """
    variables = {**os.environ, **environment}
    with subprocess.Popen(list(command), env=variables) as child, contextlib.ExitStack() as restore:
        with contextlib.suppress(ValueError):  # signal handlers can be set in the main thread only
            for number, action in (
                (signal.SIGTERM, lambda *_: child.terminate()),
                (signal.SIGINT, signal.SIG_IGN),
            ):
                handler = signal.signal(number, action)
                restore.callback(signal.signal, number, handler or signal.SIG_DFL)
        code = child.wait()
    return code if code >= 0 else 128 - code


def run_with_java(command: Iterable[str], environment: Mapping[str, str]) -> int:
    """Run a Spark command with a suitable Java, like :func:`run`."""
    with contextlib.closing(find_java()) as java:
        return run(command, {**environment, "JAVA_HOME": str(java.home)})


# Properties and variables that are None or empty are omitted.


def _common(request: ContextRequest) -> dict[str, str | None]:
    return {
        **launch.EVERYWHERE,
        **launch.waiting_properties(request.conf),
        "spark.submit.deployMode": "cluster" if request.is_cluster_mode else "client",
        "spark.driver.cores": str(request.get("driver_cores", 4)),
        "spark.driver.memory": request.get("driver_memory", "2g"),
        "spark.executor.instances": str(request.num_nodes),
        "spark.executor.cores": str(request.cores),
        "spark.executor.memory": request.memory,
        # A fixed number of executors, unless conf overrides it.
        "spark.dynamicAllocation.enabled": "false",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.executor.memoryOverhead": request.get("extra_executor_memory_for_ray"),
        "spark.jars": join(request.get("jars")),
        "spark.submit.pyFiles": join(request.get("extra_python_lib")),
    }


def _yarn(request: ContextRequest, machine: Machine) -> tuple[dict, dict]:
    directory = hadoop_conf(request, machine.environ)
    user = request.get("hadoop_user_name") or machine.environ.get("HADOOP_USER_NAME") or "root"
    archive = request.get("penv_archive") or machine.environment_archive
    python = request.python_on_nodes or (archive and f"{ENVIRONMENT}/bin/python")
    properties = {
        "spark.master": "yarn",
        "spark.yarn.archive": request.get("spark_yarn_archive"),
        "spark.yarn.dist.archives": join(_unpacked_as(archive), request.get("additional_archive")),
    }
    if request.is_cluster_mode:
        properties["spark.yarn.appMasterEnv.PYSPARK_PYTHON"] = python
        libraries = join(request.get("extra_python_lib"), machine.modules)
        properties["spark.submit.pyFiles"] = libraries
    return properties, {
        "HADOOP_CONF_DIR": directory,
        "YARN_CONF_DIR": directory,
        "HADOOP_USER_NAME": user,
        "PYSPARK_PYTHON": python,
    }


def hadoop_conf(request: ContextRequest, environ: Mapping[str, str]) -> str:
    """Return the directory of Hadoop's configuration files."""
    directory = request.get("hadoop_conf") or environ.get("HADOOP_CONF_DIR")
    if not directory:
        raise UsageError(
            f'cluster_mode="{request.mode}" needs the directory of Hadoop\'s configuration files: '
            "set HADOOP_CONF_DIR, or pass hadoop_conf",
            code="cluster-config",
            argument="hadoop_conf",
        )
    return directory


def _kubernetes(request: ContextRequest, machine: Machine) -> tuple[dict, dict]:
    master = request.master
    image = request.get("container_image") or request.conf.get("spark.kubernetes.container.image")
    if not master or not master.startswith("k8s://"):
        raise UsageError(
            f'cluster_mode="{request.mode}" needs master="k8s://https://host:port", the address of '
            f"the Kubernetes API server, but got {master!r}",
            code="argument-value",
            argument="master",
        )
    if not image:
        raise UsageError(
            f'cluster_mode="{request.mode}" needs container_image, the image of the executors, '
            "but got None",
            code="argument-missing",
            argument="container_image",
        )
    archive = request.get("penv_archive")
    # The image's Python, independent of this program's.
    python = f"./{ENVIRONMENT}/bin/python" if archive else "python3"
    properties = {
        "spark.master": master,
        "spark.kubernetes.container.image": image,
        "spark.archives": _unpacked_as(archive),
        # The FailurePolicy decides. By default Spark ends the JVM after two executor failures, and
        # counts each second without quota for an executor as one.
        "spark.executor.maxNumFailures": "100000",
    }
    for role in ("driver", "executor") if request.is_cluster_mode else ("executor",):
        if (template := _POD_TEMPLATE.format(role=role)) not in machine.defaults:
            properties[template] = str(_PODS / f"{role}.yaml")
    if not request.is_cluster_mode:
        properties["spark.driver.host"] = machine.address
        # Otherwise Spark passes the driver's bind address to executors.
        properties["spark.kubernetes.executor.useDriverPodIP"] = "false"
    return properties, {"PYSPARK_PYTHON": request.python_on_nodes or python}


def _standalone(request: ContextRequest, machine: Machine) -> tuple[dict, dict]:
    properties = {
        "spark.master": request.master,
        "spark.cores.max": str(request.cores * request.num_nodes),
        "spark.driver.host": machine.address,
    }
    return properties, {"PYSPARK_PYTHON": request.python_on_nodes or machine.python}


def _unpacked_as(archive: str | None) -> str | None:
    return archive if not archive or "#" in archive else f"{archive}#{ENVIRONMENT}"


def _command(
    request: ContextRequest, machine: Machine, properties: Mapping[str, str]
) -> tuple[str, ...]:
    script, *arguments = machine.program
    if not script or not script.endswith(".py"):
        raise UsageError(
            f'cluster_mode="{request.mode}" runs the program\'s file again on the cluster, but '
            f"this program is {script or 'interactive'!r}: start it as a .py file, or use "
            f'cluster_mode="{family(request.mode)}-client"',
            code="unsupported",
            argument="cluster_mode",
        )
    if not script.startswith(_SCRIPT_ELSEWHERE):
        script = str(Path(script).absolute())
        if family(request.mode) == "k8s" and "spark.kubernetes.file.upload.path" not in properties:
            script = f"local://{script}"  # the image or a volume has it at the same path
    options = [
        part
        for key, value in sorted(properties.items())
        if key not in ("spark.master", "spark.submit.deployMode")
        for part in ("--conf", f"{key}={value}")
    ]
    master = ["--master", properties["spark.master"], "--deploy-mode", "cluster"]
    return (machine.spark_submit, *master, *options, script, *arguments)


Address = tuple[str, int]

_RESOURCE_MANAGER_PORT = 8032


def check_reachable(addresses: Sequence[Address], what: str, advice: str) -> Address:
    """Return the first address that accepts a connection.

    Parameters
    ----------
    addresses : sequence of (host, port)
        Alternative addresses.
    what : str
        Name of the server.
    advice : str
        Advice for the error message.

    Raises
    ------
    UsageError
        If no address accepts a connection.
    """
    reasons = []
    for host, port in addresses:
        try:
            with socket.create_connection((host, port), CLUSTER_PROBE_S):
                return host, port
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            reasons.append(f"{host}:{port} ({reason})")
    raise UsageError(
        f"{what} cannot be reached at {', '.join(reasons)}: {advice}", code="cluster-unreachable"
    )


def resource_managers(directory: str) -> list[Address]:
    """Read the addresses of YARN's resource managers from Hadoop's configuration directory.

    Raises
    ------
    UsageError
        If the directory has no readable ``yarn-site.xml``.
    """
    file = Path(directory) / "yarn-site.xml"
    try:
        properties = hadoop_properties(file)
    except (OSError, ElementTree.ParseError) as error:
        raise UsageError(
            f"Cannot read yarn-site.xml in {directory} ({error}): "
            "set HADOOP_CONF_DIR, or pass hadoop_conf, to the directory of Hadoop's configuration "
            "files",
            code="cluster-config",
            path=str(directory),
        ) from None
    ids = [each.strip() for each in properties.get("yarn.resourcemanager.ha.rm-ids", "").split(",")]
    addresses = []
    for suffix in [f".{each}" for each in ids if each] or [""]:
        host = properties.get(f"yarn.resourcemanager.hostname{suffix}", "0.0.0.0")
        address = properties.get(f"yarn.resourcemanager.address{suffix}", "")
        # A value may refer to others as ${…}, usually to the host.
        address = address.replace("${yarn.resourcemanager.hostname}", host)
        addresses.append(_host_port(address or host, _RESOURCE_MANAGER_PORT))
    return addresses


def kubernetes_address(master: str) -> Address:
    """Return host and port of the API server in ``k8s://[https://]host[:port]``."""
    rest = master.removeprefix("k8s://")
    parts = urlsplit(rest if "://" in rest else f"https://{rest}")
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise UsageError(
            f'master must be of the form "k8s://https://host:port", but got {master!r}',
            code="argument-value",
            argument="master",
        )
    return parts.hostname, port


def standalone_masters(master: str) -> list[Address]:
    """Return the addresses in ``spark://host:port[,host:port…]``.

    Raises
    ------
    UsageError
        If `master` has another form.
    """
    entries = master.removeprefix("spark://").split(",") if master.startswith("spark://") else []
    try:
        masters = [_host_port(entry, 7077) for entry in entries if entry]
    except ValueError:
        masters = []
    if not masters:
        raise UsageError(
            f'master of a standalone cluster must be of the form "spark://host:port", '
            f"but got {master!r}",
            code="argument-value",
            argument="master",
        )
    return masters


def local_address(towards: Address | None = None) -> str:
    """Return this machine's address on the route to a cluster, or on its default route."""
    try:
        # 192.0.2.1 is reserved for documentation: it selects the default route.
        return outgoing_address(*(towards or ("192.0.2.1", 9)))
    except OSError:
        return "127.0.0.1"


def _host_port(text: str, default: int) -> Address:
    parts = urlsplit(f"//{text.strip()}")
    return parts.hostname or "", parts.port or default


def connect(request: ContextRequest, *, log_output: bool = False) -> launch.LaunchedSpark:
    """Start Spark with this process as the driver.

    Raises
    ------
    UsageError
        If the cluster is unreachable or a required setting is missing.
    """
    if family(request.mode) == "standalone" and not request.master:
        return _start_standalone(request, log_output)
    machine = _with_environment(request, Machine.of_this_process(_reach(request)))
    described = submission(request, machine)
    callbacks: dict[str, Any] = {}
    if family(request.mode) == "yarn":
        callbacks["prepare"] = functools.partial(
            yarn.upload_shared_files,
            properties=described.properties,
            packed=machine.environment_archive,
        )
    if family(request.mode) == "k8s":
        namespace = described.properties.get(kubernetes.NAMESPACE, "default")
        callbacks["explain"] = functools.partial(kubernetes.quotas, namespace=namespace)
    launched = launch.LaunchedSpark.launch(
        described.properties, described.environment, log_output=log_output, **callbacks
    )
    if family(request.mode) == "k8s":
        try:
            kubernetes.await_executors(launched.sc, request.num_nodes)
        except BaseException:
            launched.stop()
            raise
    return launched


def submit_program(request: ContextRequest) -> int:
    """Run this program on the cluster, and return the exit code of ``spark-submit``.

    Raises
    ------
    UsageError
        If the cluster is unreachable or a required setting is missing.
    """
    machine = Machine.of_this_process()
    submission(request, machine)  # raise errors before packing
    _reach(request)
    logger.info("Submitting the program with cluster_mode=%s", request.mode)
    if family(request.mode) == "yarn":
        return _submit_to_yarn(request, machine)
    return _submit_to_kubernetes(request, machine)


def _submit_to_kubernetes(request: ContextRequest, machine: Machine) -> int:
    """Run the program on Kubernetes, and print its driver's log in this process."""
    label = f"bigdl-{uuid.uuid4().hex}"
    conf = {
        **request.conf,
        f"spark.kubernetes.driver.label.{kubernetes.SUBMISSION}": label,
        "spark.kubernetes.submission.waitAppCompletion": "false",
    }
    described = submission(replace(request, conf=conf), machine)
    code = run_with_java(described.command, described.environment)
    if code:
        return code
    with launch.hadoop_jvm(described.environment) as jvm:
        return kubernetes.follow_driver(jvm, described.properties, label)


def _submit_to_yarn(request: ContextRequest, machine: Machine) -> int:
    """Run the program on YARN, and print its driver's output in this process."""
    tag = f"bigdl-{uuid.uuid4().hex}"
    with scratch_folder("submit") as directory:
        modules = str(Path(directory) / "modules.zip")
        machine = _with_environment(
            request, replace(machine, modules=modules if zip_modules(modules) else None)
        )
        described = submission(request, machine)
        with launch.hadoop_jvm(described.environment) as jvm:
            conf = {
                **request.conf,
                **yarn.upload_shared_files(jvm, described.properties, machine.environment_archive),
                "spark.yarn.tags": join(request.conf.get("spark.yarn.tags"), tag),
            }
            described = submission(replace(request, conf=conf), machine)
            code = run_with_java(described.command, described.environment)
            printed = yarn.driver_output(jvm, tag)
    output, log = printed.get("stdout", ""), printed.get("stderr", "")
    sys.stdout.write(output)  # includes Python's standard error
    if code and "\nTraceback " not in output:
        sys.stderr.write("".join(log.splitlines(keepends=True)[-_SHOWN_LINES:]))
    return code


_SHOWN_LINES = 20  # shown lines of the log of a driver that failed without a traceback


def _with_environment(request: ContextRequest, machine: Machine) -> Machine:
    """Return `machine`, with a packed Python environment if the cluster needs one."""
    if not request.packs_environment:
        return machine
    archive = packed_environment(conda_prefix(request.get("conda_name")))
    return replace(machine, environment_archive=archive)


def _reach(request: ContextRequest) -> Address:
    """Check within seconds that the cluster is reachable; Spark would retry for minutes."""
    cluster = family(request.mode)
    if cluster == "yarn":
        directory = hadoop_conf(request, os.environ)
        return check_reachable(
            resource_managers(directory),
            "The resource manager of YARN",
            f"check that it is running and that yarn-site.xml in {directory} is that of this "
            "cluster",
        )
    if cluster == "k8s":
        submission(request, Machine(environ=os.environ, program=("program.py",)))
        return check_reachable(
            [kubernetes_address(cast("str", request.master))],
            "The API server of Kubernetes",
            "compare master with the address that `kubectl cluster-info` shows",
        )
    return check_reachable(
        standalone_masters(cast("str", request.master)),
        "The master of the standalone cluster",
        "check that it is running there, or omit master to start a cluster on this machine",
    )


def _start_standalone(request: ContextRequest, log_output: bool) -> launch.LaunchedSpark:
    prefixes: list[list[str]] = [[]]
    if request.get("enable_numa_binding"):
        prefixes = numa_prefixes(request.num_nodes)
    with contextlib.ExitStack() as resources:
        cluster = StandaloneCluster.start(
            request.cores,
            request.memory,
            request.num_nodes,
            prefixes=prefixes,
            directory=_local_directory(request),
        )
        resources.callback(cluster.stop)
        conf = {"spark.master": cluster.master, **request.conf}
        machine = replace(Machine.of_this_process(), address=LOOPBACK)
        described = submission(replace(request, conf=conf), machine)
        properties = {
            **described.properties,
            **launch.loopback_properties(request.conf),
            "spark.authenticate": "true",
            launch.SECRET: cluster.secret,
            **request.conf,
        }
        # removed with the cluster, even if it is killed
        local = os.path.join(cluster.directory, "local")
        properties |= launch.executor_temporary(properties, local)
        environment = {**described.environment, "SPARK_LOCAL_IP": LOOPBACK}
        launched = launch.LaunchedSpark.launch(
            properties, environment, log_output=log_output, resources=resources.pop_all()
        )
    launched.cluster = cluster
    cluster.watch(launched.end)
    return launched


def _local_directory(request: ContextRequest) -> str | None:
    """Return the directory that the user configured for local files, such as spilled data."""
    configured = os.environ.get("SPARK_LOCAL_DIRS") or request.conf.get("spark.local.dir")
    if not configured:
        return None
    directory = configured.split(",")[0]
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"Cannot create the directory {directory} for local files: {error}",
            code="path-unusable",
            path=str(directory),
        ) from None
    return directory
