#!/usr/bin/env python3
"""Hosts on this machine: network namespaces on a bridge, which can be cut off and limited.

python scripts/clusters/hosts.py start DIR [N]         # host1 ... hostN (4), at 10.76.1.11 and on
python scripts/clusters/hosts.py exec DIR HOST COMMAND ARG ...
python scripts/clusters/hosts.py cut DIR HOST          # its network is down; its processes live on
python scripts/clusters/hosts.py mend DIR HOST
python scripts/clusters/hosts.py limit DIR HOST RATE   # of what it sends and gets, e.g. 100mbit
python scripts/clusters/hosts.py stop DIR              # end what runs on them and remove them

Needs root and iproute2. This machine is 10.76.1.1 to them. Nothing leaves it: there is no route
from the bridge to anywhere else.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil
from binaries import missing
from daemons import end_processes, run_command

BRIDGE, NETWORK = "bigdl-hosts0", "10.76.1"
_BURST = "256kb"  # of a limited link
_QUEUE = "50ms"  # that a limited link keeps


def address(host: str) -> str:
    """The address of a host by its name, or of this machine as ``here``."""
    return f"{NETWORK}.1" if host == "here" else f"{NETWORK}.{10 + _number(host)}"


def namespace(host: str) -> str:
    return f"bigdl-{host}"


def _number(host: str) -> int:
    return int(host.removeprefix("host"))


def _link(host: str) -> str:
    return f"bigdl-veth{_number(host)}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def start(folder: Path, count: str = "4") -> None:
    if os.geteuid() or not shutil.which("ip"):
        missing("Hosts are network namespaces, which need root and iproute2")
    if Path("/sys/class/net", BRIDGE).exists():
        raise SystemExit(f"There are hosts already: {BRIDGE} is up; stop them first")
    hosts = [f"host{number}" for number in range(1, int(count) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts.json").write_text(json.dumps({host: address(host) for host in hosts}))
    names = "".join(f"{address(host)} {host}\n" for host in hosts)
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{address('here')}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for host in hosts:
            _add(host, names)
    except BaseException:
        stop(folder)
        raise
    print((folder / "hosts.json").read_text())


def _add(host: str, names: str) -> None:
    inside, link = namespace(host), _link(host)
    _ip("netns", "add", inside)
    # `ip netns exec` shows these files in the place of those of this machine
    settings = Path("/etc/netns", inside)
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "hosts").write_text(f"127.0.0.1 localhost\n{address('here')} here\n{names}")
    (settings / "hostname").write_text(f"{host}\n")
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", inside)
    _ip("link", "set", link, "master", BRIDGE, "up")
    for command in (
        ["addr", "add", f"{address(host)}/24", "dev", "eth0"],
        ["link", "set", "eth0", "up"],
        ["link", "set", "lo", "up"],
    ):
        _ip("-n", inside, *command)


def execute(folder: Path, host: str, *command: str) -> None:
    """Replace this process by a command on a host, whose name is the host's."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host, *command]
    os.execvp("ip", ["ip", "netns", "exec", namespace(host), *named])


def cut(folder: Path, host: str) -> None:
    _ip("link", "set", _link(host), "down")


def mend(folder: Path, host: str) -> None:
    _ip("link", "set", _link(host), "up")


def limit(folder: Path, host: str, rate: str) -> None:
    bucket = ["root", "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE]
    subprocess.run(["tc", "qdisc", "replace", "dev", _link(host), *bucket], check=True)
    inside = ["tc", "-n", namespace(host), "qdisc", "replace", "dev", "eth0", *bucket]
    subprocess.run(inside, check=True)


def processes(host: str) -> list[psutil.Process]:
    """What runs on a host."""
    pids = subprocess.run(
        ["ip", "netns", "pids", namespace(host)], capture_output=True, text=True, check=False
    )
    return [psutil.Process(int(pid)) for pid in pids.stdout.split() if psutil.pid_exists(int(pid))]


def stop(folder: Path) -> None:
    for host in json.loads((folder / "hosts.json").read_text()):
        end_processes(processes(host), 2)
        # a link would go with the namespace, but some time later
        for what in (["link", "del", _link(host)], ["netns", "del", namespace(host)]):
            subprocess.run(["ip", *what], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns", namespace(host)), ignore_errors=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def main() -> None:
    commands = {
        "start": start,
        "exec": execute,
        "cut": cut,
        "mend": mend,
        "limit": limit,
        "stop": stop,
    }
    run_command(__doc__ or "", commands)


if __name__ == "__main__":
    main()
