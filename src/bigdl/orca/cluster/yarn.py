"""Calls to YARN and its file system, with Hadoop's classes in a JVM.

Files of a program are uploaded to the cluster's file system once, and later programs reuse them.  A
file is in ``.bigdl`` in the user's home, under a name derived from its content.  So a program with
the same files uploads nothing, and YARN's nodes have them cached and unpacked.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import re
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import YARN_LOGS_S
from bigdl.orca.cluster.standalone import spark_home

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject, JVMView

logger = logging.getLogger("bigdl.orca")

ARCHIVES = "spark.yarn.dist.archives"
_JARS = ("spark.yarn.archive", "spark.yarn.jars")


def upload_shared_files(
    jvm: JVMView, properties: Mapping[str, str], packed: str | None
) -> dict[str, str]:
    """Upload files that programs share, and return Spark properties that point to the copies.

    Parameters
    ----------
    jvm : py4j.java_gateway.JVMView
        JVM with Hadoop's configuration; it needs no SparkContext.
    properties : mapping of str to str
        Spark properties. Spark's JARs are uploaded unless a property sets their location.
    packed : str, optional
        Packed Python environment, an archive whose name depends on its content.

    Returns
    -------
    dict of str to str
        Changed properties.

    Raises
    ------
    UsageError
        If the file system cannot be used.
    """
    from py4j.protocol import Py4JJavaError

    try:
        return _upload_files(jvm, properties, packed)
    except Py4JJavaError as error:
        reason = str(error.java_exception.getMessage()).partition("\n")[0]
        raise UsageError(
            f"Cannot use the file system of the YARN cluster: {reason}; check that its name node "
            "is running and that hadoop_conf points to it",
            code="cluster-unreachable",
        ) from error


def _upload_files(
    jvm: JVMView, properties: Mapping[str, str], packed: str | None
) -> dict[str, str]:
    files = jvm.org.apache.hadoop.fs.FileSystem.get(jvm.org.apache.hadoop.conf.Configuration())
    if files.getUri().getScheme() == "file":
        return {}  # a YARN without a distributed file system
    changed = {}
    if not any(properties.get(name) for name in _JARS):
        changed["spark.yarn.archive"] = _upload_jars(jvm, files)
    entries = properties.get(ARCHIVES, "").split(",")
    if packed and any(entry.partition("#")[0] == packed for entry in entries):
        uploaded = _upload_file(jvm, files, Path(packed))
        changed[ARCHIVES] = ",".join(
            entry.replace(packed, uploaded) if entry.partition("#")[0] == packed else entry
            for entry in entries
        )
    return changed


def _upload_file(jvm: JVMView, files: JavaObject, file: Path) -> str:
    def write(part: JavaObject) -> None:
        source = jvm.org.apache.hadoop.fs.Path(file.resolve().as_uri())
        files.copyFromLocalFile(False, True, source, part)

    return _upload_once(jvm, files, file.name, write)


def _archive_hash(archive: Path) -> str:
    """Hash the last 64 KiB of a ZIP archive, which contain the checksums of its members."""
    with archive.open("rb") as file:
        file.seek(max(archive.stat().st_size - (64 << 10), 0))
        return hashlib.sha256(file.read()).hexdigest()[:16]


def _upload_jars(jvm: JVMView, files: JavaObject) -> str:
    """Upload Spark's JARs as one archive, which YARN's nodes fetch faster than 250 files."""
    jars = sorted(Path(spark_home(), "jars").glob("*.jar"))
    content = "".join(f"{jar.name} {jar.stat().st_size} {_archive_hash(jar)}\n" for jar in jars)
    name = f"spark-jars-{hashlib.sha256(content.encode()).hexdigest()[:24]}.zip"

    def write(part: JavaObject) -> None:
        archive = jvm.java.util.zip.ZipOutputStream(files.create(part))
        try:
            archive.setLevel(0)
            for jar in jars:
                archive.putNextEntry(jvm.java.util.zip.ZipEntry(jar.name))
                jvm.java.nio.file.Files.copy(jvm.java.io.File(str(jar)).toPath(), archive)
                archive.closeEntry()
        finally:
            archive.close()

    return _upload_once(jvm, files, name, write)


def _upload_once(
    jvm: JVMView, files: JavaObject, name: str, write: Callable[[JavaObject], None]
) -> str:
    """Upload a file atomically unless it was uploaded before, and return its address."""
    path = jvm.org.apache.hadoop.fs.Path
    folder = path(files.getHomeDirectory(), ".bigdl")
    target = path(folder, name)
    if not files.exists(target):
        logger.info("Uploading %s to %s, once", name, folder.toString())
        files.mkdirs(folder)
        part = path(folder, f".{name}.{uuid.uuid4().hex}")
        try:
            write(part)
            files.rename(part, target)  # False if another program uploaded it first
        finally:
            files.delete(part, False)
    return str(files.makeQualified(target).toString())


# -- output of a driver on the cluster ----------------------------------------------------------


def driver_output(jvm: JVMView, tag: str) -> dict[str, str]:
    """Return the driver's output from the last attempt of a program in cluster mode.

    Parameters
    ----------
    jvm : py4j.java_gateway.JVMView
    tag : str
        Unique element of the program's ``spark.yarn.tags``.

    Returns
    -------
    dict of str to str
        ``stdout`` and ``stderr``; empty if YARN keeps no logs or they are not available in time.
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
    deadline = time.monotonic() + YARN_LOGS_S
    while containers and time.monotonic() < deadline:
        container, report = max(containers, key=operator.itemgetter(0))
        logs = _logs(jvm, configuration, report, container)
        if logs:
            return logs
        time.sleep(1)
    return {}


def _logs(
    jvm: JVMView, configuration: JavaObject, report: JavaObject, container: str
) -> dict[str, str]:
    """Return a container's logs as a dict by log name, if YARN has aggregated them."""
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
    except Py4JJavaError as error:  # not aggregated yet
        logger.debug("Cannot read the logs of %s: %s", container, error)
    pattern = r"^LogType:(\w+)\n.*?^LogContents:\n(.*?)^End of LogType:\1"
    return dict(re.findall(pattern, str(output.toString("UTF-8")), re.DOTALL | re.MULTILINE))
