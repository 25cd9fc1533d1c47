#!/usr/bin/env python3
"""Local HDFS and YARN: a NameNode, a DataNode, a ResourceManager and two NodeManagers.

python scripts/clusters/yarn.py start DIR       # format HDFS, start the daemons, wait for them
python scripts/clusters/yarn.py status DIR      # a line for each daemon; 1 unless all are ready
python scripts/clusters/yarn.py stop DIR        # end the daemons and what runs in containers
python scripts/clusters/yarn.py kill DIR NAME   # a daemon, e.g. nm2; its containers live on
python scripts/clusters/yarn.py run DIR NAME    # a daemon that was killed, again
python scripts/clusters/yarn.py cli DIR fs|application|logs|node|CLASS ARG ...

DIR/conf is HADOOP_CONF_DIR, and DIR/urls.json has the addresses. The NodeManagers are on 127.0.0.2
and 127.0.0.3, so that Spark sees two hosts. The JARs come from BIGDL_CLUSTERS or by Maven.
"""

import json
import os
import subprocess
import urllib.request
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

import psutil
from binaries import HERE, by_maven, find
from daemons import Daemons, end_processes, free_ports, java_home, run_command, spark_home

NODES = {"nm1": "127.0.0.2", "nm2": "127.0.0.3"}
_YARN = "org.apache.hadoop.yarn.server"
_NODE_MANAGER = f"{_YARN}.nodemanager.NodeManager"
_NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DAEMONS = {  # main class and MB of the heap
    "resourcemanager": (f"{_YARN}.resourcemanager.ResourceManager", 384),
    **dict.fromkeys(NODES, (_NODE_MANAGER, 256)),
    "datanode": ("org.apache.hadoop.hdfs.server.datanode.DataNode", 256),
    "namenode": (_NAME_NODE, 256),
}
COMMANDS = {
    "fs": ["org.apache.hadoop.fs.FsShell"],
    "application": ["org.apache.hadoop.yarn.client.cli.ApplicationCLI", "application"],
    "logs": ["org.apache.hadoop.yarn.client.cli.LogsCLI"],
    "node": ["org.apache.hadoop.yarn.client.cli.NodeCLI"],
}
_LIBRARIES = (
    "hadoop-client-api",
    "hadoop-client-runtime",
    "slf4j-api",
    "jcl-over-slf4j",
    "log4j-",
)
_OF_SHUFFLE = (  # what SparkShuffleAux runs on
    "spark-network-",
    "spark-common-utils",
    "netty-",
    "jackson-",
    "metrics-core",
    "commons-lang3",
    "scala-library",
    "guava",
    "failureaccess",
)
_START_S = 300


def _jars_of_spark(*names: str) -> list[str]:
    folder = spark_home() / "jars"
    return [str(jar) for name in names for jar in sorted(folder.glob(f"{name}*.jar"))]


def _fetch(folder: Path) -> None:
    by_maven(HERE / "yarn.pom.xml", folder)
    path = ":".join([*map(str, folder.glob("*.jar")), *_jars_of_spark(*_LIBRARIES, *_OF_SHUFFLE)])
    source = str(HERE / "SparkShuffleAux.java")
    subprocess.run(["javac", "-cp", path, "-d", str(folder / "classes"), source], check=True)
    jar = ["jar", "cf", str(folder / "spark-shuffle-aux.jar"), "-C", str(folder / "classes"), "."]
    subprocess.run(jar, check=True)


@cache
def jars() -> Path:
    return find("yarn/jars", _fetch)


def java(folder: Path, main: str, heap: int, *arguments: str, **properties: str) -> list[str]:
    """Return the command of a Hadoop JVM."""
    libraries = [*_LIBRARIES, *(_OF_SHUFFLE if main == _NODE_MANAGER else [])]
    path = [folder / "conf", folder / "web", *sorted(jars().glob("*.jar"))]
    return [
        f"{java_home()}/bin/java",
        f"-Xmx{heap}m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Djava.net.preferIPv4Stack=true",
        "-cp",
        ":".join([*map(str, path), *_jars_of_spark(*libraries)]),
        *(f"-D{name.replace('_', '.')}={value}" for name, value in properties.items()),
        main,
        *arguments,
    ]


# -- settings ----------------------------------------------------------------------------------


def configure(folder: Path) -> None:
    """Write the settings of all daemons, with free ports."""
    name_node, name_node_http, *ports, rm_http, shuffle = free_ports(8)
    ip, conf = "127.0.0.1", folder / "conf"
    conf.mkdir(parents=True)
    # Empty web applications, found before those in the JARs, which Jetty would unpack by reading
    # through 50 MB; /jmx, /ws and /webhdfs need no files.
    for app in ("static", "hdfs", "datanode", "cluster", "node"):
        (folder / "web" / "webapps" / app).mkdir(parents=True)
    hdfs = f"hdfs://{ip}:{name_node}"
    _write(conf / "core-site.xml", {"fs.defaultFS": hdfs, "hadoop.tmp.dir": str(folder / "tmp")})
    _write(
        conf / "hdfs-site.xml",
        {
            "dfs.replication": 1,
            "dfs.namenode.http-address": f"{ip}:{name_node_http}",
            "dfs.namenode.name.dir": f"file://{folder}/name",
            "dfs.namenode.safemode.extension": 0,
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.datanode.data.dir": f"file://{folder}/data",
            "dfs.datanode.hostname": ip,
            "dfs.datanode.address": f"{ip}:0",
            "dfs.datanode.http.address": f"{ip}:0",
            "dfs.datanode.ipc.address": f"{ip}:0",
        },
    )
    _write(conf / "yarn-site.xml", _yarn_settings(ip, ports, rm_http, shuffle))
    queues = {
        "root.queues": "default,small",
        "root.default.capacity": 75,
        "root.default.maximum-capacity": 100,
        "root.small.capacity": 25,
        "root.small.maximum-capacity": 100,
        "root.small.user-limit-factor": 4,  # so one user may have all of it, too
        "maximum-am-resource-percent": "0.5",
        "resource-calculator": "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator",
    }
    settings = {f"yarn.scheduler.capacity.{name}": value for name, value in queues.items()}
    _write(conf / "capacity-scheduler.xml", settings)
    (conf / "log4j2.properties").write_text(
        "rootLogger.level = ${sys:log.level:-warn}\nrootLogger.appenderRef.a.ref = err\n"
        "appender.a.type = Console\nappender.a.name = err\nappender.a.target = SYSTEM_ERR\n"
        "appender.a.layout.type = PatternLayout\n"
        "appender.a.layout.pattern = %d{ISO8601} %p %c{1}: %m%n%ex\n"
    )
    urls = {
        "hdfs": hdfs,
        "webhdfs": f"http://{ip}:{name_node_http}",
        "yarn": f"http://{ip}:{rm_http}",
    }
    (folder / "urls.json").write_text(json.dumps(urls))


def _yarn_settings(ip: str, ports: list[int], http: int, shuffle: int) -> dict[str, object]:
    names = ("address", "scheduler.address", "resource-tracker.address", "admin.address")
    manager = {
        **{name: f"{ip}:{port}" for name, port in zip(names, ports, strict=True)},
        "hostname": ip,
        "webapp.address": f"{ip}:{http}",
        "scheduler.class": f"{_YARN}.resourcemanager.scheduler.capacity.CapacityScheduler",
        "nodemanagers.heartbeat-interval-ms": 200,
        "scheduler.monitor.enable": "true",
    }
    preemption = {
        "monitoring_interval": 500,
        "max_wait_before_kill": 1000,
        "total_preemption_per_round": "1.0",
        "natural_termination_factor": "1.0",
    }
    node = {  # ${nm.*} are properties of each NodeManager's JVM
        "hostname": "${nm.host}",
        "address": "${nm.host}:0",
        "localizer.address": "${nm.host}:0",
        "webapp.address": "${nm.host}:0",
        "local-dirs": "${nm.dir}/local",
        "log-dirs": "${nm.dir}/logs",
        "resource.memory-mb": 6144,
        "resource.cpu-vcores": 4,
        "container-executor.class": f"{_YARN}.nodemanager.DefaultContainerExecutor",
        "vmem-check-enabled": "false",
        "pmem-check-enabled": "true",
        "resource.memory.enforced": "false",  # else it is left to cgroups, which are not used
        "disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
        "disk-health-checker.min-free-space-per-disk-mb": 0,
        "remote-app-log-dir": "/tmp/logs",
    }
    service = {}
    if (jars() / "spark-shuffle-aux.jar").exists():
        node["aux-services"] = "spark_shuffle"
        node["aux-services.spark_shuffle.class"] = "SparkShuffleAux"
        service["spark.shuffle.service.port"] = shuffle
    monitor = "yarn.resourcemanager.monitor.capacity.preemption"
    return {
        **{f"yarn.resourcemanager.{name}": value for name, value in manager.items()},
        **{f"{monitor}.{name}": value for name, value in preemption.items()},
        **{f"yarn.nodemanager.{name}": value for name, value in node.items()},
        **service,
        "yarn.nm.liveness-monitor.expiry-interval-ms": 15_000,
        "yarn.am.liveness-monitor.expiry-interval-ms": 180_000,  # it unpacks an environment
        "yarn.scheduler.minimum-allocation-mb": 256,
        "yarn.scheduler.maximum-allocation-mb": 6144,
        "yarn.log-aggregation-enable": "true",
    }


def _write(path: Path, settings: Mapping[str, object]) -> None:
    lines = [
        f"  <property><name>{name}</name><value>{escape(str(value))}</value></property>"
        for name, value in settings.items()
    ]
    path.write_text("\n".join(["<configuration>", *lines, "</configuration>", ""]))


# -- commands ----------------------------------------------------------------------------------


def run(folder: Path, name: str) -> None:
    """Start one daemon."""
    main, heap = DAEMONS[name]
    node = {"nm_host": NODES[name], "nm_dir": str(folder / name)} if name in NODES else {}
    command = java(folder, main, heap, log_level="info", **node)
    Daemons(folder).start(name, command, **_environment(folder))


def _environment(folder: Path) -> dict[str, str]:
    return {"JAVA_HOME": str(java_home()), "HADOOP_CONF_DIR": str(folder / "conf")}


def start(folder: Path) -> None:
    if (folder / "conf").exists():
        raise SystemExit(f"{folder} holds a cluster already")
    jars()  # or there is nothing to start, and nothing is to be left
    configure(folder)
    os.umask(0o022)
    daemons = Daemons(folder)
    try:
        for name in list(DAEMONS)[:-1]:
            run(folder, name)
        command = java(folder, _NAME_NODE, 256, "-format", "-nonInteractive", log_level="info")
        with open(daemons.logs / "format", "wb") as log:
            variables = {**os.environ, **_environment(folder)}
            subprocess.run(command, stdout=log, stderr=log, env=variables, check=True)
        run(folder, "namenode")
        daemons.await_all(lambda: all(state(folder).values()), _START_S)
    except BaseException:
        stop(folder)
        raise
    print(f"HADOOP_CONF_DIR={folder / 'conf'}")


def state(folder: Path) -> dict[str, bool]:
    """Return whether each daemon, and the cluster as a whole, is ready."""
    daemons = Daemons(folder)
    states = {name: daemons.process(name) is not None for name in DAEMONS}
    urls = json.loads((folder / "urls.json").read_text())
    query = "/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
    beans = _answer(urls["webhdfs"] + query).get("beans") or [{}]
    states["hdfs"] = beans[0].get("NumLiveDataNodes", 0) > 0 and (
        beans[0].get("FSState") == "Operational"
    )
    metrics = _answer(urls["yarn"] + "/ws/v1/cluster/metrics").get("clusterMetrics", {})
    states["yarn"] = metrics.get("activeNodes") == len(NODES)
    return states


def _answer(url: str) -> dict:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return {}


def status(folder: Path) -> None:
    states = state(folder)
    for name, is_ready in states.items():
        print(f"{name}: {'ready' if is_ready else 'not ready'}")
    raise SystemExit(not all(states.values()))


def kill(folder: Path, name: str) -> None:
    Daemons(folder).kill(name)


def stop(folder: Path) -> None:
    Daemons(folder).stop(patience=3)  # a NodeManager looks for its ResourceManager for long
    end_processes(containers(folder), 1)


def cli(folder: Path, name: str, *arguments: str) -> None:
    """Replace this process by a Hadoop command."""
    main_class, *first = COMMANDS.get(name, [name])
    command = java(folder, main_class, 256, *first, *arguments)
    os.execve(command[0], command, {**os.environ, **_environment(folder)})


def containers(folder: Path) -> list[psutil.Process]:
    """Return the container processes, which outlive a killed NodeManager."""
    nodes = tuple(f"{folder}/{name}/" for name in NODES)
    processes = []
    for process in psutil.process_iter():
        try:
            of_container = process.environ().get("LOCAL_DIRS", "").startswith(nodes)
            if of_container or process.cwd().startswith(nodes):
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


def main() -> None:
    commands = {
        "start": start,
        "status": status,
        "stop": stop,
        "kill": kill,
        "run": run,
        "cli": cli,
    }
    run_command(__doc__ or "", commands)


if __name__ == "__main__":
    main()
