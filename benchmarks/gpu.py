"""Training steps on one GPU: an Estimator on local processes and a plain PyTorch loop.

    python benchmarks/gpu.py [--repeats 3] [--epochs 3] [--quick]

NCF (two tables, an MLP) in batches of 1,024 rows, whose steps are short, and ResNet-18 on images of
160 × 160 in batches of 128, which are 39 MB each. The plain loops take rows by index and copy them
to the GPU, from ordinary memory or by way of pinned memory without waiting; they read the loss at
the end of an epoch only. Samples per second of every epoch but the first, sides in turn.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback


class Ncf(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items = nn.Embedding(200_000, 64), nn.Embedding(50_000, 64)
        self.layers = nn.Sequential(
            nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, users, items):
        return self.layers(torch.cat([self.users(users), self.items(items)], -1))[:, 0]


def resnet():
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=10)


def cases(count):
    """Return name, model, arrays, feature names, loss, batch size and whether it uses bfloat16."""
    rng = np.random.default_rng(0)
    rows = count * 100
    ratings = {
        "users": rng.integers(0, 200_000, rows),
        "items": rng.integers(0, 50_000, rows),
        "y": rng.random(rows).astype("float32"),
    }
    yield "NCF", Ncf, ratings, ["users", "items"], nn.BCEWithLogitsLoss(), 1024, False
    images = {
        "x": rng.random((count, 3, 160, 160), dtype="float32"),
        "y": rng.integers(0, 10, count),
    }
    for bf16 in (False, True):
        name = f"ResNet-18, {'bf16' if bf16 else 'fp32'}"
        yield name, resnet, images, ["x"], nn.CrossEntropyLoss(), 128, bf16


def sgd(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def plain(epochs, pinned, make, arrays, features, loss, batch_size, bf16):
    model = make().cuda()
    optimizer = sgd(model)
    columns = [torch.from_numpy(arrays[name]) for name in (*features, "y")]
    for _ in range(epochs):
        torch.cuda.synchronize()
        started, total = time.perf_counter(), 0.0
        for rows in torch.randperm(len(columns[0])).split(batch_size):
            batch = [column[rows] for column in columns]
            if pinned:
                batch = [each.pin_memory().cuda(non_blocking=True) for each in batch]
            else:
                batch = [each.cuda() for each in batch]
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                loss_value = loss(model(*batch[:-1]), batch[-1])
            loss_value.backward()
            optimizer.step()
            total += loss_value.detach()
        float(total)
        yield len(columns[0]) / (time.perf_counter() - started)


class Clock(Callback):
    def __init__(self, path):
        self.path = path

    def before_train_epoch(self, runner):
        self.started = time.perf_counter()

    def after_train_epoch(self, runner):
        with self.path.open("a") as file:
            file.write(f"{time.perf_counter() - self.started}\n")


def ours(epochs, make, arrays, features, loss, batch_size, bf16):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds"
        estimator = Estimator.from_torch(
            model=make(),
            optimizer=sgd,
            loss=loss,
            backend="local",
            precision="bf16" if bf16 else "fp32",
        )
        estimator.fit(
            arrays,
            epochs=epochs,
            batch_size=batch_size,
            feature_cols=features,
            label_cols=["y"],
            callbacks=[Clock(path)],
        )
        return [len(arrays["y"]) / float(line) for line in path.read_text().split()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU of CUDA")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| Model | Side | Samples/s (range) | Ours / side |\n| --- | --- | --- | --- |")
    for name, *case in cases(512 if arguments.quick else 4096):
        rates: dict[str, list] = {"plain, pinned": [], "plain": [], "BigDL": []}
        for _ in range(arguments.repeats):
            rates["plain, pinned"] += list(plain(arguments.epochs, True, *case))[1:]
            rates["plain"] += list(plain(arguments.epochs, False, *case))[1:]
            rates["BigDL"] += ours(arguments.epochs, *case)[1:]
        best = statistics.median(rates["BigDL"])
        for side, samples in rates.items():
            middle = statistics.median(samples)
            spread = f"{middle:,.0f} ({min(samples):,.0f}–{max(samples):,.0f})"
            print(f"| {name} | {side} | {spread} | {best / middle:.2f} |", flush=True)


if __name__ == "__main__":
    main()
