"""Multi-process training compared with one process on one core: samples per second.

    python benchmarks/nano_processes.py [--processes 2] [--batch 64] [--images 512] [--repeats 3]
        [--json results.json] [--quick]

ResNet18 learns random images of 3 x 96 x 96 by Nano's Trainer with its defaults. One process has
one core; of several each has separate cores and batches of the same size, and the rows of an
epoch are shared. The first epoch of every run starts and warms up and does not count: an epoch is
timed in the process of rank 0, from its first to its last step. Runs alternate; a ratio is that of
one repeat.

On a machine that others use, processes wait for cores that they believe to be theirs. Processor
time does not see that: all processes together take some more of it per sample than one alone, and
the samples per second of a quiet machine follow from how much.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

GATE = 1.6  # times the samples/s of one process, for two on two cores


def train(options):
    """Return seconds and CPU seconds of the measured epochs."""
    if options.worker == "one":  # before a library counts the cores
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import torch
    from pytorch_lightning import LightningModule
    from torch import nn

    from bigdl.nano.pytorch import Trainer
    from bigdl.nano.pytorch.vision.models import resnet18

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(resnet18(), nn.Flatten(), nn.LazyLinear(10))
            self.network(torch.zeros(2, 3, 96, 96))
            self.seconds = []

        def on_train_epoch_start(self):
            self.started = clocks()

        def on_train_epoch_end(self):
            ended = clocks()
            self.seconds.append([b - a for a, b in zip(self.started, ended, strict=True)])

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    for name in ("pytorch_lightning", "bigdl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    images = torch.randn(options.images, 3, 96, 96)
    data = torch.utils.data.TensorDataset(images, torch.randint(0, 10, (options.images,)))
    model = Classifier()
    trainer = Trainer(
        max_epochs=options.epochs,
        num_processes=1 if options.worker == "one" else options.processes,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=options.batch))
    return model.seconds[1:]


def clocks():
    return time.perf_counter(), time.process_time()


def options_of(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="of each process")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=4, help="the first does not count")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="2 repeats of short epochs")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--worker", choices=["one", "all"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.images, options.epochs, options.repeats = 256, 3, 2
    if options.epochs < 2:
        parser.error("--epochs must be at least 2, as the first does not count")
    if options.images % (options.batch * options.processes):
        parser.error("--images must be a multiple of --batch times --processes")
    return options


def measured(argv, options, side):
    """Return samples per second of one run, and CPU milliseconds per sample of all processes."""
    command = [sys.executable, __file__, *argv, "--worker", side]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
    wall, cpu = map(statistics.median, zip(*json.loads(run.stdout.splitlines()[-1]), strict=True))
    count = options.processes if side == "all" else 1
    return {"rate": options.images / wall, "cpu_ms": 1000 * count * cpu / options.images}


def report(measurements, options):
    names = {"one": "one process, one core", "all": f"{options.processes} processes"}
    print(
        "| Implementation | samples/s (range) | to one process | CPU ms/sample | to one process |"
    )
    print("|---|---|---|---|---|")
    for side, runs in measurements.items():
        cells = []
        for metric, digits in (("rate", 0), ("cpu_ms", 2)):
            values = [run[metric] for run in runs]
            pairs = zip(measurements["one"], runs, strict=True)
            cells += [spread(values, digits), spread([b[metric] / a[metric] for a, b in pairs], 2)]
        print(f"| {names[side]} | {' | '.join(cells)} |")
    pairs = list(zip(measurements["one"], measurements["all"], strict=True))
    reached = statistics.median(many["rate"] / one["rate"] for one, many in pairs)
    work = statistics.median(many["cpu_ms"] / one["cpu_ms"] for one, many in pairs)
    print(
        f"\n{reached:.2f} times the samples/s of one process; by processor time "
        f"{options.processes / work:.2f} on cores that nobody else uses"
    )
    if options.processes == 2:
        print(f"(gate: {GATE}: {'met' if reached >= GATE else 'MISSED'})")


def spread(values, digits):
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options = options_of(argv)
    if options.worker:
        print("\n" + json.dumps(train(options)))
        return
    measurements = {"one": [], "all": []}
    for _ in range(options.repeats):
        for side, runs in measurements.items():
            runs.append(measured(argv, options, side))
    report(measurements, options)
    if options.json:
        Path(options.json).write_text(json.dumps(measurements, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
