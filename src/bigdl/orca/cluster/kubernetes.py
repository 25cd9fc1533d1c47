"""What Kubernetes says of the executors of a program, by Spark's own client in its JVM."""

import logging
import time
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from pyspark import SparkContext

logger = logging.getLogger("bigdl.orca")

NAMESPACE = "spark.kubernetes.namespace"

START_S = 600.0
"""Seconds in which executors must start; an image may have to be pulled."""

_PATIENCE_S = 60.0  # with a pod that has no node, or with no pod at all
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


def await_executors(sc: "SparkContext", number: int) -> None:
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
    namespace = sc.getConf().get(NAMESPACE) or "default"
    begin = time.monotonic()
    while _registered(sc) < 1:
        waited = time.monotonic() - begin
        pods = _pods(sc, namespace)
        reasons = dict.fromkeys(each for pod in pods if (each := _trouble(pod, waited)))
        if not pods and waited > _PATIENCE_S:
            none = "no pod could be created, and Spark's log says why"
            reasons = dict.fromkeys(filter(None, [none, quotas(sc._jvm, namespace)]))
        if waited > START_S and not reasons:
            reasons = dict.fromkeys(f"{pod['name']} is {pod['phase']}" for pod in pods)
        if reasons:
            raise UsageError(
                f"None of {number} executors has started in the namespace {namespace} of "
                f"Kubernetes: {'; '.join(reasons)}"
            )
        time.sleep(0.5)


def _registered(sc: "SparkContext") -> int:
    return len(sc._jsc.sc().statusTracker().getExecutorInfos()) - 1  # type: ignore[union-attr]


def _client(jvm: Any) -> Any:
    return jvm.io.fabric8.kubernetes.client.KubernetesClientBuilder().build()


def _pods(sc: "SparkContext", namespace: str) -> list[dict]:
    """Name, phase and reason of each executor's pod."""
    client = _client(sc._jvm)
    try:
        pods = client.pods().inNamespace(namespace).withLabel("spark-role", "executor")
        mine = pods.withLabel("spark-app-selector", sc.applicationId).list().getItems()
        return [_described(pod) for pod in mine]
    except Exception as error:  # Spark's own client: an internal API here
        logger.debug("Cannot list the pods of the executors: %s", error)
        return []
    finally:
        client.close()


def _described(pod: Any) -> dict:
    status = pod.getStatus()
    found = {"name": pod.getMetadata().getName(), "phase": status.getPhase()}
    for condition in status.getConditions():
        if condition.getType() == "PodScheduled" and condition.getStatus() == "False":
            found["unscheduled"] = condition.getMessage()
    for container in status.getContainerStatuses():
        state = container.getState()
        found["image"] = container.getImage()
        if state.getWaiting() is not None:
            found["waiting"] = state.getWaiting().getReason()
            found["message"] = state.getWaiting().getMessage()
        if state.getTerminated() is not None:
            found["terminated"] = state.getTerminated().getReason()
            found["code"] = state.getTerminated().getExitCode()
    return found


def _trouble(pod: dict, waited: float) -> str | None:
    """Why a pod does not start, if it does not."""
    if pod.get("waiting") in _HOPELESS:
        return f"{pod['waiting']} of the image {pod['image']} ({pod.get('message')})"
    if pod.get("unscheduled") and waited > _PATIENCE_S:
        return f"no node has room for {pod['name']}: {pod['unscheduled']}"
    if pod["phase"] == "Failed":
        return (
            f"{pod['name']} ended with exit code {pod.get('code')} ({pod.get('terminated')}); "
            f"`kubectl logs {pod['name']}` shows why"
        )
    return None


def quotas(jvm: Any, namespace: str) -> str:
    """What the quotas of a namespace allow, which may be why there are no pods."""
    client = _client(jvm)
    try:
        found = client.resourceQuotas().inNamespace(namespace).list().getItems()
        return "; ".join(
            f"the quota {quota.getMetadata().getName()} of the namespace {namespace} allows "
            f"{_amounts(quota.getStatus().getHard())}, of which "
            f"{_amounts(quota.getStatus().getUsed())} is used"
            for quota in found
        )
    except Exception as error:  # the account may not look at quotas
        logger.debug("Cannot list the quotas: %s", error)
        return ""
    finally:
        client.close()


def _amounts(quantities: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in quantities.items()}
