"""Gradient sums over hosts with several workers each, over limited links.

Four hosts (scripts/clusters/hosts.py: network namespaces of this machine, which share its cores)
with two workers each and a limit of what each host sends and gets. Gradients are summed as
Estimators do in every step,

* ``as they come``: where a cluster has dealt the ranks out to its hosts in turn;
* ``side by side``: where the ranks of a host follow each other, as Estimators arrange them: the
  workers of a host add up by shared memory, and its numbers leave it once;
* ``gloo by hand``: ``all_reduce`` of a flat tensor over the same ranks side by side.

All implementations run in turn, in every repeat.

    sudo python benchmarks/crowded_hosts.py [--quick]

It needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from limited_links import HOSTS, TENSORS, Remote, commands, hosts, in_turn, slowest
from scaling.links import Setting

EACH = 2  # workers of a host
PORTS = {"as they come": 29401, "side by side": 29402}
BY_HAND = "gloo by hand"
SIDES = [*PORTS, BY_HAND]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, one size")
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit"])
    parser.add_argument("--millions", type=int, nargs="+", default=[5, 25])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.millions = 2, options.millions[:1]
    settings = [Setting(rate, 0, size) for rate in options.rates for size in options.millions]
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder), spark=False) as control:
        measurements = measured(settings, options.repeats, Path(folder) / "hosts", control)
    print("| links | Implementation | seconds | to gloo by hand |\n|---|---|---|---|")
    for setting, of_sides in measurements.items():
        reference = statistics.median(of_sides[BY_HAND])
        for side, seconds in of_sides.items():
            median = statistics.median(seconds)
            print(
                f"| {setting} | {side} | {median:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) "
                f"| {median / reference:.2f} |"
            )


def measured(settings, repeats: int, index: Path, control) -> dict[Setting, dict[str, list]]:
    """Return the seconds of a sum by every implementation, in all repeats."""
    measurements: dict[Setting, dict[str, list]] = {}
    with contextlib.ExitStack() as opened:
        crews: dict[str, list[Remote]] = {}
        for layout in PORTS:
            crews[layout] = []
            for rank in range(HOSTS * EACH):
                host = rank % HOSTS if layout == "as they come" else rank // EACH
                role = ("--worker", layout, str(rank))
                crews[layout].append(Remote(index, f"host{host + 1}", *role, program=__file__))
                opened.callback(crews[layout][-1].close)

        def ask(side: str, setting: Setting) -> float:
            return slowest(crews.get(side, crews["side by side"]), side, setting)

        for setting in settings:
            for host in (f"host{number}" for number in range(1, HOSTS + 1)):
                control("limit", host, setting.rate)
            measurements[setting] = in_turn(SIDES, setting, ask, repeats, warm_ups=1)
    return measurements


def work(layout: str, rank: int) -> None:
    """Run one of the workers."""
    import os

    import torch
    import torch.distributed as dist

    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    size_of_world = HOSTS * EACH
    meeting = f"tcp://10.76.1.11:{PORTS[layout]}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size_of_world)
    sync = TorchDistributedSync(
        SimpleNamespace(rank=rank, world_size=size_of_world, channel=None, timeout=1800.0)
    )
    sync.start()
    for side, size, steps in commands():
        parameters = [torch.nn.Parameter(torch.empty(size // TENSORS)) for _ in range(TENSORS)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        vector = torch.ones(size)
        sync.all_reduce_gradients(parameters, 1.0 / size_of_world)  # which makes the buffers
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            if side == BY_HAND:
                dist.all_reduce(vector)
            else:
                sync.all_reduce_gradients(parameters, 1.0 / size_of_world)
        print("seconds", (time.perf_counter() - started) / steps, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        main()
