"""What the radar will show: rain for the next six scans from the last ten.

    python examples/applications/nowcasting.py --events 60 --epochs 10 --picture forecast.png

Scans of rain are generated: cells that move with a wind of each event's own, and grow and decay.
Spark cuts their series into windows on its workers, a ConvLSTM encoder-decoder learns from them by
the Estimator, and its forecasts of held-out events are compared by the critical success index (CSI:
hits of all that was forecast or came) with two others: that nothing changes (persistence), and that
the last scan moves on as OpenCV's optical flow says.

For scans of your own, make a DataFrame of ``event``, ``step`` and ``scan`` (height times width
numbers from 0 to 1) for :func:`windows_of`.
"""

import argparse

import cv2
import numpy as np
import torch
from torch import nn

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.learn.pytorch import Estimator

PAST, AHEAD = 10, 6
SIZE, STEPS = 32, 24
THRESHOLDS = (0.2, 0.5)


# -- scans -----------------------------------------------------------------------------------------


def event(seed):
    """Scans of an event, float32 of shape ``(STEPS, SIZE, SIZE)`` from 0 to 1."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    angle, speed = rng.uniform(0, 2 * np.pi), rng.uniform(0.5, 1.2)
    wind = speed * np.array([np.cos(angle), np.sin(angle)])
    count = int(rng.integers(4, 8))
    middle = SIZE / 2 - wind * STEPS / 2
    places = middle + rng.uniform(-SIZE / 2, SIZE / 2, (count, 2))
    widths, births = rng.uniform(2.5, 5, count), rng.uniform(-8, STEPS - 8, count)
    lives, peaks = rng.uniform(14, 26, count), rng.uniform(0.6, 1.0, count)
    scans = np.zeros((STEPS, SIZE, SIZE), np.float32)
    for step in range(STEPS):
        age = np.clip((step - births) / lives, 0, 1)
        strength = peaks * np.sin(np.pi * age)
        for (left, top), width, power in zip(places + wind * step, widths, strength, strict=True):
            scans[step] += power * np.exp(-((x - left) ** 2 + (y - top) ** 2) / (2 * width**2))
    return np.clip(scans + rng.normal(0, 0.01, scans.shape), 0, 1).astype(np.float32)


def events_frame(spark, first, count):
    """A DataFrame of event, step and scan; the workers generate it."""

    def scans(batches):
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                rows = event(number).reshape(STEPS, -1)
                columns = [[number] * STEPS, list(range(STEPS)), list(rows)]
                kinds = [pa.int64(), pa.int32(), pa.list_(pa.float32())]
                arrays = [pa.array(c, k) for c, k in zip(columns, kinds, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, ["event", "step", "scan"])

    return spark.range(first, first + count).mapInArrow(
        scans, "event long, step int, scan array<float>"
    )


def windows_of(frame, stride=2):
    """Windows of the scans of each event: past and ahead, as nested arrays."""

    def cut(pdf):
        import pandas as pd

        scans = np.stack(pdf.sort_values("step")["scan"]).reshape(len(pdf), -1)
        starts = range(0, len(scans) - PAST - AHEAD + 1, stride)
        return pd.DataFrame(
            {
                "event": pdf["event"].iloc[0],
                "start": list(starts),
                "past": [list(scans[s : s + PAST]) for s in starts],
                "ahead": [list(scans[s + PAST : s + PAST + AHEAD]) for s in starts],
            }
        )

    schema = "event long, start int, past array<array<float>>, ahead array<array<float>>"
    return frame.groupBy("event").applyInPandas(cut, schema)


# -- the model -------------------------------------------------------------------------------------


class ConvLSTMCell(nn.Module):
    """An LSTM whose states are maps and whose gates are convolutions."""

    def __init__(self, given, hidden):
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(given + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x, state):
        h, c = state
        i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


class Nowcast(nn.Module):
    """Encodes the past at half of the resolution and decodes the change from scan to scan."""

    def __init__(self, config):
        super().__init__()
        hidden = config["hidden"]
        self.down = nn.Conv2d(1, hidden, 4, stride=2, padding=1)
        self.encoder, self.decoder = ConvLSTMCell(hidden, hidden), ConvLSTMCell(hidden, hidden)
        self.up = nn.Sequential(
            nn.ConvTranspose2d(hidden, hidden, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(hidden, 1, 3, padding=1),
        )

    def forward(self, past):
        scans = past.reshape(len(past), PAST, 1, SIZE, SIZE)
        zeros = scans.new_zeros(len(past), self.encoder.hidden, SIZE // 2, SIZE // 2)
        state = zeros, zeros
        for step in range(PAST):
            state = self.encoder(torch.relu(self.down(scans[:, step])), state)
        scan, ahead = scans[:, -1], []
        for _ in range(AHEAD):
            state = self.decoder(torch.relu(self.down(scan)), state)
            scan = (scan + self.up(state[0])).clamp(-0.2, 1.2)
            ahead.append(scan)
        return torch.stack(ahead, 1).reshape(len(past), AHEAD, SIZE * SIZE)


class BalancedLoss(nn.Module):
    """A loss in which heavy rain, of which there is little, counts more.

    After X. Shi et al., "Deep Learning for Precipitation Nowcasting", NeurIPS 2017.
    """

    def forward(self, output, target):
        losses = nn.functional.smooth_l1_loss(output, target, beta=0.1, reduction="none")
        return ((1 + 4 * target) * losses).mean()


# -- other forecasts, and the index ----------------------------------------------------------------


def persistence(past):
    return np.repeat(past[:, -1:], AHEAD, 1)


def optical_flow(past):
    """The last scan moved on by the flow between the last two (Farneback)."""
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    ahead = np.empty((len(past), AHEAD, SIZE, SIZE), np.float32)
    for number, scans in enumerate(past):
        before, last = ((scan * 255).astype(np.uint8) for scan in scans[[-3, -1]])
        flow = cv2.calcOpticalFlowFarneback(before, last, None, 0.5, 3, 11, 5, 7, 1.5, 0) / 2
        flow = cv2.GaussianBlur(flow, (0, 0), 4)
        for step in range(AHEAD):
            far = flow * (step + 1)
            at = x - far[..., 0], y - far[..., 1]
            ahead[number, step] = cv2.remap(
                scans[-1], *at, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
            )
    return ahead


def csi(forecast, truth, threshold):
    """The critical success index of each step ahead."""
    said, came = forecast >= threshold, truth >= threshold
    axes = (0, 2, 3)
    return (said & came).sum(axes) / np.maximum((said | came).sum(axes), 1)


def draw(path, past, truth, forecasts):
    """The last scan, and rows of the truth and of each forecast."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {"truth": truth, **forecasts}
    figure, axes = pyplot.subplots(len(rows), AHEAD + 1, figsize=(9, 1.4 * len(rows)))
    for line, (name, scans) in zip(axes, rows.items(), strict=True):
        for axis, scan in zip(line, [past[-1], *scans], strict=True):
            axis.imshow(scan, vmin=0, vmax=1, cmap="viridis")
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(name)
    for step, axis in enumerate(axes[0]):
        axis.set_title("now" if step == 0 else f"+{step}")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=120, help="to train with")
    parser.add_argument("--test-events", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--picture", help="a file for a picture of one forecast")
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores)
    spark = OrcaContext.get_spark_session()
    first = 1_000_000 * (options.seed + 1)
    train = windows_of(events_frame(spark, first, options.events))
    test = windows_of(events_frame(spark, first + options.events, options.test_events))
    est = Estimator.from_torch(
        model=Nowcast,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=BalancedLoss(),
        config={"hidden": options.hidden},
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": ["past"], "label_cols": ["ahead"]}
    stats = est.fit(train, epochs=options.epochs, batch_size=32, seed=options.seed, **columns)
    print(f"loss {stats[0]['train_loss']:.4f} to {stats[-1]['train_loss']:.4f}")

    rows = est.predict(test, batch_size=64, feature_cols=["past"]).toPandas()

    def scans(name):
        """A column as an array (rows, steps, SIZE, SIZE)."""
        steps = [np.stack([np.asarray(scan, np.float32) for scan in row]) for row in rows[name]]
        return np.stack(steps).reshape(len(rows), -1, SIZE, SIZE)

    past, truth = scans("past"), scans("ahead")
    forecasts = {
        "ConvLSTM": scans("prediction"),
        "optical flow": optical_flow(past),
        "persistence": persistence(past),
    }
    found = {}
    for threshold in THRESHOLDS:
        for name, forecast in forecasts.items():
            found[name, threshold] = csi(forecast, truth, threshold)
            line = " ".join(f"{value:.3f}" for value in found[name, threshold])
            print(f"CSI at {threshold}, +1 to +{AHEAD}: {line}  {name}")
    if options.picture:
        some = int(truth[:, -1].sum((1, 2)).argmax())
        draw(options.picture, past[some], truth[some], {n: f[some] for n, f in forecasts.items()})
    return found


if __name__ == "__main__":
    main()
    stop_orca_context()
