"""Overlap of the gradient exchange with the backward pass, over limited links.

Two hosts (scripts/clusters/hosts.py: network namespaces of this machine), one process with one
thread each. Seconds of a step of ResNet-18, without the optimizer:

* ``computing``: forward and backward, nothing is sent;
* ``after``: gradients are all-reduced after the backward pass;
* ``overlap``: buckets meet while it goes on, as in every Estimator on torch.distributed;
* ``DDP``: ``torch.nn.parallel.DistributedDataParallel`` by hand.

All implementations run in turn, in every repeat. Hidden is the part of what ``after`` adds to
``computing`` that a side does not add.

    sudo python benchmarks/overlap.py [--rates 10gbit 1gbit] [--repeats 7]

It needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from limited_links import MEETING, Remote, commands, hosts

WORKERS = 2
SIDES = ("computing", "after", "overlap", "DDP")
GATE = 0.6  # of the exchange is hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["none", "2gbit", "1gbit", "500mbit"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16, help="pictures of 96 by 96 pixels")
    options = parser.parse_args()
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as opened:
        folder = Path(name)
        control = opened.enter_context(hosts(folder, spark=False))
        workers = []
        for rank in range(WORKERS):
            host = f"host{rank + 1}"
            arguments = ("--worker", str(rank), str(options.batch))
            workers.append(Remote(folder / "hosts", host, *arguments, program=__file__))
            opened.callback(workers[-1].close)
        for rate in options.rates:
            for rank in range(WORKERS):
                control("limit", f"host{rank + 1}", rate)
            for repeat in range(options.repeats + 1):  # the first one warms up
                for side in SIDES:
                    for each in workers:
                        each.tell(side)
                    slowest = max([each.answer() for each in workers])
                    if repeat:
                        seconds.setdefault((rate, side), []).append(slowest)
    report(options.rates, seconds)


def worker(rank: int, batch: int) -> None:
    """Run a process on a host."""
    import torch
    import torch.distributed as dist

    from bigdl.nano.pytorch.vision.models import resnet18
    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=MEETING, rank=rank, world_size=WORKERS)
    sync = TorchDistributedSync(
        SimpleNamespace(rank=rank, world_size=WORKERS, timeout=60.0, channel=None, certificate=None)
    )
    sync.start()
    torch.manual_seed(0)
    model = torch.nn.Sequential(resnet18(pretrained=False), torch.nn.LazyLinear(2))
    pictures, labels = torch.randn(batch, 3, 96, 96), torch.randint(2, (batch,))
    model(pictures)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    parameters = list(model.parameters())

    def step(side: str) -> None:
        model.zero_grad()
        forward = replica if side == "DDP" else model
        loss = torch.nn.functional.cross_entropy(forward(pictures), labels)
        if side == "overlap":
            with sync.overlap(parameters, 1 / WORKERS):
                loss.backward()
        elif side != "DDP":
            with replica.no_sync():
                loss.backward()
        else:
            loss.backward()
        if side in ("after", "overlap"):
            sync.all_reduce_gradients(parameters, 1 / WORKERS)

    for (side,) in commands():
        dist.barrier()
        started = time.perf_counter()
        step(side)
        print("seconds", time.perf_counter() - started, flush=True)
    dist.destroy_process_group()


def report(rates: list[str], seconds: dict[tuple[str, str], list[float]]) -> None:
    print("| links | Implementation | seconds of a step, median (range) | hidden |")
    print("|---|---|---|---|")
    failed = []
    for rate in rates:
        computing = statistics.median(seconds[rate, "computing"])
        exchange = statistics.median(seconds[rate, "after"]) - computing
        for side in SIDES:
            values = seconds[rate, side]
            median = statistics.median(values)
            hidden = 1 - (median - computing) / exchange
            spread = f"{median:.3f} ({min(values):.3f}–{max(values):.3f})"
            said = f"{hidden:.0%}" if side in ("overlap", "DDP") else ""
            print(f"| {'no limit' if rate == 'none' else rate} | {side} | {spread} | {said} |")
            if side == "overlap" and rate != "none" and hidden < min(GATE, computing / exchange):
                failed.append(f"{hidden:.0%} of the exchange is hidden at {rate}")
    raise SystemExit("\n".join(failed) or 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
