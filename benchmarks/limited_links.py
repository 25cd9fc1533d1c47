"""Seconds of an exchange of gradients over limited links, beside gloo by hand.

Four hosts (scripts/clusters/hosts.py: network namespaces of this machine, which share its cores)
with a limit of what each sends and gets. A vector of float32 is summed over the hosts by

* ``gloo by hand``: ``torch.distributed.all_reduce`` of a flat tensor, in processes without Spark;
* ``halving and doubling``: the same by what Estimators of many workers do;
* ``torch.distributed``: what Estimators do in every step, in workers of a Spark stage;
* ``during the backward pass``: the same, while a backward pass goes on that sleeps: the seconds of
  a step in which a gradient takes one;
* ``barrier``: a step of the parameter layer, which also makes the update: gradients to the owners
  of the slices, weights to everybody.

All implementations run in turn, in every repeat. The simulator of benchmarks/scaling, whose costs
are fitted to the exchanges without a limit, predicts those with one; ``--json`` keeps what it
needs.

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
from pathlib import Path

from scaling.links import POLICIES, Exchanges, Setting, check, costs_of, error_of

HOSTS = 4
SCRIPT = Path(__file__).parents[1] / "scripts" / "clusters" / "hosts.py"
MASTER, MEETING = "spark://10.76.1.10:7077", "tcp://10.76.1.11:29400"
BY_HAND, HALVING, _, OVERLAPPED, BARRIER = SIDES = tuple(POLICIES)
TENSORS = 20  # that the parameters are
COMPUTE_S = 1.0  # of a gradient, a third of it in the forward pass
GATE = 1.15  # to gloo by hand
# in which Estimators sum gradients, of 1.25 million numbers each; by millions of parameters
BUCKETS = {5: 4, 25: 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, without delays")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--millions", type=int, nargs="+", default=[5, 25], choices=BUCKETS)
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 5, 20], metavar="MS")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write all results to this file"
    )
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.delays = 3, [0]
    free = [Setting("none", 0, size) for size in BUCKETS]  # the costs are fitted to both
    limited = [
        Setting(rate, delay, size)
        for delay in options.delays
        for rate in options.rates
        for size in options.millions
        if not delay or size == min(options.millions)  # what a delay adds depends on no size
    ]
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder)) as control:
        seconds = measured([*free, *limited], options.repeats, Path(folder), control)
    exchanges = Exchanges(HOSTS, len(os.sched_getaffinity(0)), COMPUTE_S, BUCKETS, seconds)
    if options.json:
        exchanges.save(options.json)
    report(exchanges)


# -- measuring -----------------------------------------------------------------------------------


@contextlib.contextmanager
def hosts(folder: Path, spark: bool = True) -> Iterator:
    """Start four hosts, optionally with a standalone Spark; yield a function that runs commands."""
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
    """Part of this program on a host, which answers each line of input with one line.

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
    """Return the seconds of an exchange of every implementation, in all repeats."""
    hosts = folder / "hosts"
    measurements: dict[Setting, dict[str, list]] = {}
    with contextlib.ExitStack() as opened:
        by_hand = []
        for rank in range(HOSTS):
            by_hand.append(Remote(hosts, f"host{rank + 1}", "--hand", str(rank)))
            opened.callback(by_hand[-1].close)
        driver = Remote(hosts, "driver", "--driver")
        opened.callback(driver.close)

        def ask(side: str, setting: Setting) -> float:
            asked = by_hand if side in (BY_HAND, HALVING) else [driver]
            return slowest(asked, side, setting)

        for setting in settings:
            for host in (f"host{number}" for number in range(1, HOSTS + 1)):
                control("limit", host, setting.rate)
                control("delay", host, str(setting.delay_ms))
            measurements[setting] = in_turn(
                SIDES, setting, ask, repeats, warm_ups=int(setting.is_free)
            )
    return measurements


def slowest(asked: list[Remote], side: str, setting: Setting) -> float:
    """Run an exchange on all hosts at once and return the seconds of the slowest."""
    for each in asked:
        each.tell(side, setting.millions * 10**6, steps_of(setting))
    return max([each.answer() for each in asked])


def in_turn(sides, setting: Setting, ask, repeats: int, warm_ups: int) -> dict[str, list[float]]:
    """Run all implementations in every repeat; return their seconds without warm-ups."""
    measurements: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(-warm_ups, repeats):
        for side in sides:
            seconds = ask(side, setting)
            if repeat >= 0:
                measurements[side].append(seconds)
    medians = {side: round(statistics.median(each), 3) for side, each in measurements.items()}
    print(f"{setting}: {medians}", file=sys.stderr, flush=True)
    return measurements


def steps_of(setting: Setting) -> int:
    """Return the number of steps of a repeat of some seconds."""
    seconds = 6e6 * setting.millions / min(setting.bandwidth, 3e8)
    return min(max(2, round(4 / seconds)), 16)


def commands() -> Iterator[tuple]:
    for line in sys.stdin:
        yield tuple(json.loads(line))


def by_hand(rank: int) -> None:
    """Run one of the processes without Spark."""
    import torch
    import torch.distributed as dist

    from bigdl.runtime.collectives.halving import HalvingDoubling

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=MEETING, rank=rank, world_size=HOSTS)
    halving = HalvingDoubling(dist, rank, HOSTS)
    for side, size, steps in commands():
        vector = torch.ones(size)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            if side == HALVING:
                halving.start(vector)()
            else:
                dist.all_reduce(vector)
        print("seconds", (time.perf_counter() - started) / steps, flush=True)
    halving.close()
    dist.destroy_process_group()


def on_spark() -> None:
    """Run the driver of the Spark implementations."""
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
        if side != BARRIER:
            program = reducing(size, steps, COMPUTE_S if side == OVERLAPPED else 0.0)
            seconds = max(SparkEngine().run(program, num_workers=HOSTS, threads=1))
        else:
            if size not in layers:
                point = Point("barrier", HOSTS, size, 1, 0.0)
                layers[size] = Layer(point)
            seconds = layers[size].step(steps)
        print("seconds", seconds, flush=True)
    for layer in layers.values():
        layer.close()
    stop_orca_context()


def reducing(size: int, steps: int, compute_s: float):
    """Return a program that sums gradients like Estimators, optionally overlapped."""

    def program(worker) -> float:
        import time

        import torch

        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        class Layer(torch.autograd.Function):
            """Layer that sleeps for its part of the backward pass."""

            @staticmethod
            def forward(ctx, x, weights, gradient):
                ctx.save_for_backward(gradient)
                return x + 0

            @staticmethod
            def backward(ctx, gradient):
                time.sleep(compute_s * 2 / 3 / TENSORS)
                return gradient, *ctx.saved_tensors, None

        sync = TorchDistributedSync(worker)
        sync.start()
        parameters = [torch.nn.Parameter(torch.zeros(size // TENSORS)) for _ in range(TENSORS)]
        gradient = torch.ones(size // TENSORS)

        def step() -> None:
            if not compute_s:
                return sync.all_reduce_gradients(parameters, 1 / HOSTS)
            time.sleep(compute_s / 3)
            x = torch.zeros(1, requires_grad=True)
            for parameter in parameters:
                parameter.grad = None
                x = Layer.apply(x, parameter, gradient)
            with sync.overlap(parameters, 1 / HOSTS):
                x.backward()
            return sync.all_reduce_gradients(parameters, 1 / HOSTS)

        for parameter in parameters:
            parameter.grad = gradient.clone()
        step()  # makes the buffers
        sync.all_gather([0.0])
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - started) / steps

    return program


# -- report --------------------------------------------------------------------------------------


def report(exchanges: Exchanges) -> None:
    costs = costs_of(exchanges)
    print("| links | Implementation | seconds, median (range) | to gloo by hand | simulated |")
    print("|---|---|---|---|---|")
    slow = []
    for setting, measurements in exchanges.seconds.items():
        for side, seconds in measurements.items():
            median = exchanges.typical_s(side, setting)
            spread = f"{median:.3f} ({min(seconds):.3f}–{max(seconds):.3f})"
            ratio = median / exchanges.typical_s(BY_HAND, setting)
            said = "" if side == OVERLAPPED else f"{ratio:.2f}"
            error = error_of(side, setting, costs, exchanges)
            is_fitted = setting.is_free and side != OVERLAPPED
            predicted = "fitted" if is_fitted else f"{error:+.0%}"
            print(f"| {setting} | {side} | {spread} | {said} | {predicted} |")
            if said and ratio > GATE and not (setting.is_free or setting.delay_ms):
                slow.append(f"{side} takes {ratio:.2f} times gloo by hand: {setting}")
    print(f"\n{costs}")
    raise SystemExit("\n".join([*slow, *check(exchanges, costs)]) or 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hand"]:
        by_hand(int(sys.argv[2]))
    elif sys.argv[1:] == ["--driver"]:
        on_spark()
    else:
        main()
