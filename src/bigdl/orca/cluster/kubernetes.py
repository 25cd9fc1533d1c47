"""State of the pods of a program on Kubernetes, by Spark's own client in its JVM."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import POD_LOST_S, POD_PLACE_S, PODS_LOOK_S, PODS_START_S

if TYPE_CHECKING:
    from py4j.java_gateway import JVMView
    from pyspark import SparkContext

logger = logging.getLogger("bigdl.orca")

NAMESPACE = "spark.kubernetes.namespace"

SUBMISSION = "bigdl-submission"
"""A label of the driver's pod in cluster mode, whose value no other pod has."""

# with a pod that has no node, or with no pod at all; a cluster that adds nodes needs more
_WAITING = "spark.scheduler.maxRegisteredResourcesWaitingTime"
_HOPELESS = frozenset(  # what a container may wait for that does not come
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

_NAME_A_USER = (
    "an image needs USER with the number of a user who is not root, or runAsUser in a pod template "
    "of yours, which spark.kubernetes.executor.podTemplateFile (driver.podTemplateFile) names"
)


def await_executors(sc: SparkContext, number: int) -> None:
    """Wait until the executors of a program run; one is enough to know that they can.

    Parameters
    ----------
    sc : pyspark.SparkContext
    number : int
        Executors that were asked for.

    Raises
    ------
    UsageError
        If none can start, with what the cluster says of their pods.
    """
    patience = _patience(sc._jvm, sc.getConf().get(_WAITING))
    with _executors(sc) as pods:
        for waited in _waiting():
            if _registered(sc) > 0:
                return
            if reasons := pods.reasons(waited, patience):
                raise UsageError(
                    f"None of {number} executors has started in the namespace {pods.namespace} of "
                    f"Kubernetes: {reasons}",
                    code="cluster-refused",
                )


def shortage(sc: SparkContext) -> str:
    """Return what Kubernetes says of executors that do not come, or ""."""
    asked = int(sc.getConf().get("spark.executor.instances") or 1)
    with _executors(sc) as pods:
        return pods.reasons(PODS_START_S, 0.0, asked)


def remove_lost_executors(sc: SparkContext) -> None:
    """Remove the pods of executors that have to end, and whose node does not say that they did.

    Spark asks for no others as long as they exist, and the node may never come back.
    """
    with _executors(sc) as pods:
        for pod in pods.described() or []:
            if pod["lost"]:
                logger.warning(
                    "The node %s does not say that %s has ended; the pod is removed, so that "
                    "Spark asks for another one",
                    *(pod["node"], pod["name"]),
                )
                pods.remove(pod["name"])


def follow_driver(jvm: JVMView, properties: Mapping[str, str], label: str) -> int:
    """Print what the driver of a program in cluster mode prints, until it ends.

    Parameters
    ----------
    jvm : py4j.java_gateway.JVMView
    properties : mapping of str to str
        Spark's.
    label : str
        The pod's `SUBMISSION`.

    Returns
    -------
    int
        The exit code of the program.

    Raises
    ------
    UsageError
        If the driver cannot start, or its pod goes away.
    """
    namespace = properties.get(NAMESPACE, "default")
    where = f"in the namespace {namespace} of Kubernetes"
    patience = _patience(jvm, properties.get(_WAITING))
    with Pods(jvm, namespace, {SUBMISSION: label}) as pods:
        for waited in _waiting():
            described = pods.described()
            if described and described[0]["phase"] != "Pending":
                break
            if reasons := pods.reasons(waited, patience):
                for pod in described or []:
                    pods.remove(pod["name"])
                raise UsageError(
                    f"The driver has not started {where}: {reasons}", code="cluster-refused"
                )
        name, lines = described[0]["name"], 0
        logger.info("The program runs in the pod %s %s", name, where)
        while described is None or described[0]["phase"] == "Running":
            lines = pods.print_log(name, lines)
            time.sleep(PODS_LOOK_S)  # a log ends a moment before its pod
            described = pods.described()
            if described == [] or (described and described[0]["lost"]):
                raise UsageError(
                    f"The pod {name} of the driver went away {where}", code="worker-lost"
                )
        pods.print_log(name, lines)
        code = described[0].get("code")
        return int(described[0]["phase"] != "Succeeded") if code is None else code


def _patience(jvm: JVMView, asked: str | None) -> float:
    times = jvm.org.apache.spark.network.util.JavaUtils
    return float(times.timeStringAsSec(asked)) if asked else POD_PLACE_S


def _waiting() -> Iterator[float]:
    """Yield the seconds since the begin, again and again."""
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
    """The pods of a namespace that have some labels.

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
        """Return name, phase and reason of each pod, or None if Kubernetes does not answer."""
        pods = self._pods
        for name, value in self._labels.items():
            pods = pods.withLabel(name, value)
        try:
            return [_described(pod) for pod in pods.list().getItems()]
        except Exception as error:  # Spark's own client: an internal API here
            logger.debug("Cannot list the pods %s: %s", self._labels, error)
            return None

    def remove(self, name: str) -> None:
        """Remove a pod without a word from its node."""
        with contextlib.suppress(Exception):
            self._pods.withName(name).withGracePeriod(0).delete()

    def print_log(self, name: str, skipped: int) -> int:
        """Print the log of a pod until its end, or until the connection breaks.

        Parameters
        ----------
        name : str
        skipped : int
            Lines that have been printed before.

        Returns
        -------
        int
            Lines that have been printed by now.
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

    def reasons(self, waited: float, patience: float, number: int = 1) -> str:
        """Return why the pods do not start, or "" if that may only take some time.

        Parameters
        ----------
        waited : float
            Seconds since they were asked for.
        patience : float
            Seconds in which a pod must exist and have a node.
        number : int
            Pods that must exist.
        """
        described = self.described() or []
        reasons = [trouble_of(pod, waited > patience) for pod in described]
        if len(described) < number and waited > patience:
            count = f"only {len(described)} of {number} pods" if described else "no pod"
            reasons.append(f"{count} could be created, and Spark's log says why")
            reasons.append(quotas(self._jvm, self.namespace))
        if waited > PODS_START_S and not any(reasons):
            reasons = [f"{pod['name']} is {pod['phase']}" for pod in described]
        return "; ".join(dict.fromkeys(filter(None, reasons)))


def _client(jvm: JVMView) -> Any:
    return jvm.io.fabric8.kubernetes.client.KubernetesClientBuilder().build()


def _described(pod: Any) -> dict:
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
    """Return True if a pod should have ended by now, by the time at which it had to."""
    if not end:
        return False
    return time.time() > datetime.fromisoformat(end).timestamp() + POD_LOST_S


def trouble_of(pod: dict, is_late: bool) -> str | None:
    """Return the reason why a pod does not start, if it does not."""
    if pod.get("waiting") in _HOPELESS:
        reason = f"{pod['waiting']} of the image {pod['image']} ({pod.get('message')})"
        return f"{reason}; {_NAME_A_USER}" if "runAsNonRoot" in reason else reason
    if pod.get("unscheduled") and is_late:
        return f"no node has room for {pod['name']}: {pod['unscheduled']}"
    if pod["lost"]:
        return f"{pod['name']} has to end, but its node {pod['node']} does not say that it has"
    if pod["phase"] == "Failed":
        return (
            f"{pod['name']} ended with exit code {pod.get('code')} ({pod.get('terminated')}); "
            f"`kubectl logs {pod['name']}` shows why"
        )
    return None


def quotas(jvm: JVMView, namespace: str) -> str:
    """Return what the quotas of a namespace allow, which may be why there are no pods."""
    client = _client(jvm)
    try:
        resource_quotas = client.resourceQuotas().inNamespace(namespace).list().getItems()
        return "; ".join(
            f"the quota {quota.getMetadata().getName()} of the namespace {namespace} allows "
            f"{_amounts(quota.getStatus().getHard())}, of which "
            f"{_amounts(quota.getStatus().getUsed())} is used"
            for quota in resource_quotas
        )
    except Exception as error:  # the account may not look at quotas
        logger.debug("Cannot list the quotas: %s", error)
        return ""
    finally:
        client.close()


def _amounts(quantities: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in quantities.items()}
