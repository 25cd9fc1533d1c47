"""Classify a stream of spoken digits.

    python examples/applications/streaming_speech.py --data-dir spoken-digits
    python examples/applications/streaming_speech.py --data-dir spoken-digits --servers kafka:9092

With ``--servers``, sounds (WAV files) are records of a Kafka topic, and the answers are written to
another topic, each exactly once. Otherwise they are Parquet files in a folder, and the answers are
written to another folder. One Structured Streaming query computes log-mel spectra and classifies
them with a convolutional network, which the Estimator trains first and which runs in OpenVINO in
Spark tasks.

``--data-dir`` contains files ``{digit}_{speaker}_{number}.wav`` of 8 kHz; numbers below 5 are the
test set. Without it, generated tones replace speech. For your own sounds, change
:func:`read_sounds`.
"""

import argparse
import io
import json
import tempfile
import threading
import time
import wave
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.inference import InferenceModel, map_batches
from bigdl.orca.learn.pytorch import Estimator

RATE, SECOND = 8000, 8000
WINDOW, HOP, BANDS = 256, 128, 32
FRAMES = (SECOND - WINDOW) // HOP + 1
SOUNDS, ANSWERS = "sounds", "answers"


# -- sounds ----------------------------------------------------------------------------------------


def read_sounds(data_dir):
    """Return files and digits for training and testing."""
    parts = {"train": [], "test": []}
    for path in sorted(Path(data_dir).rglob("*.wav")):
        digit, _, number = path.stem.split("_")
        part = "test" if int(number) < 5 else "train"
        parts[part].append((path.read_bytes(), int(digit)))
    return parts["train"], parts["test"]


def made_up_sounds(seed=0):
    """Generate two gliding tones per digit for several speakers, as files and digits."""
    rng = np.random.default_rng(seed)
    parts = ([], [])
    for number in range(20):
        for digit in range(10):
            seconds = rng.uniform(0.3, 0.7)
            t = np.arange(int(seconds * RATE)) / RATE
            pitch = rng.uniform(0.9, 1.1)
            low = (300 + 70 * digit) * pitch * (1 + 0.2 * t * (-1) ** digit)
            high = (900 + 370 * digit % 1800) * pitch * (1 - 0.2 * t)
            sound = np.sin(2 * np.pi * low * t) + 0.6 * np.sin(2 * np.pi * high * t)
            sound = (sound + rng.normal(0, 0.2, len(t))) * np.hanning(len(t)) * 8000
            parts[number < 5].append((wav(sound.astype(np.int16)), digit))
    return parts


def wav(samples):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(samples.tobytes())
    return file.getvalue()


def samples_of(file):
    """Return the first second of a WAV file, padded with silence, from -1 to 1."""
    with wave.open(io.BytesIO(file)) as sound:
        data = np.frombuffer(sound.readframes(SECOND), np.int16)
    samples = np.zeros(SECOND, np.float32)
    samples[: len(data)] = data / 32768
    return samples


def _mel_filters():
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    bins = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
    return np.clip(np.minimum(rising, falling), 0, None).astype(np.float32)


MEL = _mel_filters()
HANN = np.hanning(WINDOW).astype(np.float32)


def spectra(files):
    """Return log-mel spectra of WAV files: float32 of shape ``(files, 1, FRAMES, BANDS)``."""
    samples = np.stack([samples_of(file) for file in files])
    samples /= np.abs(samples).max(1, keepdims=True) + 1e-6
    windows = np.lib.stride_tricks.sliding_window_view(samples, WINDOW, axis=1)[:, ::HOP]
    power = np.abs(np.fft.rfft(windows * HANN, axis=2)).astype(np.float32) ** 2
    return np.log(power @ MEL + 1e-4)[:, None] / 4


# -- the model -------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Classifier of the ten digits from a spectrum."""

    def __init__(self, config=None):
        super().__init__()
        layers, channels = [], 1
        for width in (16, 32, 64):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3))
        self.head = nn.Linear(64 * (FRAMES // 8) * (BANDS // 8), 10)

    def forward(self, x):
        return self.head(self.layers(x))


def trained(sounds, epochs):
    files, digits = zip(*sounds, strict=True)
    est = Estimator.from_torch(
        model=Classifier,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=nn.CrossEntropyLoss(),
        workers_per_node=1,
    )
    data = {"x": spectra(files), "y": np.array(digits)}
    stats = est.fit(data, epochs=epochs, batch_size=32, seed=0)
    print(f"loss {stats[0]['train_loss']:.3f} to {stats[-1]['train_loss']:.3f}")
    model = InferenceModel()
    sample = data["x"][:64]
    return model.load_module(est.get_model().eval(), accelerate="openvino_fp32", sample=sample)


# -- the stream ------------------------------------------------------------------------------------


def classify(batch, models):
    """Return the key of each sound and its answer as JSON."""
    scores = models["digits"].predict(spectra(batch["value"]))
    digits = scores.argmax(1)
    chances = 1 / np.exp(scores - scores.max(1, keepdims=True)).sum(1)
    came = batch["timestamp"].astype("datetime64[us]").astype(np.int64) / 1e6
    answers = [
        json.dumps({"digit": int(d), "chance": round(float(c), 3), "sound": float(t)})
        for d, c, t in zip(digits, chances, came, strict=True)
    ]
    return {"answer": answers}


def answered(stream, model):
    """Replace the values of a stream of key, value and timestamp by answers."""
    return map_batches(
        stream,
        classify,
        "answer string",
        models={"digits": model},
        columns=["value", "timestamp"],
        keep="key",
        batch_size=128,
    )


def by_files(spark, model, sounds, folder):
    """Answer sounds that arrive as files in a folder; return the answers by key."""
    arrived, answers = Path(folder, SOUNDS), Path(folder, ANSWERS)
    arrived.mkdir()
    schema = "key string, value binary, timestamp timestamp"
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 4).parquet(str(arrived))
    writer = answered(stream, model).writeStream.format("parquet")
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
    query = writer.start(str(answers))
    for low in range(0, len(sounds), 50):
        part = sounds[low : low + 50]
        frame = pd.DataFrame(
            {
                "key": [str(i) for i in range(low, low + len(part))],
                "value": [file for file, _ in part],
                "timestamp": pd.Timestamp.now("UTC").floor("us"),
            }
        )
        frame.to_parquet(Path(folder, "part"), coerce_timestamps="us")
        Path(folder, "part").rename(arrived / f"{low:06d}.parquet")  # written atomically
        time.sleep(0.1)
    query.processAllAvailable()
    query.stop()
    return [(r.key, json.loads(r.answer)) for r in spark.read.parquet(str(answers)).collect()]


def by_kafka(servers, model, sounds, folder, rate, connector="auto"):
    """Answer sounds from one Kafka topic in another; return the answers by key."""
    from bigdl.orca.data.kafka import read_kafka, write_kafka

    make_topics(servers)
    stream = read_kafka(servers, SOUNDS, most_records=2000, connector=connector)
    result = answered(stream, model)
    query = write_kafka(result, servers, ANSWERS, f"{folder}/checkpoint", value="answer")
    sender = threading.Thread(target=send, args=(servers, sounds, rate))
    sender.start()
    answers = list(received(servers, len(sounds)))
    sender.join()
    query.stop()
    return [(key, answer) for key, answer, _ in answers]


def make_topics(servers, partitions=2):
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    there = admin.list_topics(timeout=30).topics
    new = [NewTopic(name, partitions, 1) for name in (SOUNDS, ANSWERS) if name not in there]
    for made in admin.create_topics(new).values() if new else ():
        made.result()


def send(servers, sounds, rate, first=0):
    """Send `rate` sounds per second, numbered from `first`."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "linger.ms": 2})
    started = time.monotonic()
    for number, (file, _) in enumerate(sounds):
        early = started + number / rate - time.monotonic()
        if early > 0.002:
            time.sleep(early)
        producer.produce(SOUNDS, file, str(first + number), timestamp=int(time.time() * 1000))
        producer.poll(0)
    producer.flush()


def received(servers, count, quiet_s=60.0, is_over=lambda: False):
    """Yield key, answer and time of up to `count` answers."""
    from confluent_kafka import Consumer

    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"reader-{time.time_ns()}",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([ANSWERS])
    last = time.monotonic()
    while count > 0 and time.monotonic() - last < quiet_s and not is_over():
        message = consumer.poll(0.5)
        if message is not None and message.error() is None:
            last, count = time.monotonic(), count - 1
            yield message.key().decode(), json.loads(message.value()), time.time()
    consumer.close()


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="a folder of WAV files")
    parser.add_argument("--servers", help="Kafka servers, host:port; default: files in a folder")
    parser.add_argument("--connector", default="auto", choices=["auto", "spark", "python"])
    parser.add_argument("--rate", type=float, default=100.0, help="sounds per second, with Kafka")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores)
    train, test = read_sounds(options.data_dir) if options.data_dir else made_up_sounds()
    model = trained(train, options.epochs)
    with tempfile.TemporaryDirectory() as folder:
        if options.servers:
            rate, connector = options.rate, options.connector
            answers = by_kafka(options.servers, model, test, folder, rate, connector)
        else:
            answers = by_files(OrcaContext.get_spark_session(), model, test, folder)
    right = np.mean([answer["digit"] == test[int(key)][1] for key, answer in answers])
    print(f"{len(answers)} answers to {len(test)} sounds, {100 * right:.1f} % right")
    return {"keys": sorted(int(key) for key, _ in answers), "sounds": len(test), "right": right}


if __name__ == "__main__":
    main()
    stop_orca_context()
