"""Validation and normalization of the arguments of ``init_orca_context``."""

from __future__ import annotations

import difflib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.common.platform.memory import total_memory
from bigdl.orca.cluster.submit import family

logger = logging.getLogger("bigdl.orca")

SUBMIT_MODES = ("spark-submit", "bigdl-submit")
CONNECT_MODES = ("spark-connect", "connect")
CLUSTER_MODES = (
    "local",
    "yarn",
    "yarn-client",
    "yarn-cluster",
    "k8s",
    "k8s-client",
    "k8s-cluster",
    "standalone",
    *SUBMIT_MODES,
    *CONNECT_MODES,
)
RUNTIMES = ("spark", "ray")
LOG_LEVELS = ("ALL", "DEBUG", "ERROR", "FATAL", "INFO", "OFF", "TRACE", "WARN")

# Arguments of `**kwargs` for every mode and for Ray; CLUSTER_OPTIONS has those of clusters.
COMMON_OPTIONS = ("conf", "spark_log_level", "redirect_spark_log")
RAY_OPTIONS = (
    "redis_port",
    "redis_password",
    "password",
    "object_store_memory",
    "verbose",
    "env",
    "extra_params",
    "num_ray_nodes",
    "ray_node_cpu_cores",
    "include_webui",
    "system_config",
)
# These have an effect in every mode that starts Spark.
MEANT_FOR_ALL = ("cores", "memory", "conf", "num_nodes", "python_location")

CORES_OF_A_NODE = 2
"""Default cores of an executor; the driver's cores do not tell those of cluster nodes."""

SMALLEST_MEMORY = 512 * 2**20
"""Smallest heap in bytes: Spark needs 450 MiB, and the JVM uses a part of the heap."""


def refuse_what_cannot_start(mode: str, conf: Mapping[str, str]) -> None:
    master = conf.get("spark.master", "local")
    if mode == "local" and not master.startswith("local"):
        raise UsageError(
            f'cluster_mode="local" cannot use spark.master={master} of conf: pass the '
            'cluster_mode of that cluster, such as "standalone", and master',
            code="argument-conflict",
            argument="cluster_mode",
        )
    refuse_spark_connect()


def refuse_spark_connect() -> None:
    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_API_MODE"):
        value = os.environ.get(name)
        if value and (name != "SPARK_API_MODE" or value.lower() == "connect"):
            raise UsageError(
                f"This cluster_mode starts a classic Spark session, but {name}={value} requests "
                f'Spark Connect: unset {name}, or pass cluster_mode="spark-connect"',
                code="cluster-config",
                argument=name,
            )


def warn_ignored(names: set[str], reason: str) -> None:
    if names:
        logger.warning("%s: no effect, because %s.", ", ".join(sorted(names)), reason)


def check_cluster_mode(value: object) -> str:
    return check_name("cluster_mode", "local" if value is None else value, CLUSTER_MODES)


def check_runtime(runtime: object, cluster_mode: object, init_ray_on_spark: object) -> str:
    name = check_name("runtime", runtime, RUNTIMES)
    check_flag("init_ray_on_spark", init_ray_on_spark)
    if name == "ray" and cluster_mode is not None:
        raise UsageError(
            'Currently, cluster_mode is not supported for runtime="ray", but got '
            f"{cluster_mode!r}: leave it out, and pass address to connect to a Ray cluster",
            code="argument-conflict",
            argument="cluster_mode",
        )
    return name


def check_names(kwargs: Mapping[str, Any]) -> None:
    known = (*COMMON_OPTIONS, *RAY_OPTIONS, *CLUSTER_OPTIONS)
    named = ("cluster_mode", "runtime", "cores", "memory", "num_nodes", "init_ray_on_spark")
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, *named), n=1, cutoff=0.0)
            raise UsageError(
                f"init_orca_context has no argument {name!r}: did you mean {near[0]!r}?",
                code="argument-unknown",
                argument=name,
            )


def check_memory(value: object, name: str = "memory", least: int = SMALLEST_MEMORY) -> str:
    """Validate a memory size and return it in the format of Spark and ``java -Xmx``."""
    match = isinstance(value, str) and re.fullmatch(r"\s*(\d+)\s*([kmgt])b?\s*", value.lower())
    if not match:
        raise UsageError(
            f"{name} must be an integer and a unit of k, m, g or t, such as "
            f'"2g" or "1536m", but got {value!r}',
            code="argument-value",
            argument=name,
        )
    number, unit = int(match[1]), match[2]
    if number * 2 ** (10 * ("kmgt".index(unit) + 1)) < least:
        raise UsageError(
            f'{name} must be at least "512m" for Spark to start, but got {value!r}',
            code="argument-value",
            argument=name,
        )
    return f"{number}{unit}"


def warn_of_memory(value: str) -> None:
    """Log a warning if a heap size exceeds the memory of this machine."""
    wanted = int(value[:-1]) * 2 ** (10 * ("kmgt".index(value[-1]) + 1))
    total = total_memory()
    if wanted > total:
        logger.warning(
            "memory=%r is more than the %dg of this machine, which runs Spark: the system kills "
            "Spark when it uses them; pass a smaller memory",
            value,
            total >> 30,
        )


def check_conf(value: object) -> dict[str, str]:
    """Validate Spark properties and convert their values to strings."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(
            'conf must be a dict of Spark properties, such as {"spark.ui.enabled": "true"}, '
            f"but got {value!r}",
            code="argument-type",
            argument="conf",
        )
    return {
        key: str(item).lower() if isinstance(item, bool) else str(item)
        for key, item in value.items()
    }


def check_log_level(value: Any) -> str:  # value: unchecked
    value = value.upper() if isinstance(value, str) else value
    return check_choice("spark_log_level", value, LOG_LEVELS)


def check_python(location: object, conf: Mapping[str, str]) -> str:
    if location is None:
        return conf.get("spark.pyspark.python", sys.executable)
    program = shutil.which(os.fspath(location)) if isinstance(location, str | os.PathLike) else None
    if program is None:
        raise UsageError(
            f"python_location must be the path of a Python interpreter, but got {location!r}",
            code="argument-value",
            argument="python_location",
        )
    return os.path.abspath(program)  # keeps links, which may belong to a virtual environment


def check_cluster_options(mode: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the arguments of a cluster mode; treat None as not passed."""
    wanted = "connect" if mode in CONNECT_MODES else family(mode)
    return {
        name: check(name, kwargs[name])
        for name, (families, check) in CLUSTER_OPTIONS.items()
        if wanted in families and kwargs.get(name) is not None
    }


def check_name(name: str, value: Any, choices: tuple[str, ...]) -> str:  # value: unchecked
    return check_choice(name, value.lower() if isinstance(value, str) else value, choices)


def check_text(name: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise UsageError(
            f"{name} must be a string, but got {value!r}", code="argument-type", argument=name
        )
    return os.fspath(value)


def _check_list(name: str, value: object) -> str:
    """Validate a list of files, passed as a sequence or a comma-separated string."""
    entries = value if isinstance(value, list | tuple | set) else [value]
    return ",".join(check_text(name, each) for each in entries)


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(
            f"{name} must be True or False, but got {value!r}", code="argument-type", argument=name
        )
    return value


def _check_file(name: str, value: object) -> str:
    text = check_text(name, value)
    path = text.partition("#")[0].removeprefix("file://")
    if "://" not in path and not os.path.exists(path):
        raise UsageError(
            f"{name} must be the path of a file, but {path!r} does not exist",
            code="path-missing",
            argument=name,
            path=path,
        )
    return text


def _check_directory(name: str, value: object) -> str:
    text = check_text(name, value)
    if not os.path.isdir(text):
        raise UsageError(
            f"{name} must be a directory, but {text!r} is not",
            code="path-missing",
            argument=name,
            path=text,
        )
    return os.path.abspath(text)


_CLUSTERS = ("yarn", "k8s", "standalone")

CLUSTER_OPTIONS: dict[str, tuple[tuple[str, ...], Callable[[str, Any], Any]]] = {
    "additional_archive": (("yarn",), _check_list),
    "conda_name": (("yarn",), check_text),
    "container_image": (("k8s",), check_text),
    "driver_cores": (_CLUSTERS, check_positive),
    "driver_memory": (_CLUSTERS, lambda name, value: check_memory(value, name)),
    "enable_numa_binding": (("standalone",), check_flag),
    "extra_executor_memory_for_ray": (
        _CLUSTERS,
        lambda name, value: check_memory(value, name, least=1),
    ),
    "extra_python_lib": (_CLUSTERS, _check_list),
    "hadoop_conf": (("yarn",), _check_directory),
    "hadoop_user_name": (("yarn",), check_text),
    "jars": (_CLUSTERS, _check_list),
    "master": (("k8s", "standalone", "connect"), check_text),
    "penv_archive": (("yarn", "k8s"), _check_file),
    "python_location": (_CLUSTERS, check_text),
    "spark_yarn_archive": (("yarn",), check_text),
}
"""Cluster families that each argument of ``**kwargs`` applies to, and its validation."""
