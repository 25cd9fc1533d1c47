#!/usr/bin/env python3
"""Local Kafka broker in KRaft mode.

python scripts/clusters/kafka.py start DIR    # prints host:port; the data of an earlier one stay
python scripts/clusters/kafka.py kill DIR     # at once, as a crash does
python scripts/clusters/kafka.py stop DIR     # the data stay
python scripts/clusters/kafka.py status DIR   # 1 unless it answers

A topic is created with four partitions when it is first used. The JARs come from BIGDL_CLUSTERS or
by Maven, and those that Kafka shares with Spark from pyspark.
"""

import socket
import subprocess
from pathlib import Path

from binaries import HERE, by_maven, find
from daemons import Daemons, free_ports, java_home, run_command, spark_home

BROKER = "broker"
_START_S = 60
_SETTINGS = """process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}/data
num.partitions=4
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def java(*arguments: str) -> list[str]:
    jars = find("kafka/broker", lambda folder: by_maven(HERE / "kafka.pom.xml", folder))
    path = f"{jars}/*:{spark_home()}/jars/*"
    return [f"{java_home()}/bin/java", "-Xmx512m", "-XX:+UseSerialGC", "-cp", path, *arguments]


def start(folder: Path) -> None:
    settings = folder / "server.properties"
    if not settings.exists():
        folder.mkdir(parents=True, exist_ok=True)
        port, controller = free_ports(2)
        (folder / "address").write_text(f"127.0.0.1:{port}")
        settings.write_text(_SETTINGS.format(port=port, controller=controller, folder=folder))
        tool = java("kafka.tools.StorageTool")
        made = subprocess.run([*tool, "random-uuid"], capture_output=True, text=True, check=True)
        name = made.stdout.split()[-1]
        command = [*tool, "format", "-t", name, "-c", str(settings), "--standalone"]
        subprocess.run(command, check=True, capture_output=True)
    daemons = Daemons(folder)
    if daemons.process(BROKER):
        raise SystemExit(f"The broker in {folder} runs already")
    daemons.start(BROKER, java("kafka.Kafka", str(settings)))
    try:
        daemons.await_all(lambda: answers(folder), _START_S)
    except BaseException:
        stop(folder)
        raise
    print((folder / "address").read_text())


def answers(folder: Path) -> bool:
    host, port = (folder / "address").read_text().split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def status(folder: Path) -> None:
    is_up = Daemons(folder).process(BROKER) is not None and answers(folder)
    print("ready" if is_up else "not ready")
    raise SystemExit(not is_up)


def kill(folder: Path) -> None:
    Daemons(folder).kill(BROKER)


def stop(folder: Path) -> None:
    Daemons(folder).stop(patience=20)


def main() -> None:
    commands = {"start": start, "status": status, "kill": kill, "stop": stop}
    run_command(__doc__ or "", commands)


if __name__ == "__main__":
    main()
