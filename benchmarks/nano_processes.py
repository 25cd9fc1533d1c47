"""Training in several processes beside one process on one core: samples per second.

    python benchmarks/nano_processes.py [--processes 2] [--batch 64] [--images 512] [--repeats 3]
        [--json results.json]

ResNet18 learns random images of 3 x 96 x 96 by Nano's Trainer with its defaults. One process has
one core; several share the batch, and each has its own cores. The first epoch of every run starts
and warms up and does not count: an epoch is timed in the process of rank 0, from its first to its
last step. Runs alternate; the ratio is that of one repeat.
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

EPOCHS = 4


def train(options):
    """The seconds of the epochs that count."""
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
            self.started = time.perf_counter()

        def on_train_epoch_end(self):
            self.seconds.append(time.perf_counter() - self.started)

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
        max_epochs=EPOCHS,
        num_processes=1 if options.worker == "one" else options.processes,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=options.batch))
    return model.seconds[1:]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="of all processes together")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--worker", choices=["one", "all"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        print("\n" + json.dumps(train(options)))
        return
    given = [sys.executable, __file__, *(argv or sys.argv[1:])]
    rates = {"one": [], "all": []}
    for _ in range(options.repeats):
        for side, found in rates.items():
            run = subprocess.run(
                [*given, "--worker", side], check=True, stdout=subprocess.PIPE, text=True
            )
            seconds = json.loads(run.stdout.splitlines()[-1])
            found.append(options.images / statistics.median(seconds))
    ratios = [many / one for one, many in zip(*rates.values(), strict=True)]
    names = {"one": "one process, one core", "all": f"{options.processes} processes"}
    print("| side | samples/s (range) | to one process |\n|---|---|---|")
    for side, found in rates.items():
        middle, low, high = statistics.median(found), min(found), max(found)
        ratio = statistics.median(ratios) if side == "all" else 1.0
        spread = f" ({min(ratios):.2f}–{max(ratios):.2f})" if side == "all" else ""
        print(f"| {names[side]} | {middle:.0f} ({low:.0f}–{high:.0f}) | {ratio:.2f}{spread} |")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rates, file, indent=1)


if __name__ == "__main__":
    main()
