"""Calls of YARN and of its file system, by Hadoop's own classes in a JVM.

What a program needs is put on the cluster's file system once, for those that follow.  A file lies
in ``.bigdl`` in the user's home there, under a name made from its content: a program that needs the
same uploads nothing, and YARN's nodes still have it, unpacked.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import YARN_LOGS_S
from bigdl.orca.cluster.standalone import spark_home

if TYPE_CHECKING:
    from py4j.java_gateway import JVMView

logger = logging.getLogger("bigdl.orca")

ARCHIVES = "spark.yarn.dist.archives"
_JARS = ("spark.yarn.archive", "spark.yarn.jars")


def kept_on_cluster(
    jvm: JVMView, properties: Mapping[str, str], packed: str | None
) -> dict[str, str]:
    """Spark properties that name copies on the cluster's file system.

    Parameters
    ----------
    jvm : py4j.java_gateway.JVMView
        Of a JVM with Hadoop's configuration, which need not have a SparkContext.
    properties : mapping of str to str
        Spark's. The JARs of Spark are kept unless a property says where they are.
    packed : str, optional
        The packed Python environment, an archive whose name tells its content.

    Returns
    -------
    dict of str to str
        The properties that change.

    Raises
    ------
    UsageError
        If the file system cannot be used.
    """
    from py4j.protocol import Py4JJavaError

    try:
        return _kept_files(jvm, properties, packed)
    except Py4JJavaError as error:
        said = str(error.java_exception.getMessage()).partition("\n")[0]
        raise UsageError(
            f"the file system of the YARN cluster cannot be used: {said}; check that its name node "
            "runs and that hadoop_conf names it",
            code="cluster-unreachable",
        ) from error


def _kept_files(jvm: JVMView, properties: Mapping[str, str], packed: str | None) -> dict[str, str]:
    files = jvm.org.apache.hadoop.fs.FileSystem.get(jvm.org.apache.hadoop.conf.Configuration())
    if files.getUri().getScheme() == "file":
        return {}  # YARN has no file system of its own
    changed = {}
    if not any(properties.get(name) for name in _JARS):
        changed["spark.yarn.archive"] = _keep_jars(jvm, files)
    entries = properties.get(ARCHIVES, "").split(",")
    if packed and any(entry.partition("#")[0] == packed for entry in entries):
        kept = _keep_file(jvm, files, Path(packed))
        changed[ARCHIVES] = ",".join(
            entry.replace(packed, kept) if entry.partition("#")[0] == packed else entry
            for entry in entries
        )
    return changed


def _keep_file(jvm: JVMView, files: Any, file: Path) -> str:
    def write(part: Any) -> None:
        source = jvm.org.apache.hadoop.fs.Path(file.resolve().as_uri())
        files.copyFromLocalFile(False, True, source, part)

    return _kept(jvm, files, file.name, write)


def _directory_of(archive: Path) -> str:
    """Return a hash of the end of an archive, where the checksums of its members are."""
    with archive.open("rb") as file:
        file.seek(max(archive.stat().st_size - (64 << 10), 0))
        return hashlib.sha256(file.read()).hexdigest()[:16]


def _keep_jars(jvm: JVMView, files: Any) -> str:
    """One archive of Spark's JARs: 250 single files take YARN's nodes longer."""
    jars = sorted(Path(spark_home(), "jars").glob("*.jar"))
    content = "".join(f"{jar.name} {jar.stat().st_size} {_directory_of(jar)}\n" for jar in jars)
    name = f"spark-jars-{hashlib.sha256(content.encode()).hexdigest()[:24]}.zip"

    def write(part: Any) -> None:
        archive = jvm.java.util.zip.ZipOutputStream(files.create(part))
        try:
            archive.setLevel(0)
            for jar in jars:
                archive.putNextEntry(jvm.java.util.zip.ZipEntry(jar.name))
                jvm.java.nio.file.Files.copy(jvm.java.io.File(str(jar)).toPath(), archive)
                archive.closeEntry()
        finally:
            archive.close()

    return _kept(jvm, files, name, write)


def _kept(jvm: JVMView, files: Any, name: str, write: Any) -> str:
    """The address of a file that is there already, or is written now; no half of one is seen."""
    path = jvm.org.apache.hadoop.fs.Path
    folder = path(files.getHomeDirectory(), ".bigdl")
    target = path(folder, name)
    if not files.exists(target):
        logger.info("Copying %s to %s, once", name, folder.toString())
        files.mkdirs(folder)
        part = path(folder, f".{name}.{uuid.uuid4().hex}")
        try:
            write(part)
            files.rename(part, target)  # False if another program was faster
        finally:
            files.delete(part, False)
    return str(files.makeQualified(target).toString())


# -- what a driver on the cluster has printed ---------------------------------------------------


def driver_output(jvm: JVMView, tag: str) -> dict[str, str]:
    """Return the output of the driver of a program in cluster mode, in its last attempt.

    Parameters
    ----------
    jvm : py4j.java_gateway.JVMView
    tag : str
        One of the program's ``spark.yarn.tags``, which no other program has.

    Returns
    -------
    dict of str to str
        ``stdout`` and ``stderr``; empty if YARN keeps no logs or they do not come in time.
    """
    yarn = jvm.org.apache.hadoop.yarn
    configuration = yarn.conf.YarnConfiguration()
    client = yarn.client.api.YarnClient.createYarnClient()
    client.init(configuration)
    client.start()
    try:
        request = yarn.api.protocolrecords.GetApplicationsRequest.newInstance()
        tags = jvm.java.util.HashSet()
        tags.add(tag)
        request.setApplicationTags(tags)
        containers = [
            (str(attempt.getAMContainerId().toString()), report)
            for report in client.getApplications(request)
            for attempt in client.getApplicationAttempts(report.getApplicationId())
        ]
    finally:
        client.stop()
    end = time.monotonic() + YARN_LOGS_S
    while containers and time.monotonic() < end:
        container, report = max(containers, key=operator.itemgetter(0))
        logs = _logs(jvm, configuration, report, container)
        if logs:
            return logs
        time.sleep(1)
    return {}


def _logs(jvm: JVMView, configuration: Any, report: Any, container: str) -> dict[str, str]:
    """The logs of a container by their names, if YARN has collected them."""
    from py4j.protocol import Py4JJavaError

    aggregation = jvm.org.apache.hadoop.yarn.logaggregation
    request = aggregation.ContainerLogsRequest()
    request.setAppId(report.getApplicationId())
    request.setAppOwner(report.getUser())
    request.setAppFinished(True)
    request.setContainerId(container)
    names = jvm.java.util.HashSet()
    for name in ("stdout", "stderr"):
        names.add(name)
    request.setLogTypes(names)
    request.setBytes(jvm.java.lang.Long.MAX_VALUE)
    output = jvm.java.io.ByteArrayOutputStream()
    factory = aggregation.filecontroller.LogAggregationFileControllerFactory(configuration)
    try:
        controller = factory.getFileControllerForRead(report.getApplicationId(), report.getUser())
        controller.readAggregatedLogs(request, output)
    except Py4JJavaError as error:  # they are not there yet
        logger.debug("The logs of %s cannot be read: %s", container, error)
    pattern = r"^LogType:(\w+)\n.*?^LogContents:\n(.*?)^End of LogType:\1"
    return dict(re.findall(pattern, str(output.toString("UTF-8")), re.DOTALL | re.MULTILINE))
