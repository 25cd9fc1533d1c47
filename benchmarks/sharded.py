"""Memory and speed of a model that is divided among workers, next to FSDP2 by hand.

    python benchmarks/sharded.py [--workers 3] [--width 512] [--layers 8] [--steps 12] [--rounds 3]
        [--limit]

Each round runs the same training of a transformer in turns: ``Estimator.from_torch(shard="full",
backend="local")``, and a program with ``fully_shard`` that ``torchrun`` starts, as in its tutorial.
Both use gloo, one thread per worker, the same batches and AdamW.  The table has samples per second
after the first steps, the CPU time of rank 0 per step, its largest resident memory above that after
its imports, and their ratios.  The program by hand runs with glibc's default allocator and with
``MALLOC_MMAP_THRESHOLD_=MALLOC_TRIM_THRESHOLD_=1048576``, as the fit sets them.

``--limit`` sets RLIMIT_DATA of each worker to a third of the state of the model, above its size
after the imports, plus `--spare` MB for gathered layers, activations and buffers, and runs the fit
with ``shard="full"`` and without.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

WORDS, LENGTH, BATCH = 1000, 64, 12
FIRST = 3  # steps that are not measured


class Layers(nn.Module):
    """Transformer of `layers` layers with separate input and output embeddings."""

    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class NextWord(nn.Module):
    """Mean cross-entropy of all positions."""

    def forward(self, output, target):
        return nn.functional.cross_entropy(output.transpose(1, 2), target)


def rows(steps):
    ids = np.random.default_rng(0).integers(0, WORDS, (steps * BATCH, LENGTH))
    return ids, np.roll(ids, -1, 1)


def resident(name="VmRSS"):
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


def by_hand(arguments):
    """Train in a process that torchrun has started, and print a line of measurements."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    base = resident()
    reset_peak()
    torch.manual_seed(0)
    model = Layers(arguments.width, arguments.layers)
    mesh = init_device_mesh("cpu", (count,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids, labels = (torch.from_numpy(each) for each in rows(arguments.steps))
    part, loss_of, started, cpu = BATCH // count, NextWord(), 0.0, 0.0
    for step in range(arguments.steps):
        if step == FIRST:
            started, cpu = time.perf_counter(), time.process_time()
        first = step * BATCH + rank * part
        optimizer.zero_grad()
        loss_of(model(ids[first : first + part]), labels[first : first + part]).backward()
        optimizer.step()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    if rank == 0:
        rate = (arguments.steps - FIRST) * BATCH / seconds
        print("measured", rate, cpu / (arguments.steps - FIRST), resident("VmHWM") - base)
    dist.destroy_process_group()


def run_by_hand(arguments, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.workers), __file__, "--by-hand"]
    command += ["--width", str(arguments.width), "--layers", str(arguments.layers)]
    command += ["--steps", str(arguments.steps)]
    threads = {"OMP_NUM_THREADS": "1", **environment}
    output = subprocess.run(
        command, env=os.environ | threads, capture_output=True, text=True, check=True
    ).stdout
    return [float(each) for each in output.split("measured")[1].split()]


def measuring(path):
    """Return a callback that measures rank 0 and writes the measurements to a file."""
    from bigdl.orca.learn.pytorch.callbacks import Callback

    class Measuring(Callback):
        def after_train_iter(self, runner):
            if runner.rank:
                return
            if runner.global_step == FIRST:
                self.started, self.cpu = time.perf_counter(), time.process_time()
            self.now, self.cpu_now = time.perf_counter(), time.process_time()
            self.steps, self.peak = runner.global_step - FIRST, resident("VmHWM")

        def after_train_epoch(self, runner):
            if runner.rank == 0:
                rate = self.steps * BATCH / (self.now - self.started)
                cpu = (self.cpu_now - self.cpu) / self.steps
                Path(path).write_text(f"{rate} {cpu} {self.peak}")

    return Measuring()


def run_fit(arguments, shard="full", limit=None):
    with tempfile.TemporaryDirectory() as folder:
        return fit_in(folder, arguments, shard, limit)


def fit_in(folder, arguments, shard, limit):
    from bigdl.orca.learn.pytorch import Estimator

    base, measured = f"{folder}/base", f"{folder}/measured"
    width, layers, spare = arguments.width, arguments.layers, arguments.spare

    def begin():
        import torch.distributed.fsdp  # noqa: F401

        Path(f"{base}.{os.getpid()}").write_text(str(resident()))
        reset_peak()
        if limit is not None:
            limit(width, layers, spare)

    estimator = Estimator.from_torch(
        model=lambda config: Layers(width, layers),
        optimizer=lambda model, config: torch.optim.AdamW(model.parameters(), lr=1e-4),
        loss=NextWord(),
        loss_weight="rows",
        backend="local",
        workers_per_node=arguments.workers,
        model_dir=f"{folder}/models",
        shard=shard,
        config={"shuffle": False},
        initialization_hook=begin,
    )
    try:
        estimator.fit(
            rows(arguments.steps), batch_size=BATCH, callbacks=[measuring(measured)], max_failures=0
        )
    finally:
        estimator.shutdown()
    bases = [int(path.read_text()) for path in Path(folder).glob("base.*")]
    rate, cpu, peak = map(float, Path(measured).read_text().split())
    return [rate, cpu, peak - max(bases)]


def state_bytes(width, layers):
    with torch.device("meta"):
        return 16 * sum(p.numel() for p in Layers(width, layers).parameters())


def set_limit(width, layers, spare):
    import resource

    data = resident("VmData")
    limit = data + state_bytes(width, layers) // 3 + (spare << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def under_limit(arguments):
    state = state_bytes(arguments.width, arguments.layers)
    print(f"state {state / 1e6:.0f} MB; limit of each worker: {state / 3e6:.0f} MB for its state")
    print(f"and {arguments.spare} MB for gathered layers, activations and gloo, above its imports")
    for shard in ("full", None):
        try:
            rate, _, peak = run_fit(arguments, shard, set_limit)
            print(f"shard={shard!r}: {rate:.1f} samples/s, {peak / 1e6:.0f} MB above the imports")
        except Exception as error:
            print(f"shard={shard!r}: {type(error).__name__}: {str(error)[:300]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spare", type=int, default=200)
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--limit", action="store_true")
    arguments = parser.parse_args()
    if arguments.by_hand:
        by_hand(arguments)
        return
    if arguments.limit:
        under_limit(arguments)
        return
    returned = str(1 << 20)
    thresholds = {"MALLOC_MMAP_THRESHOLD_": returned, "MALLOC_TRIM_THRESHOLD_": returned}
    sides = {
        "fit": lambda: run_fit(arguments),
        "by hand": lambda: run_by_hand(arguments),
        "by hand, thresholds": lambda: run_by_hand(arguments, **thresholds),
    }
    results = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, run in sides.items():
            results[name].append(run())
            print(name, results[name][-1], flush=True)
    print(
        "| side | samples/s | CPU s/step | peak MB above imports | rate: fit / side | CPU | peak |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, of_side in results.items():
        rate, cpu, peak = (statistics.median(column) for column in zip(*of_side, strict=True))
        cells = [f"{rate:.2f}", f"{cpu:.3f}", f"{peak / 1e6:.0f}"]
        for index in range(3):
            ratios = [a[index] / b[index] for a, b in zip(results["fit"], of_side, strict=True)]
            middle = statistics.median(ratios)
            cells.append(f"{middle:.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
