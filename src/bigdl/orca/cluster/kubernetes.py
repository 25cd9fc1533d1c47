"""State of a program's pods on Kubernetes, queried with Spark's client in its JVM."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import POD_LOST_S, POD_PLACE_S, PODS_LOOK_S, PODS_START_S

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject, JVMView
    from pyspark import SparkContext

logger = logging.getLogger("bigdl.orca")

NAMESPACE = "spark.kubernetes.namespace"

SUBMISSION = "bigdl-submission"
"""Label of the driver's pod in cluster mode, with a unique value."""

# seconds to wait for a missing or unscheduled pod; autoscaling clusters need more
_WAITING = "spark.scheduler.maxRegisteredResourcesWaitingTime"
_FATAL_STATES = frozenset(  # container states that do not resolve by themselves
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)

_USER_ADVICE = (
    "the image needs USER with a numeric id other than root's, or runAsUser in a pod template, set "
    "with spark.kubernetes.executor.podTemplateFile (driver.podTemplateFile)"
)


def await_executors(sc: SparkContext, number: int) -> None:
    """Wait until the first executor of a program is running.

    Parameters
    ----------
    sc : pyspark.SparkContext
    number : int
        Number of requested executors.

    Raises
    ------
    UsageError
        If no executor can start; the message has the states of the pods.
    """
    timeout = _start_timeout(sc._jvm, sc.getConf().get(_WAITING))
    with _executors(sc) as pods:
        for waited in _waiting():
            if _registered(sc) > 0:
                return
            if reasons := pods.reasons(waited, timeout):
                raise UsageError(
                    f"None of {number} executors has started in the Kubernetes namespace "
                    f"{pods.namespace}: {reasons}",
                    code="cluster-refused",
                )


def shortage(sc: SparkContext) -> str:
    """Return the reasons why executors do not start on Kubernetes, or ""."""
    requested = int(sc.getConf().get("spark.executor.instances") or 1)
    with _executors(sc) as pods:
        return pods.reasons(PODS_START_S, 0.0, requested)


def remove_lost_executors(sc: SparkContext) -> None:
    """Remove pods of terminating executors whose node does not confirm their termination.

    Spark requests no replacements while they exist, and the node may never return.
    """
    with _executors(sc) as pods:
        for pod in pods.described() or []:
            if pod["lost"]:
                logger.warning(
                    "Node %s does not confirm that %s has ended; the pod is removed, so that Spark "
                    "requests another one",
                    *(pod["node"], pod["name"]),
                )
                pods.remove(pod["name"])


def follow_driver(jvm: JVMView, properties: Mapping[str, str], label: str) -> int:
    """Print the driver log of a program in cluster mode until the program ends.

    Parameters
    ----------
    jvm : py4j.java_gateway.JVMView
    properties : mapping of str to str
        Spark properties.
    label : str
        Value of the pod's label `SUBMISSION`.

    Returns
    -------
    int
        The exit code of the program.

    Raises
    ------
    UsageError
        If the driver cannot start, or its pod disappears.
    """
    namespace = properties.get(NAMESPACE, "default")
    where = f"in the Kubernetes namespace {namespace}"
    timeout = _start_timeout(jvm, properties.get(_WAITING))
    with Pods(jvm, namespace, {SUBMISSION: label}) as pods:
        for waited in _waiting():
            described = pods.described()
            if described and described[0]["phase"] != "Pending":
                break
            if reasons := pods.reasons(waited, timeout):
                for pod in described or []:
                    pods.remove(pod["name"])
                raise UsageError(
                    f"The driver has not started {where}: {reasons}", code="cluster-refused"
                )
        name, lines = described[0]["name"], 0
        logger.info("The program runs in the pod %s %s", name, where)
        while described is None or described[0]["phase"] == "Running":
            lines = pods.print_log(name, lines)
            time.sleep(PODS_LOOK_S)  # a log ends shortly before its pod
            described = pods.described()
            if described == [] or (described and described[0]["lost"]):
                raise UsageError(f"The driver's pod {name} disappeared {where}", code="worker-lost")
        pods.print_log(name, lines)
        code = described[0].get("code")
        return int(described[0]["phase"] != "Succeeded") if code is None else code


def _start_timeout(jvm: JVMView, setting: str | None) -> float:
    times = jvm.org.apache.spark.network.util.JavaUtils
    return float(times.timeStringAsSec(setting)) if setting else POD_PLACE_S


def _waiting() -> Iterator[float]:
    """Yield the number of seconds since the first call, at regular intervals, forever."""
    begin = time.monotonic()
    while True:
        yield time.monotonic() - begin
        time.sleep(PODS_LOOK_S)


def _registered(sc: SparkContext) -> int:
    return len(sc._jsc.sc().statusTracker().getExecutorInfos()) - 1  # type: ignore[union-attr]


def _executors(sc: SparkContext) -> Pods:
    labels = {"spark-role": "executor", "spark-app-selector": sc.applicationId}
    return Pods(sc._jvm, sc.getConf().get(NAMESPACE) or "default", labels)


class Pods(contextlib.AbstractContextManager):
    """Pods of a Kubernetes namespace that have given labels.

    Parameters
    ----------
    jvm : py4j.java_gateway.JVMView
    namespace : str
    labels : mapping of str to str
    """

    def __init__(self, jvm: JVMView, namespace: str, labels: Mapping[str, str]):
        self.namespace = namespace
        self._jvm, self._labels = jvm, labels
        self._client = _client(jvm)
        self._pods = self._client.pods().inNamespace(namespace)

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def described(self) -> list[dict] | None:
        """Return name, phase and reason of each pod, or None if Kubernetes does not respond."""
        pods = self._pods
        for name, value in self._labels.items():
            pods = pods.withLabel(name, value)
        try:
            return [_describe_pod(pod) for pod in pods.list().getItems()]
        except Exception as error:  # a private API of Spark
            logger.debug("Cannot list the pods %s: %s", self._labels, error)
            return None

    def remove(self, name: str) -> None:
        """Remove a pod without waiting for its node."""
        with contextlib.suppress(Exception):
            self._pods.withName(name).withGracePeriod(0).delete()

    def print_log(self, name: str, skipped: int) -> int:
        """Print the log of a pod until it ends or the connection breaks.

        Parameters
        ----------
        name : str
        skipped : int
            Number of lines already printed.

        Returns
        -------
        int
            Number of lines printed so far.
        """
        number = 0
        try:
            watch = self._pods.withName(name).watchLog()
            java = self._jvm.java.io
            reader = java.BufferedReader(java.InputStreamReader(watch.getOutput(), "UTF-8"))
            while (line := reader.readLine()) is not None:
                number += 1
                if number > skipped:
                    print(line, flush=True)
            watch.close()
        except Exception as error:
            logger.debug("Cannot read the log of the pod %s: %s", name, error)
        return max(number, skipped)

    def reasons(self, waited: float, timeout: float, number: int = 1) -> str:
        """Return why the pods do not start, or "" if they might only need more time.

        Parameters
        ----------
        waited : float
            Seconds since they were requested.
        timeout : float
            Seconds within which a pod must exist and be scheduled.
        number : int
            Required number of pods.
        """
        described = self.described() or []
        reasons = [start_problem(pod, waited > timeout) for pod in described]
        if len(described) < number and waited > timeout:
            count = f"only {len(described)} of {number} pods" if described else "no pod"
            reasons.append(f"{count} could be created; Spark's log has the reason")
            reasons.append(quotas(self._jvm, self.namespace))
        if waited > PODS_START_S and not any(reasons):
            reasons = [f"{pod['name']} is {pod['phase']}" for pod in described]
        return "; ".join(dict.fromkeys(filter(None, reasons)))


def _client(jvm: JVMView) -> JavaObject:
    return jvm.io.fabric8.kubernetes.client.KubernetesClientBuilder().build()


def _describe_pod(pod: JavaObject) -> dict:
    status, metadata = pod.getStatus(), pod.getMetadata()
    facts = {
        "name": metadata.getName(),
        "node": pod.getSpec().getNodeName(),
        "phase": status.getPhase(),
        "lost": _is_overdue(metadata.getDeletionTimestamp()),
    }
    for condition in status.getConditions():
        if condition.getType() == "PodScheduled" and condition.getStatus() == "False":
            facts["unscheduled"] = condition.getMessage()
    for container in status.getContainerStatuses():
        state = container.getState()
        facts["image"] = container.getImage()
        if state.getWaiting() is not None:
            facts["waiting"] = state.getWaiting().getReason()
            facts["message"] = state.getWaiting().getMessage()
        if state.getTerminated() is not None:
            facts["terminated"] = state.getTerminated().getReason()
            facts["code"] = state.getTerminated().getExitCode()
    return facts


def _is_overdue(end: str | None) -> bool:
    """Return True if a pod's deletion time and the subsequent grace period have passed."""
    if not end:
        return False
    return time.time() > datetime.fromisoformat(end).timestamp() + POD_LOST_S


def start_problem(pod: dict, is_late: bool) -> str | None:
    """Return the reason why a pod does not start, or None."""
    if pod.get("waiting") in _FATAL_STATES:
        reason = f"{pod['waiting']} of the image {pod['image']} ({pod.get('message')})"
        return f"{reason}; {_USER_ADVICE}" if "runAsNonRoot" in reason else reason
    if pod.get("unscheduled") and is_late:
        return f"no node can run {pod['name']}: {pod['unscheduled']}"
    if pod["lost"]:
        return f"{pod['name']} is terminating, but its node {pod['node']} does not confirm its end"
    if pod["phase"] == "Failed":
        return (
            f"{pod['name']} ended with exit code {pod.get('code')} ({pod.get('terminated')}); "
            f"`kubectl logs {pod['name']}` shows why"
        )
    return None


def quotas(jvm: JVMView, namespace: str) -> str:
    """Return the resource quotas of a namespace, which can prevent the creation of pods."""
    client = _client(jvm)
    try:
        resource_quotas = client.resourceQuotas().inNamespace(namespace).list().getItems()
        return "; ".join(
            f"the quota {quota.getMetadata().getName()} of the namespace {namespace} allows "
            f"{_amounts(quota.getStatus().getHard())}, of which "
            f"{_amounts(quota.getStatus().getUsed())} is used"
            for quota in resource_quotas
        )
    except Exception as error:  # the account may lack permission to list quotas
        logger.debug("Cannot list the quotas: %s", error)
        return ""
    finally:
        client.close()


def _amounts(quantities: Mapping[str, object]) -> dict[str, str]:
    return {str(name): str(value) for name, value in quantities.items()}
