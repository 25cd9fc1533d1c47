#!/usr/bin/env python3
"""Simulated hosts: network namespaces on a bridge, which can be cut off and limited.

python scripts/clusters/hosts.py start DIR [N]         # driver, host1 ... hostN (4) python
scripts/clusters/hosts.py spark DIR [CORES]     # a standalone cluster: spark://10.76.1.10:7077
python scripts/clusters/hosts.py worker DIR HOST       # the Spark worker of a host, again python
scripts/clusters/hosts.py exec DIR HOST COMMAND ARG ... python scripts/clusters/hosts.py cut DIR
HOST          # its network is down; its processes live on python scripts/clusters/hosts.py mend DIR
HOST python scripts/clusters/hosts.py limit DIR HOST RATE   # of what it sends and gets: 100mbit,
none python scripts/clusters/hosts.py delay DIR HOST MS     # of what it gets; 0 for none python
scripts/clusters/hosts.py pause DIR HOST        # SIGSTOP to all that runs there python
scripts/clusters/hosts.py resume DIR HOST python scripts/clusters/hosts.py kill DIR HOST         #
SIGKILL to all that runs there python scripts/clusters/hosts.py stop DIR              # end what
runs on them and remove them

Host n is 10.76.1.(10+n), the driver's 10.76.1.10, and this machine 10.76.1.1 to them. Nothing
leaves it: there is no route from the bridge to anywhere else. The driver's host and every second
other know their own name as 127.0.1.1, as Debian has it; the driver's and every third other have a
network before that of the bridge, with an address that all of them share, as those of containers
do. DIR/python-on-driver is a Python that runs on the driver's host, and DIR/disk is a folder of
which every host has its own. Needs root, iproute2, and iptables for delays.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
from binaries import HERE, missing
from daemons import Daemons, end_processes, java_home, run_command, spark_home

BRIDGE, NETWORK = "bigdl-hosts0", "10.76.1"
DRIVER = "driver"
_FIRST = "192.168.76.1/24"  # of the network that comes first on some hosts
_ALIVE = "hosts"  # a daemon that lives as long as the hosts
_BURST = "256kb"  # of a limited link
_QUEUE = "50ms"  # that a limited link keeps
_START_S = 60
_PORT, _PORT_OF_PAGES = 7077, 8080  # of Spark's master
_SPARK = "org.apache.spark.deploy"


def address(host: str) -> str:
    """Return the address of a host by its name, or of this machine for ``here``."""
    return f"{NETWORK}.1" if host == "here" else f"{NETWORK}.{10 + _number(host)}"


def namespace(host: str) -> str:
    return f"bigdl-{host}"


def _number(host: str) -> int:
    return 0 if host == DRIVER else int(host.removeprefix("host"))


def _link(host: str) -> str:
    return f"bigdl-veth{_number(host)}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


# -- the hosts -----------------------------------------------------------------------------------


def start(folder: Path, count: str = "4") -> None:
    if os.geteuid() or not shutil.which("ip"):
        missing("Hosts are network namespaces, which need root and iproute2")
    if other := _running_hosts():
        missing(f"One set of hosts can run here at a time, and one is in {other}; stop that first")
    stop(folder)  # what a killed start has left
    hosts = [DRIVER, *(f"host{number}" for number in range(1, int(count) + 1))]
    (folder / "disk").mkdir(parents=True, exist_ok=True)
    (folder / "hosts.json").write_text(json.dumps({host: address(host) for host in hosts}))
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("link", "set", BRIDGE, "alias", str(folder))
        _ip("addr", "add", f"{address('here')}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for host in hosts:
            _add(folder, host, hosts)
        Daemons(folder).start(_ALIVE, inside(folder, DRIVER, "sleep", "infinity"))
        python = folder / "python-on-driver"
        command = shlex.join(inside(folder, DRIVER, sys.executable))
        python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        python.chmod(0o755)
    except BaseException:
        stop(folder)
        raise
    print((folder / "hosts.json").read_text())


def _running_hosts() -> str | None:
    """Return the folder of the running hosts."""
    alias = Path("/sys/class/net", BRIDGE, "ifalias")
    folder = alias.read_text().strip() if alias.exists() else ""
    return folder if folder and Daemons(Path(folder)).process(_ALIVE) else None


def _add(folder: Path, host: str, hosts: list[str]) -> None:
    name, link = namespace(host), _link(host)
    _ip("netns", "add", name)
    # `ip netns exec` shows these files instead of those of this machine
    settings = Path("/etc/netns", name)
    settings.mkdir(parents=True, exist_ok=True)
    known = {other: address(other) for other in ("here", *hosts)}
    if _number(host) % 2 == 0:
        known[host] = "127.0.1.1"
    lines = [f"{known[other]} {other}\n" for other in known]
    (settings / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
    (settings / "hostname").write_text(f"{host}\n")
    if _number(host) % 3 == 0:
        _ip("-n", name, "link", "add", "first0", "type", "veth", "peer", "name", "first1")
        _ip("-n", name, "addr", "add", _FIRST, "dev", "first0")
        _ip("-n", name, "link", "set", "first0", "up")
        _ip("-n", name, "link", "set", "first1", "up")
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", link, "master", BRIDGE, "up")
    for command in (
        ["addr", "add", f"{address(host)}/24", "dev", "eth0"],
        ["link", "set", "eth0", "up"],
        ["link", "set", "lo", "up"],
    ):
        _ip("-n", name, *command)
    (folder / "disks" / host).mkdir(parents=True, exist_ok=True)


def inside(folder: Path, host: str, *command: str) -> list[str]:
    """Return a command line that runs on a host, with its host name and disk."""
    setting = 'hostname "$0" && mount --bind "$1/disks/$0" "$1/disk" && shift && exec "$@"'
    named = ["unshare", "--uts", "sh", "-c", setting, host, str(folder), *command]
    return ["ip", "netns", "exec", namespace(host), *named]


def execute(folder: Path, host: str, *command: str) -> None:
    """Replace this process by a command on a host."""
    os.execvp("ip", inside(folder, host, *command))


def processes(host: str) -> list[psutil.Process]:
    """Return the processes of a host."""
    pids = subprocess.run(
        ["ip", "netns", "pids", namespace(host)], capture_output=True, text=True, check=False
    )
    return [psutil.Process(int(pid)) for pid in pids.stdout.split() if psutil.pid_exists(int(pid))]


def stop(folder: Path) -> None:
    Daemons(folder).stop(patience=3)
    if _running_hosts():  # in another folder
        return
    networks = Path("/run/netns").glob("bigdl-*")  # of any start
    for host in [path.name.removeprefix("bigdl-") for path in networks]:
        end_processes(processes(host), 2)
        # a link would go with the namespace, but some time later
        for what in (["link", "del", _link(host)], ["netns", "del", namespace(host)]):
            subprocess.run(["ip", *what], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns", namespace(host)), ignore_errors=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


# -- what happens to them ------------------------------------------------------------------------


def cut(folder: Path, host: str) -> None:
    _ip("link", "set", _link(host), "down")


def mend(folder: Path, host: str) -> None:
    _ip("link", "set", _link(host), "up")


def limit(folder: Path, host: str, rate: str) -> None:
    bucket = ["tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE]
    for where, device in (([], _link(host)), (["-n", namespace(host)], "eth0")):
        queue = ["tc", *where, "qdisc"]
        of_link = ["dev", device, "root"]
        subprocess.run([*queue, "del", *of_link], capture_output=True, check=False)
        if rate != "none":
            subprocess.run([*queue, "add", *of_link, *bucket], check=True)


def delay(folder: Path, host: str, milliseconds: str) -> None:
    """Delay incoming packets; delaying outgoing ones would block TCP's sending."""
    if not shutil.which("iptables"):
        missing("Delays need iptables")
    name, daemons = f"delay-{host}", Daemons(folder)
    rule = ["-i", "eth0", "-j", "NFQUEUE", "--queue-num", "0", "--queue-bypass"]
    tables = ["ip", "netns", "exec", namespace(host), "iptables", "-t", "raw"]
    subprocess.run([*tables, "-F", "PREROUTING"], check=True)
    daemons.stop([name])
    if float(milliseconds):
        program = [sys.executable, str(HERE / "delay.py"), milliseconds]
        daemons.start(name, inside(folder, host, *program))
        log = daemons.logs / name
        daemons.await_all(lambda: "ready" in log.read_text(), _START_S)
        subprocess.run([*tables, "-A", "PREROUTING", *rule], check=True)


def pause(folder: Path, host: str) -> None:
    _signal(host, signal.SIGSTOP)


def resume(folder: Path, host: str) -> None:
    _signal(host, signal.SIGCONT)


def kill(folder: Path, host: str) -> None:
    while processes(host):
        _signal(host, signal.SIGKILL)
        time.sleep(0.01)


def _signal(host: str, number: int) -> None:
    for process in processes(host):
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


# -- Spark on them -------------------------------------------------------------------------------


def spark(folder: Path, cores: str = "2") -> None:
    """Start a master on the driver's host and a worker on every other host."""
    workers = [host for host in json.loads((folder / "hosts.json").read_text()) if host != DRIVER]
    (folder / "cores").write_text(cores)
    options = ["--host", address(DRIVER), "--port", str(_PORT), "--webui-port", str(_PORT_OF_PAGES)]
    daemons = Daemons(folder)
    command = _java(folder, DRIVER, f"{_SPARK}.master.Master", *options)
    daemons.start("master", command, **_environment(folder))
    daemons.await_all(lambda: _workers() is not None, _START_S)
    for host in workers:
        worker(folder, host)
    daemons.await_all(lambda: _workers() == len(workers), _START_S)
    print(f"spark://{address(DRIVER)}:{_PORT}")


def worker(folder: Path, host: str) -> None:
    """Start the Spark worker of a host, which registers some seconds later."""
    options = ["--host", address(host), "--cores", (folder / "cores").read_text(), "--memory", "6g"]
    options += ["--work-dir", str(folder / "disk" / "work"), "--webui-port", "0"]
    options += [f"spark://{address(DRIVER)}:{_PORT}"]
    command = _java(folder, host, f"{_SPARK}.worker.Worker", *options)
    Daemons(folder).start(f"worker-{host}", command, **_environment(folder))


def _java(folder: Path, host: str, main_class: str, *arguments: str) -> list[str]:
    java = [f"{java_home()}/bin/java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    java += ["-Dspark.worker.timeout=15"]  # seconds after which a silent worker is lost
    return inside(folder, host, *java, "-cp", f"{spark_home()}/jars/*", main_class, *arguments)


def _environment(folder: Path) -> dict[str, str]:
    (core,) = (spark_home() / "jars").glob("spark-core_*.jar")
    return {
        "SPARK_SCALA_VERSION": core.name.split("_")[1].split("-")[0],  # bin/spark-class finds it
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_DIRS": str(folder / "disk"),
    }


def _workers() -> int | None:
    """Return the number of workers of the master, or None if it does not answer."""
    try:
        url = f"http://{address(DRIVER)}:{_PORT_OF_PAGES}/json/"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["aliveworkers"]
    except (OSError, ValueError):
        return None


def main() -> None:
    commands = {
        "start": start,
        "spark": spark,
        "worker": worker,
        "exec": execute,
        "cut": cut,
        "mend": mend,
        "limit": limit,
        "delay": delay,
        "pause": pause,
        "resume": resume,
        "kill": kill,
        "stop": stop,
    }
    run_command(__doc__ or "", commands)


if __name__ == "__main__":
    main()
