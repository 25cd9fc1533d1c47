"""Memory allocators for a PyTorch program: default, tuned at run time, and preloaded.

Each side is a separate process; all run in turn, one repeat of each job at a time, so that
what else the machine does meets all of them. The result is the CPU time of one thread, which other
programs disturb less than the time on the clock. jemalloc and tcmalloc take part where they are
found; CONDA_PREFIX may name a directory with a folder ``lib`` that holds them.

    python benchmarks/nano_runtime.py [--repeats 7] [--size 224] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bigdl.nano.cli.libraries import JEMALLOC, TCMALLOC, find_library

JOBS = ("inference", "training")
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--size", type=int, default=224, help="pixels of the side of an image")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write all results to this file"
    )
    parser.add_argument("--worker", choices=["default", "tune"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.size)
    else:
        seconds = measure(options.repeats, options.size)
        report(seconds)
        if options.json:
            options.json.write_text(json.dumps(seconds, indent=1))


def sides(size: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return command line and environment of each configuration."""
    worker = [__file__, "--size", str(size), "--worker"]
    run = ["-m", "bigdl.nano.cli.run", "-o"]
    commands = {
        "default": ([*worker, "default"], {}),
        "tune()": ([*worker, "tune"], {}),
    }
    jemalloc = find_library(JEMALLOC)
    if jemalloc is None:
        commands["bigdl-nano-run"] = ([*run, *worker, "default"], {})
    else:
        commands["jemalloc alone"] = ([*worker, "default"], {"LD_PRELOAD": str(jemalloc)})
        commands["bigdl-nano-run -j"] = ([*run, "-j", *worker, "default"], {})
    if find_library(TCMALLOC) is not None:
        commands["bigdl-nano-run -t"] = ([*run, "-t", *worker, "default"], {})
    return commands


def work(how: str, size: int) -> None:
    """Do the jobs that stdin names and print the CPU seconds of each."""
    import torch
    from torch import nn

    if how == "tune":
        from bigdl.nano.runtime import tune

        tune(threads=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages = [(3, 64), (64, 128), (128, 256)]
    layers = [
        layer
        for inputs, outputs in stages
        for layer in (
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(BATCH, 3, size, size)

    def inference() -> None:
        model.eval()
        with torch.inference_mode():
            model(images)

    def training() -> None:
        model.train()
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    jobs = {"inference": inference, "training": training}
    for _ in range(2):
        for job in jobs.values():
            job()
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.process_time()
        jobs[line.strip()]()
        print(time.process_time() - start, flush=True)


def measure(repeats: int, size: int) -> dict[str, dict[str, list[float]]]:
    """Return the CPU seconds of each job and configuration."""
    processes = {}
    for name, (command, environ) in sides(size).items():
        processes[name] = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    seconds = {job: {name: [] for name in processes} for job in JOBS}
    for process in processes.values():
        assert process.stdout.readline() == "ready\n", "a worker failed"
    for job in JOBS:
        for _ in range(repeats):
            for name, process in processes.items():
                print(job, file=process.stdin, flush=True)
                seconds[job][name].append(float(process.stdout.readline()))
    for process in processes.values():
        process.communicate()
    return seconds


def report(seconds: dict[str, dict[str, list[float]]]) -> None:
    print("| job | Implementation | CPU ms, median (range) | speedup |\n|---|---|---|---|")
    for job, of_sides in seconds.items():
        baseline = statistics.median(of_sides["default"])
        for name, times in of_sides.items():
            median = statistics.median(times)
            spread = f"{median * 1e3:.0f} ({min(times) * 1e3:.0f}–{max(times) * 1e3:.0f})"
            print(f"| {job} | {name} | {spread} | {baseline / median:.2f} |")


if __name__ == "__main__":
    main()
