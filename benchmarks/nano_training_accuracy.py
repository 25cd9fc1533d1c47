"""Accuracy of fits with the fast settings of Nano's Trainer, compared with fp32.

    python benchmarks/nano_training_accuracy.py [--seeds 0 1 2] [--epochs 12]
        [--only digits spoken frozen] [--data-dir spoken-digits] [--json results.json] [--quick]

The same network learns the same data in the same order twice: by Lightning's Trainer in fp32, and
by Nano's with its defaults, which compute in bfloat16 where the processor can, in channels_last and
with fused optimizers. ``digits`` are scikit-learn's images under noise and occlusion, ``spoken``
recordings of spoken digits (``<digit>_<speaker>_<n>.wav``, 8 kHz) as spectrograms; half of the
recordings of each digit and speaker are held out. ``frozen`` has the same recordings: the trunk
learns five of the digits in fp32, is frozen, and a new head learns all ten on each side; Nano runs
the trunk as a frozen prefix, which ``frozen_prefix=True`` asks for, since so small a one would not
repay it. A seed is another split, other damage and another
network. Differences are paired by seed, in points; a difference is kept if its mean over the seeds
is above -0.5.
"""

import argparse
import json
import logging
import os
import statistics
import time
import warnings
import wave
from pathlib import Path

import numpy as np
import pytorch_lightning
import torch
from nano_accuracy import Convolutional, digits
from torch import nn

from bigdl.nano.pytorch import Trainer

BOUND = -0.5  # points
LENGTH = 6000  # samples of a recording: 0.75 s
SIDES = {
    "fp32": (pytorch_lightning.Trainer, {"precision": 32}),
    "nano": (Trainer, {}),
}
FROZEN = {"nano": {"frozen_prefix": True}}  # further options


class Spoken(nn.Module):
    """Classifier of ten digits for spectrograms (N, 1, 64, 46)."""

    def __init__(self, widths=(16, 32, 64, 64)):
        super().__init__()
        given, layers = 1, []
        for made in widths:
            layers += [nn.Conv2d(given, made, 3, padding=1, bias=False), nn.BatchNorm2d(made)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            given = made
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classify = nn.Sequential(nn.Dropout(0.2), nn.Linear(given, 10))

    def forward(self, spectrograms):
        return self.classify(self.features(spectrograms))


class Classifier(pytorch_lightning.LightningModule):
    """LightningModule that trains a classifier."""

    def __init__(self, network, steps):
        super().__init__()
        self.network, self.steps = network, steps

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


# -- data ------------------------------------------------------------------------------------------


def digits_case(seed, options):
    """Return training and test data, and a network: images of (1, 8, 8)."""
    (images, labels), test = digits(seed, copies=6)
    noise = np.random.default_rng(seed + 50).normal(0, 0.2, images.shape).astype(np.float32)
    return (torch.from_numpy(images + noise), torch.from_numpy(labels)), test, Convolutional


def spectrogram(path):
    """Return the log energies in time and frequency, float32 (1, 64, 46)."""
    with wave.open(str(path)) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    sound = torch.from_numpy(sound[:LENGTH].astype(np.float32) / 32768)
    sound = nn.functional.pad(sound, (0, LENGTH - len(sound)))
    window = torch.hann_window(256)
    spectrum = torch.stft(sound, 256, 132, window=window, return_complex=True).abs()[:64]
    return torch.log(spectrum + 1e-3)[None]


def spoken_case(seed, options):
    """Return training and test data, and a network: spectrograms of (1, 64, 46)."""
    paths = sorted(Path(options.data_dir).glob("*.wav"))
    x = torch.stack([spectrogram(path) for path in paths])
    y = torch.tensor([int(path.name[0]) for path in paths])
    groups = {}
    for i, path in enumerate(paths):
        groups.setdefault(path.name.rsplit("_", 1)[0], []).append(i)
    drawn = np.random.default_rng(seed)
    halves = [np.array_split(drawn.permutation(group), 2) for group in groups.values()]
    train, test = (
        torch.from_numpy(np.sort(np.concatenate(each))) for each in zip(*halves, strict=True)
    )
    x = (x - x[train].mean()) / x[train].std()
    return (x[train], y[train]), (x[test], y[test]), Spoken


def frozen_case(seed, options):
    """Return the data of `spoken_case`, and a network with a trunk trained on the digits 0 to 4."""
    (x, y), test, _ = spoken_case(seed, options)
    few = y < 5
    learnt = fitted("fp32", Spoken(), (x[few], y[few]), seed, options.epochs)[0]

    def network():
        made = Spoken()
        made.features.load_state_dict(learnt.features.state_dict())
        made.features.requires_grad_(False).eval()
        return made

    return (x, y), test, network


CASES = {"digits": digits_case, "spoken": spoken_case, "frozen": frozen_case}


# -- training --------------------------------------------------------------------------------------


def fitted(side, network, data, seed, epochs, batch=32, **options):
    """Train a network; return it, the seconds, and the Trainer's settings."""
    x, y = data
    model = Classifier(network, epochs * -(-len(x) // batch))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y),
        batch_size=batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )
    kind, given = SIDES[side]
    trainer = kind(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
        **options,
    )
    started = time.perf_counter()
    trainer.fit(model, loader)
    return model.network, time.perf_counter() - started, getattr(trainer, "settings", ())


def trained(side, case, seed, epochs, **options):
    """Return the test accuracy in percent, the seconds of the training, and its settings."""
    data, (test_x, test_y), network = case
    pytorch_lightning.seed_everything(seed, verbose=False)
    model, seconds, settings = fitted(side, network(), data, seed, epochs, **options)
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(1) for part in test_x.split(512)])
    return 100 * float((predicted == test_y).float().mean()), seconds, settings


def compare(name, options):
    """Return rows: seed, fp32, nano, difference, seconds of both."""
    rows = []
    for seed in options.seeds:
        case = CASES[name](seed, options)
        more = FROZEN if name == "frozen" else {}
        measurements = {
            side: trained(side, case, seed, options.epochs, **more.get(side, {})) for side in SIDES
        }
        rows.append(
            {
                "seed": seed,
                "fp32": measurements["fp32"][0],
                "nano": measurements["nano"][0],
                "difference": measurements["nano"][0] - measurements["fp32"][0],
                "seconds": [measurements[side][1] for side in SIDES],
                "settings": measurements["nano"][2],
            }
        )
    return rows


def report(name, rows):
    print(f"\n### {name}\n\n| seed | fp32, % | nano, % | difference, points | s, fp32 / nano |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['seed']} | {row['fp32']:.2f} | {row['nano']:.2f} | {row['difference']:+.2f} "
            f"| {row['seconds'][0]:.1f} / {row['seconds'][1]:.1f} |"
        )
    means = [statistics.mean(row[key] for row in rows) for key in ("fp32", "nano", "difference")]
    print(f"| mean | {means[0]:.2f} | {means[1]:.2f} | {means[2]:+.2f} | |")
    verdict = "kept" if means[2] >= BOUND else "LOST"
    print(f"\nThe last fit of Nano: {', '.join(rows[-1]['settings'])}")
    print(f"\n{name}: {means[2]:+.2f} points (bound {BOUND}): {verdict}", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--data-dir", help="the recordings; default: $BIGDL_DATA/spoken-digits")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="one seed, 3 epochs")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.epochs = options.seeds[:1], 3
    if options.data_dir is None and "BIGDL_DATA" in os.environ:
        options.data_dir = os.path.join(os.environ["BIGDL_DATA"], "spoken-digits")
    if "spoken" in options.only and not Path(options.data_dir or "").is_dir():
        parser.error("pass --data-dir, or set BIGDL_DATA to the folder that holds spoken-digits")
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "bigdl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    results = {name: compare(name, options) for name in options.only}
    for name, rows in results.items():
        report(name, rows)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
