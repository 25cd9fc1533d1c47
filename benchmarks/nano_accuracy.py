"""Accuracy of bf16 and int8 models, compared with the same model in fp32.

    python benchmarks/nano_accuracy.py [--seeds 0 1 2] [--copies 6] [--methods bf16 openvino_int8]
        [--data-dir cats-dogs] [--json results.json] [--quick]

Digits: a convolutional network learns scikit-learn's digits under noise and occlusion, which are
strong enough that fp32 makes mistakes. Each held-out image is tested in several copies, every one
damaged in another way. A method's difference to fp32 is paired by test item, and its 95 %
interval is a bootstrap over images, since the copies of one image are no independent items. A seed
is another split, other damage and another network; the last row of a method is over all seeds.
A difference is kept if its interval lies above -1 point.

Photographs, with ``--data-dir`` (``train`` and ``val``, each with a folder of JPEG files per
class): a briefly trained ResNet-18, on how many images a method gives the class that fp32 gives,
and its latency in alternation with fp32. Quantization is calibrated on training data.
"""

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from bigdl.nano.pytorch import InferenceOptimizer

METHODS = ["bf16", "openvino_bf16", "openvino_int8", "onnxruntime_int8_qlinear", "static_int8"]
BOUND = -1.0  # points


# -- digits --------------------------------------------------------------------------------------


class Convolutional(nn.Module):
    """Convolutional classifier of ten classes for images (N, 1, 8, 8)."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.features = nn.Sequential(
            *self._block(1, width),
            *self._block(width, width),
            nn.MaxPool2d(2),
            *self._block(width, 2 * width),
            *self._block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.classify = nn.Sequential(nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 10))

    @staticmethod
    def _block(given, made):
        return nn.Conv2d(given, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU()

    def forward(self, images):
        return self.classify(self.features(images))


def damaged(images, generator, noise=0.2):
    """Add a hidden square and noise to images (N, 1, 8, 8) with values from 0 to 1."""
    out = images + noise * generator.standard_normal(images.shape).astype(np.float32)
    for image, (row, column) in zip(
        out[:, 0], generator.integers(0, 7, (len(out), 2)), strict=True
    ):
        image[row : row + 2, column : column + 2] = 0
    return out


def digits(seed, copies):
    """Return training images and labels, and `copies` copies of the test images and labels."""
    generator = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = generator.permutation(len(images))
    train, test = order[:1197], order[1197:]
    x = np.concatenate([damaged(images[test], generator) for _ in range(copies)])
    y = np.tile(labels[test], copies)
    return (images[train], labels[train]), (torch.from_numpy(x), torch.from_numpy(y))


def trained(seed, images, labels, epochs):
    """Train a network; return it and the damaged images of its last epoch."""
    torch.manual_seed(seed)
    generator = np.random.default_rng(1000 + seed)
    model, targets = Convolutional(), torch.from_numpy(labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = epochs * -(-len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(epochs):
        x = torch.from_numpy(damaged(images, generator))
        for chosen in torch.randperm(len(x)).split(64):
            loss = nn.functional.cross_entropy(model(x[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval(), x


# -- models and their predictions ----------------------------------------------------------------


def build(model, method, sample, calibration):
    """Build the model with one method and a dynamic batch size."""
    precision = InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD[method].precision
    data = {"calib_data": calibration} if precision == "int8" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return InferenceOptimizer.build(
            model, method, input_sample=sample, thread_num=torch.get_num_threads(), **data
        )


def classes(model, x, batch=256):
    """Return the class of each item, int64 (N,)."""
    with InferenceOptimizer.get_context(model):
        return torch.cat([model(part).float().argmax(1) for part in x.split(batch)])


def interval(difference, images, resamples=4000):
    """Return the 95 % interval of the mean, in points.

    Parameters
    ----------
    difference : ndarray
        (copies * images,) of -1, 0 and 1, copy by copy.
    images : int
        Number of images: what is drawn again.
    """
    means = difference.reshape(-1, images).mean(0)
    drawn = np.random.default_rng(0).integers(0, images, (resamples, images))
    low, high = np.quantile(means[drawn].mean(1), [0.025, 0.975])
    return 100 * float(low), 100 * float(high)


def compare_digits(seeds, methods, copies, epochs):
    """Return rows: method, seed (or "all"), items, accuracy, fp32, difference, low, high."""
    right = {method: [] for method in ["fp32", *methods]}
    rows, count = [], 0
    for seed in seeds:
        (images, labels), (x, y) = digits(seed, copies)
        model, calibration = trained(seed, images, labels, epochs)
        right["fp32"].append((classes(model, x) == y).numpy())
        count = len(x) // copies
        for method in methods:
            fast = build(model, method, x[:8], calibration[:512])
            right[method].append((classes(fast, x) == y).numpy())
            rows.append(row(method, seed, right["fp32"][-1], right[method][-1], count))
            print(f"  seed {seed}, {method}: {rows[-1]['difference']:+.2f} points", flush=True)
    for method in methods if len(seeds) > 1 else ():
        # side by side, so that the copies of an image of one seed stay one column
        both = (
            np.concatenate([each.reshape(copies, count) for each in right[side]], 1).ravel()
            for side in ("fp32", method)
        )
        rows.append(row(method, "all", *both, count * len(seeds)))
    return rows


def row(method, seed, exact, fast, images):
    difference = fast.astype(float) - exact
    low, high = interval(difference, images)
    return {
        "method": method,
        "seed": seed,
        "items": len(exact),
        "images": images,
        "fp32": 100 * float(exact.mean()),
        "accuracy": 100 * float(fast.mean()),
        "difference": 100 * float(difference.mean()),
        "low": low,
        "high": high,
        "kept": low > BOUND,
    }


# -- photographs ---------------------------------------------------------------------------------


def photographs(folder, size, limit):
    """Return normalized images (N, 3, size, size), and labels."""
    from PIL import Image

    x, y = [], []
    for label, name in enumerate(sorted(each.name for each in Path(folder).iterdir())):
        for path in sorted(Path(folder, name).iterdir())[:limit]:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB").resize((size, size)), np.float32)
            x.append(pixels.transpose(2, 0, 1) / 127.5 - 1)
            y.append(label)
    return torch.from_numpy(np.stack(x)), torch.tensor(y)


def resnet(x, y, epochs):
    from bigdl.nano.pytorch.vision.models import resnet18

    torch.manual_seed(0)
    backbone = resnet18(include_top=False)
    model = nn.Sequential(backbone, nn.Flatten(), nn.Linear(backbone.get_output_size(), 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(32):
            flipped = x[chosen].flip(3) if torch.rand(()) < 0.5 else x[chosen]
            loss = nn.functional.cross_entropy(model(flipped), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def compare_photographs(folder, methods, size, epochs, limit, repeats):
    x, y = photographs(Path(folder, "train"), size, limit)
    held, truth = photographs(Path(folder, "val"), size, limit)
    model, one = resnet(x, y, epochs), held[:1]
    expected, rows = classes(model, held, 32), []
    for method in methods:
        fast = build(model, method, one, x[::4][:64])
        predicted = classes(fast, held, 32)
        times = [(seconds(model, one), seconds(fast, one)) for _ in range(repeats)]
        ratios = [plain / quick for plain, quick in times]
        rows.append(
            {
                "method": method,
                "images": len(held),
                "agreement": 100 * float((predicted == expected).float().mean()),
                "fp32": 100 * float((expected == truth).float().mean()),
                "accuracy": 100 * float((predicted == truth).float().mean()),
                "ms": 1e3 * statistics.median(quick for _, quick in times),
                "speedup": (statistics.median(ratios), min(ratios), max(ratios)),
            }
        )
        print(f"  {method}: agrees on {rows[-1]['agreement']:.1f} %", flush=True)
    return rows


def seconds(model, x, calls=5):
    """Return the seconds of a call, after a warm-up call."""
    with InferenceOptimizer.get_context(model):
        model(x)
        started = time.perf_counter()
        for _ in range(calls):
            model(x)
        return (time.perf_counter() - started) / calls


# -- tables --------------------------------------------------------------------------------------


def show_digits(rows):
    print(
        "\n| method | seed | items (images) | fp32, % | accuracy, % | difference, points | kept |"
    )
    print("|---|---|---|---|---|---|---|")
    for each in rows:
        print(
            f"| {each['method']} | {each['seed']} | {each['items']} ({each['images']}) "
            f"| {each['fp32']:.2f} | {each['accuracy']:.2f} "
            f"| {each['difference']:+.2f} ({each['low']:+.2f} to {each['high']:+.2f}) "
            f"| {'yes' if each['kept'] else 'NO'} |"
        )


def show_photographs(rows):
    print("\n| method | images | same class as fp32, % | fp32, % | accuracy, % | ms | × fp32 |")
    print("|---|---|---|---|---|---|---|")
    for each in rows:
        middle, low, high = each["speedup"]
        print(
            f"| {each['method']} | {each['images']} | {each['agreement']:.1f} | {each['fp32']:.1f} "
            f"| {each['accuracy']:.1f} | {each['ms']:.1f} | {middle:.2f} ({low:.2f}–{high:.2f}) |"
        )


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--copies", type=int, default=6, help="of each of 600 test images")
    parser.add_argument("--epochs", type=int, default=25, help="of the digits")
    parser.add_argument("--data-dir", help="folder of photographs")
    parser.add_argument("--size", type=int, default=96, help="photographs are made squares of it")
    parser.add_argument("--photo-epochs", type=int, default=4)
    parser.add_argument("--limit", type=int, help="photographs of a class; default all")
    parser.add_argument("--threads", type=int, default=1, help="of everything")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer copies and epochs")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.copies = options.seeds[:1], 4
        options.epochs, options.photo_epochs = min(options.epochs, 10), 1
        options.limit = options.limit or 40

    torch.set_num_threads(options.threads)
    report = {
        "digits": compare_digits(options.seeds, options.methods, options.copies, options.epochs)
    }
    show_digits(report["digits"])
    if options.data_dir:
        report["photographs"] = compare_photographs(
            options.data_dir,
            options.methods,
            options.size,
            options.photo_epochs,
            options.limit,
            2 if options.quick else 7,
        )
        show_photographs(report["photographs"])
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
