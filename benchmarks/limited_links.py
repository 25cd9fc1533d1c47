"""Seconds of an exchange of gradients over limited links, beside gloo by hand.

Four hosts (scripts/clusters/hosts.py: network namespaces of this machine, which share its cores)
with a limit of what each sends and gets. A vector of float32 is summed over the hosts by

* ``gloo by hand``: ``torch.distributed.all_reduce`` of a flat tensor, in processes without Spark;
* ``torch.distributed``: what Estimators do in every step, in workers of a Spark stage;
* ``barrier``: a step of the parameter layer, which also makes the update: gradients to the owners
  of the slices, weights to everybody. It is what a step adds to a group.

All sides are asked in turn, in every repetition. The simulator of benchmarks/scaling, whose costs
are fitted to the exchanges without a limit, predicts those with one.

    sudo python benchmarks/limited_links.py [--quick] [--json out.json]

It needs root, iproute2 and, for ``--delays``, iptables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HOSTS = 4
SCRIPT = Path(__file__).parents[1] / "scripts" / "clusters" / "hosts.py"
MASTER, MEETING = "spark://10.76.1.10:7077", "tcp://10.76.1.11:29400"
SIDES = ("gloo by hand", "torch.distributed", "barrier")
TENSORS = 10  # that the parameters are
GATE, LIMIT = 1.15, 0.15  # to gloo by hand; of a prediction's error
SEGMENT, FRAME = 1448, 1514  # bytes of data in a packet of TCP, and of the packet
STEPS = {5: 4, 25: 2}  # of a repetition, by millions of parameters


@dataclass(frozen=True)
class Setting:
    """A limit of every link, one way's delay, and a number of parameters."""

    rate: str
    delay_ms: float
    millions: int

    def __str__(self):
        delay = f", {self.delay_ms:g} ms" if self.delay_ms else ""
        return f"{self.rate}{delay}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, without delays")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--millions", type=int, nargs="+", default=[5, 25], choices=STEPS)
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 5, 20], metavar="MS")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there, too")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.delays = 3, [0]
    free = [Setting("none", 0, size) for size in options.millions]
    limited = [
        Setting(rate, delay, size)
        for delay in options.delays
        for rate in options.rates
        for size in options.millions
        if not delay or size == min(options.millions)  # what a delay adds depends on no size
    ]
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder)) as control:
        found = measured([*free, *limited], options.repeats, Path(folder), control)
    if options.json:
        options.json.write_text(json.dumps({f"{s}, {s.millions} M": f for s, f in found.items()}))
    report(found, free, limited)


# -- measuring -----------------------------------------------------------------------------------


@contextlib.contextmanager
def hosts(folder: Path, spark: bool = True) -> Iterator:
    """Four hosts, with a standalone Spark if asked; yields what runs a command of the script."""
    script = [sys.executable, str(SCRIPT)]
    holder = subprocess.Popen(
        [*script, "hold", str(folder / "hosts"), str(HOSTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def control(verb: str, *arguments: str) -> None:
        command = [*script, verb, str(folder / "hosts"), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    if not any(line == "ready\n" for line in holder.stdout or ()):
        raise SystemExit(holder.wait())
    try:
        if spark:
            control("spark")
        yield control
    finally:
        holder.communicate()


class Remote:
    """A part of this program on a host: takes lines and answers each with one.

    Parameters
    ----------
    folder : Path
        Of the hosts.
    host : str
    role : list of str
    program : str
        The script that takes the lines.
    """

    def __init__(self, folder: Path, host: str, *role: str, program: str = __file__):
        script = [sys.executable, str(SCRIPT), "exec", str(folder), host]
        command = [*script, sys.executable, program, *role]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def tell(self, *line: object) -> None:
        print(json.dumps(line), file=self._process.stdin, flush=True)

    def answer(self) -> float:
        for line in self._process.stdout or ():
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.communicate()


def measured(settings, repeats: int, folder: Path, control) -> dict[Setting, dict[str, list]]:
    """Seconds of an exchange of every side, in all repetitions."""
    place = folder / "hosts"
    found: dict[Setting, dict[str, list]] = {}
    with contextlib.ExitStack() as opened:
        by_hand = []
        for rank in range(HOSTS):
            by_hand.append(Remote(place, f"host{rank + 1}", "--hand", str(rank)))
            opened.callback(by_hand[-1].close)
        driver = Remote(place, "driver", "--driver")
        opened.callback(driver.close)

        def ask(side: str, millions: int) -> float:
            asked = by_hand if side == SIDES[0] else [driver]
            for each in asked:
                each.tell(side, millions * 10**6, STEPS[millions])
            return max([each.answer() for each in asked])

        for setting in settings:
            for host in (f"host{number}" for number in range(1, HOSTS + 1)):
                control("limit", host, setting.rate)
                control("delay", host, str(setting.delay_ms))
            found[setting] = {side: [] for side in SIDES}
            for repeat in range(repeats + (setting.rate == "none")):  # the first one warms up
                for side in SIDES:
                    seconds = ask(side, setting.millions)
                    if setting.rate != "none" or repeat:
                        found[setting][side].append(seconds)
            medians = {side: round(statistics.median(f), 3) for side, f in found[setting].items()}
            print(f"{setting}, {setting.millions} M: {medians}", file=sys.stderr, flush=True)
    return found


def commands() -> Iterator[tuple]:
    for line in sys.stdin:
        yield tuple(json.loads(line))


def by_hand(rank: int) -> None:
    """One of the processes without Spark."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=MEETING, rank=rank, world_size=HOSTS)
    for _, size, steps in commands():
        vector = torch.ones(size)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            dist.all_reduce(vector)
        print("seconds", (time.perf_counter() - started) / steps, flush=True)
    dist.destroy_process_group()


def on_spark() -> None:
    """The driver of the other sides."""
    from scaling.calibrate import Layer
    from scaling.validate import Point

    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.engines.spark import SparkEngine

    init_orca_context(
        "standalone",
        master=MASTER,
        num_nodes=HOSTS,
        cores=1,
        memory="2g",
        python_location=sys.executable,
    )
    layers: dict[int, Layer] = {}
    for side, size, steps in commands():
        if side == "torch.distributed":
            seconds = max(SparkEngine().run(reducing(size, steps), num_workers=HOSTS, threads=1))
        else:
            if size not in layers:
                point = Point("barrier", HOSTS, size, 1, 0.0)
                layers[size] = Layer(point)
            short, long = (layers[size].group(steps)[0] for steps in (1, 1 + steps))
            seconds = (long - short) / steps
        print("seconds", seconds, flush=True)
    for layer in layers.values():
        layer.close()
    stop_orca_context()


def reducing(size: int, steps: int):
    """A program that sums gradients as Estimators do."""

    def program(worker) -> float:
        import time

        import torch

        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        sync = TorchDistributedSync(worker)
        sync.start()
        parameters = [torch.nn.Parameter(torch.zeros(size // TENSORS)) for _ in range(TENSORS)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sync.all_gather([0.0])
        started = time.perf_counter()
        for _ in range(steps):
            sync.all_reduce_gradients(parameters, 1 / worker.world_size)
        return (time.perf_counter() - started) / steps

    return program


# -- the simulator -------------------------------------------------------------------------------

POLICIES = dict(zip(SIDES, ("ring", "ring", "barrier"), strict=True))


def simulated(side: str, setting: Setting, costs) -> float:
    """The seconds of an exchange, as the simulator has them."""
    from scaling.model import Cluster, Workload
    from scaling.simulator import simulate

    units = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}
    bandwidth = float("inf")
    if setting.rate != "none":
        bandwidth = float(setting.rate[:-4]) * units[setting.rate[-4:]] * SEGMENT / FRAME
    workload = Workload(HOSTS, setting.millions * 10**6, 0.0)
    cores = len(os.sched_getaffinity(0))
    latency_s = 2e-3 * setting.delay_ms
    cluster = Cluster(HOSTS, cores, bandwidth, latency_s, machines=1)
    run = simulate(workload, costs, cluster, POLICIES[side], iterations=3, group_size=3)
    return float(run.seconds[1])  # neither the first nor the last of a group


def calibrated(side: str, found, free: list[Setting]):
    """The costs with which the exchanges without a limit are met."""
    from scaling.fitting import fitted
    from scaling.model import Costs

    def residuals(values):
        costs = Costs(block_s=float(values[0]), byte_s=float(values[1]))
        expected = [statistics.median(found[setting][side]) for setting in free]
        return np.log([simulated(side, setting, costs) for setting in free]) - np.log(expected)

    block_s, byte_s = map(float, fitted(residuals, [1e-3, 1e-9]))
    return Costs(block_s=block_s, byte_s=byte_s)


# -- report --------------------------------------------------------------------------------------


def report(found, free, limited) -> None:
    costs = {side: calibrated(side, found, free) for side in SIDES}
    print("| links | parameters | side | seconds, median (range) | to gloo by hand | simulated |")
    print("|---|---|---|---|---|---|")
    failed = []
    for setting in (*free, *limited):
        base = found[setting][SIDES[0]]
        for side, seconds in found[setting].items():
            median = statistics.median(seconds)
            ratio = median / statistics.median(base)
            spread = f"{median:.3f} ({min(seconds):.3f}–{max(seconds):.3f})"
            error = simulated(side, setting, costs[side]) / median - 1
            prediction = "fitted" if setting in free else f"{error:+.0%}"
            size = f"{setting.millions} M"
            name = "no limit" if setting in free else str(setting)
            print(f"| {name} | {size} | {side} | {spread} | {ratio:.2f} | {prediction} |")
            if setting in limited and not setting.delay_ms:
                if ratio > GATE:
                    failed.append(f"{side} takes {ratio:.2f} times gloo by hand: {name}, {size}")
                if abs(error) > LIMIT:
                    failed.append(f"the simulator is off by {error:+.0%}: {side}, {name}, {size}")
    print(f"\n{costs}")
    raise SystemExit("\n".join(failed) or 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hand"]:
        by_hand(int(sys.argv[2]))
    elif sys.argv[1:] == ["--driver"]:
        on_spark()
    else:
        main()
