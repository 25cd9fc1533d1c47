"""DLRM and DCN with large tables: sharded embeddings compared with PyTorch in one process.

    python benchmarks/dlrm.py [--rows 10000000] [--repeats 3] [--quick] [--json results.json]
    python benchmarks/dlrm.py --auc 5          # and dense training, on tables where both fit
    python benchmarks/dlrm.py --sides keras keras.fit --rows 1000000

Rows of the shape of Criteo's: 13 numbers, 26 categories whose tables have the proportions of
Criteo's, with a few ids that are frequent and many that are rare, and a label that depends on
them. The model is DLRM (Naumov et al., 2019): two MLPs, and the dot products of all pairs of
vectors between them; or with ``--model dcn`` DCN v2 (Wang et al., 2021): three cross layers of low
rank on all vectors, and an MLP. Every side has the same model, batch size, learning rate and cores.

==================  =============================================================================
``bigdl, N×T``      ``Estimator.fit`` on N workers of T threads: ``ShardedEmbedding``,
                    ``RowwiseAdagrad``
``growing, N×T``    the same with a ``GrowingEmbedding``, which has the rows that were read only
``plain``           one process with all cores: one ``nn.Embedding(sparse=True)`` of all fields, the
                    row-wise Adagrad of its sparse gradient by hand, ``torch.optim.Adagrad`` for the
                    rest; batches are slices of tensors in memory
``fbgemm``          the same with FBGEMM's tables, which TorchRec uses, and the row-wise Adagrad of
                    their backward pass (``pip install fbgemm-gpu-cpu``; 1.8 goes with torch 2.13)
``fbgemm with …``   the same with ``DotInteraction``, which the sides of BigDL have
``torchrec, N×T``   N workers of Ray Train with TorchRec's tables, shared out to them and updated in
                    their backward pass, and DistributedDataParallel for the rest, as Ray's example
                    of a recommender has it (``pip install torchrec``; 1.8 goes with that FBGEMM)
``plain, Adagrad``  the same with ``torch.optim.Adagrad`` for the table, too: a state as large as
                    the table
``keras, N×T``      DLRM of Keras on TensorFlow by an Estimator with its ``ShardedEmbedding``
``keras.fit``       the same with ``keras.layers.Embedding`` and Adagrad, by ``fit`` of Keras
==================  =============================================================================

Every run is a separate process. Samples per second are those of the last epoch; the start, the
first values of the tables and the checkpoint are not in it, and neither are they in the seconds of
CPU that all processes of a side use for a million samples. Memory is what they have beyond the same
side with tables of a few rows, as a multiple of table and state.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import nn

from bigdl.friesian.models import DotInteraction
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.torch import GrowingEmbedding, RowwiseAdagrad, ShardedEmbedding

NUMBERS = 13
# distinct ids of Criteo's fields (Kaggle's data set), which say what the proportions are
CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
WIDTH = 32
OURS_ON_THEIRS = "fbgemm with DotInteraction"


def fields_of(rows):
    """Return the number of rows of each field's table, about `rows` in total."""
    return [max(3, int(n * rows / sum(CRITEO))) for n in CRITEO]


class PairProducts(nn.Module):
    """Pairwise products as computed by DLRM's authors and TorchRec; see ``DotInteraction``."""

    def __init__(self, fields):
        super().__init__()
        self.first, self.second = torch.tril_indices(fields + 1, fields + 1, -1)

    def forward(self, first, fields):
        vectors = torch.cat([first[:, None], fields], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([first, products[:, self.first, self.second]], 1)


class Interactions(nn.Module):
    """DLRM with one table for all fields."""

    def __init__(self, table, hidden, interaction):
        super().__init__()
        self.table = table
        self.bottom = nn.Sequential(
            nn.Linear(NUMBERS, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH), nn.ReLU()
        )
        self.interaction = interaction(len(CRITEO))
        pairs = len(CRITEO) * (len(CRITEO) + 1) // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, numbers, ids):
        return self.top(self.interaction(self.bottom(numbers), self.table(ids)))[:, 0]


class Crosses(nn.Module):
    """DCN v2 with one table for all fields."""

    def __init__(self, table, hidden, _interaction, layers=3):
        super().__init__()
        self.table = table
        width = NUMBERS + len(CRITEO) * WIDTH
        self.down = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(hidden, width) for _ in range(layers))
        self.top = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, numbers, ids):
        first = crossed = torch.cat([numbers, self.table(ids).flatten(1)], 1)
        for down, up in zip(self.down, self.up, strict=True):
            crossed = torch.addcmul(crossed, first, up(down(crossed)))
        return self.top(crossed)[:, 0]


MODELS = {"dlrm": Interactions, "dcn": Crosses}


class Fields(nn.Module):
    """Tables of several fields in one ``nn.Embedding``."""

    def __init__(self, fields, *, sparse):
        super().__init__()
        self.rows = nn.Embedding(sum(fields), WIDTH, sparse=sparse)
        nn.init.normal_(self.rows.weight, std=0.05)
        self.starts = torch.tensor([0, *np.cumsum(fields)[:-1].tolist()])

    def forward(self, ids):
        return self.rows(ids + self.starts)


class Fused(nn.Module):
    """FBGEMM tables, which are updated in the backward pass."""

    def __init__(self, fields, lr):
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.rows = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in fields],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=lr,
            eps=1e-10,
        )
        for weight in self.rows.split_embedding_weights():
            nn.init.normal_(weight, std=0.05)

    def forward(self, ids):
        by_field = ids.t().contiguous().flatten()
        vectors = self.rows(by_field, torch.arange(len(by_field) + 1))
        return vectors.view(len(ids), len(CRITEO), WIDTH)


def small_values(rows):
    nn.init.normal_(rows, std=0.05)


def sharded_model(config):
    torch.manual_seed(config["seed"])
    table = ShardedEmbedding(config["fields"], WIDTH, init=small_values, storage=config["storage"])
    return MODELS[config["model"]](table, config["hidden"], DotInteraction)


def growing_model(config):
    torch.manual_seed(config["seed"])
    how = {"init": small_values, "storage": config["storage"]}
    table = GrowingEmbedding(WIDTH, fields=len(config["fields"]), **how)
    return MODELS[config["model"]](table, config["hidden"], DotInteraction)


def dense_model(config):
    """Return the same model with the same initial weights and dense gradients."""
    model = sharded_model(config)
    rows = model.table.weight.detach()
    model.table = Fields(config["fields"], sparse=False)
    with torch.no_grad():
        model.table.rows.weight.copy_(rows)
    return model


def keras_model(config):
    """Return a compiled DLRM in Keras."""
    import keras
    from keras import layers, ops

    from bigdl.orca.keras import ShardedEmbedding as KerasEmbedding

    keras.utils.set_random_seed(config["seed"])
    small = keras.initializers.RandomNormal(stddev=0.05)
    fields, hidden = config["fields"], config["hidden"]
    numbers = keras.Input((NUMBERS,))
    ids = keras.Input((len(CRITEO),), dtype="int64")
    if config["is_sharded"]:
        how = {"optimizer": "rowwise_adagrad", "storage": config["storage"]}
        rows = KerasEmbedding(fields, WIDTH, small, **how)(ids)
    else:
        starts = ops.convert_to_tensor([[0, *np.cumsum(fields)[:-1].tolist()]], "int64")
        rows = layers.Embedding(sum(fields), WIDTH, small)(ids + starts)
    first = layers.Dense(hidden, activation="relu")(numbers)
    first = layers.Dense(WIDTH, activation="relu")(first)
    vectors = layers.Concatenate(axis=1)([layers.Reshape((1, WIDTH))(first), rows])
    count = len(CRITEO) + 1
    one, other = np.tril_indices(count, -1)
    products = ops.matmul(vectors, ops.transpose(vectors, (0, 2, 1)))
    products = layers.Reshape((count * count,))(products)
    products = ops.take(products, one * count + other, axis=1)
    top = layers.Dense(hidden, activation="relu")(layers.Concatenate()([first, products]))
    model = keras.Model([numbers, ids], layers.Dense(1)(top))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adagrad(config["lr"]), loss)
    return model


def make_data(samples, fields, seed):
    """Return numbers, ids and labels."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(samples, NUMBERS)).astype("float32")
    ids = np.empty((samples, len(fields)), dtype=np.int64)
    score = numbers @ np.linspace(-0.3, 0.3, NUMBERS)
    for field, rows in enumerate(fields):
        # log-uniform: the k-th id has about 1 / k of the rows
        ids[:, field] = (np.exp(rng.random(samples) * np.log(rows + 1)) - 1).astype(np.int64)
        mixed = (ids[:, field].astype(np.uint64) + np.uint64(7919 * field + 1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        effect = (mixed >> np.uint64(40)).astype("float64") / (1 << 24) - 0.5
        score += 0.8 * effect
    labels = (rng.random(samples) < 1 / (1 + np.exp(1.2 - score))).astype("float32")
    return numbers, np.minimum(ids, np.array(fields) - 1), labels


# -- the sides -----------------------------------------------------------------------------------


class CpuTime(Callback):
    """Callback that writes the CPU seconds of a worker in the last epoch."""

    def __init__(self, folder):
        self.folder = folder

    def before_train_epoch(self, runner):
        self.began = time.process_time()

    def after_train_epoch(self, runner):
        seconds = time.process_time() - self.began
        Path(self.folder, f"cpu-{runner.rank}").write_text(str(seconds))


def config_of(options):
    names = ("seed", "fields", "hidden", "storage", "model", "lr")
    return {name: getattr(options, name) for name in names}


def keras_side(options, side, numbers, ids, labels):
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras

    folder = tempfile.TemporaryDirectory(dir=options.folder)

    class Times(keras.callbacks.Callback):
        """Callback that writes the seconds and CPU seconds of the last epoch."""

        def __init__(self, folder):
            super().__init__()
            self.folder = folder

        def on_epoch_begin(self, epoch, logs=None):
            self.began = time.perf_counter(), time.process_time()

        def on_epoch_end(self, epoch, logs=None):
            now = time.perf_counter(), time.process_time()
            text = json.dumps([b - a for a, b in zip(self.began, now, strict=True)])
            Path(self.folder, f"seconds-{os.getpid()}").write_text(text)

    config = {**config_of(options), "is_sharded": "×" in side}
    how = {"epochs": options.epochs, "batch_size": options.batch_size, "verbose": 0}
    times = Times(folder.name)
    with folder:
        if "×" in side:
            from bigdl.orca.learn.tf2 import Estimator as KerasEstimator

            estimator = KerasEstimator.from_keras(
                model_creator=keras_model,
                config=config,
                backend="local",
                workers_per_node=int(side.partition(", ")[2].partition("×")[0]),
                model_dir=folder.name,
            )
            data = {"x": [numbers, ids], "y": labels[:, None]}
            estimator.fit(data, callbacks=[times], seed=options.seed, **how)
            estimator.shutdown()
        else:
            keras_model(config).fit(
                [numbers, ids], labels[:, None], callbacks=[times], shuffle=True, **how
            )
        files = [json.loads(path.read_text()) for path in Path(folder.name).glob("seconds-*")]
    return [max(each[0] for each in files)], sum(each[1] for each in files), None


def torchrec_side(options, side, numbers, ids, labels):
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    workers, threads = map(int, side.partition(", ")[2].split("×"))
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        names = ("fields", "hidden", "model", "lr", "samples", "epochs", "batch_size", "seed")
        config = {name: getattr(options, name) for name in names}
        trainer = TorchTrainer(
            torchrec_loop,
            train_loop_config={**config, "threads": threads, "folder": folder},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()
        reports = [json.loads(path.read_text()) for path in Path(folder).glob("seconds-*")]
    ray.shutdown()
    return [max(each[0] for each in reports)], sum(each[1] for each in reports), None


def torchrec_loop(config):
    """Run a worker of Ray Train."""
    import ray.train
    import torch.distributed as dist
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(config["threads"])
    torch.manual_seed(config["seed"])
    table = torchrec_table(config["fields"])
    how = {"lr": config["lr"], "eps": 1e-10}
    apply_optimizer_in_backward(RowWiseAdagrad, table.parameters(), how)
    model = MODELS[config["model"]](table, config["hidden"], PairProducts)
    model = DistributedModelParallel(model, device=torch.device("cpu"))
    rest = [each for name, each in model.named_parameters() if "table" not in name]
    optimizer = torch.optim.Adagrad(rest, lr=config["lr"])
    data = make_data(config["samples"], config["fields"], config["seed"])
    numbers, ids, labels = map(torch.from_numpy, data)
    loss_of = nn.BCEWithLogitsLoss()
    for epoch in range(config["epochs"]):
        dist.barrier()
        started, began = time.perf_counter(), time.process_time()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(config["batch_size"]):
            picked = batch.tensor_split(world)[rank]
            optimizer.zero_grad()
            loss_of(model(numbers[picked], ids[picked]), labels[picked]).backward()
            optimizer.step()
        seconds = time.perf_counter() - started, time.process_time() - began
    Path(config["folder"], f"seconds-{rank}").write_text(json.dumps(seconds))
    ray.train.report({})


def torchrec_table(fields):
    """Return the TorchRec tables of all fields: bags of one row each."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [f"field{number}" for number in range(len(fields))]

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            tables = [
                EmbeddingBagConfig(
                    name=f"table_{name}",
                    embedding_dim=WIDTH,
                    num_embeddings=rows,
                    feature_names=[name],
                )
                for name, rows in zip(names, fields, strict=True)
            ]
            self.rows = EmbeddingBagCollection(tables, device=torch.device("meta"))

        def forward(self, ids):
            ones = torch.ones(ids.numel(), dtype=torch.int32)
            read = KeyedJaggedTensor(names, ids.t().flatten(), lengths=ones)
            return self.rows(read).values().view(len(ids), len(fields), WIDTH)

    return Bags()


def bigdl_side(options, side, numbers, ids, labels):
    config = config_of(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        estimator = Estimator.from_torch(
            model={
                "dense": dense_model(config) if side.startswith("dense") else None,
                "bigdl": sharded_model,
                "growing": growing_model,
            }[side.partition(",")[0]],
            optimizer=lambda model, config: options.sharded_optimizer(model),
            loss=nn.BCEWithLogitsLoss(),
            config=config,
            backend="local",
            workers_per_node=int(side.partition(", ")[2].partition("×")[0]),
            model_dir=folder,
        )
        metrics = estimator.fit(
            {"x": [numbers, ids], "y": labels},
            epochs=options.epochs,
            batch_size=options.batch_size,
            max_failures=0,
            seed=options.seed,
            callbacks=[CpuTime(folder)],
            profile=True,
        )
        estimator.shutdown()
        cpu = sum(float(path.read_text()) for path in Path(folder).glob("cpu-*"))
        model = estimator.get_model() if options.test is not None else None
    return [each["profile"]["mean_train_epoch_s"] for each in metrics], cpu, model


def plain_side(options, kind, numbers, ids, labels):
    torch.manual_seed(options.seed)
    torch.set_num_threads(os.cpu_count())
    kind, _, products = kind.partition(" with ")
    is_fused, by_hand = kind == "fbgemm", kind == "plain"
    table = Fused(options.fields, options.lr) if is_fused else Fields(options.fields, sparse=True)
    interaction = DotInteraction if products else PairProducts
    model = MODELS[options.model](table, options.hidden, interaction)
    of_table = {id(parameter) for parameter in table.parameters()}
    rest = [each for each in model.parameters() if id(each) not in of_table]
    trained = rest if is_fused or by_hand else model.parameters()
    optimizer = torch.optim.Adagrad(trained, lr=options.lr)
    weight = table.rows.weight if by_hand else None
    squares = torch.zeros(len(weight)) if by_hand else None
    numbers, ids, labels = map(torch.from_numpy, (numbers, ids, labels))
    loss_of, seconds = nn.BCEWithLogitsLoss(), []
    for epoch in range(options.epochs):
        started, began = time.perf_counter(), time.process_time()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for picked in order.split(options.batch_size):
            model.zero_grad()
            loss_of(model(numbers[picked], ids[picked]), labels[picked]).backward()
            if by_hand:
                gradient = weight.grad.coalesce()
                indices, values = gradient.indices()[0], gradient.values()
                with torch.no_grad():
                    sums = squares[indices] + values.square().mean(1)
                    squares[indices] = sums
                    weight.index_add_(
                        0, indices, values * (-options.lr / (sums.sqrt() + 1e-10))[:, None]
                    )
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    return seconds, time.process_time() - began, model


RUNS = {  # by the first word of a side
    **dict.fromkeys(("bigdl", "growing", "dense"), bigdl_side),
    **dict.fromkeys(("plain", "fbgemm"), plain_side),
    "keras": keras_side,
    "torchrec": torchrec_side,
}


def run_side(options, side):
    """Run one implementation in this process and return its metrics."""
    data = make_data(options.samples, options.fields, options.seed)
    with Watch() as watch:
        run = RUNS[re.split(r"\W", side)[0]]
        seconds, cpu, model = run(options, side, *data)
    metrics = {
        "samples_s": options.samples / seconds[-1],
        "cpu": 1e6 * cpu / options.samples,
        "peak": watch.peak,
    }
    if options.test is not None:
        metrics["auc"] = auc_of(model, *make_data(options.test, options.fields, options.seed + 999))
    return metrics


class Watch:
    """Context that measures the peak memory of this process and its children."""

    def __enter__(self):
        self.peak, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self):
        this = psutil.Process()
        while not self._ended.wait(0.2):
            total = 0
            for process in [this, *this.children(recursive=True)]:
                try:
                    total += process.memory_full_info().uss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


def auc_of(model, numbers, ids, labels):
    from sklearn.metrics import roc_auc_score

    with torch.no_grad():
        parts = [
            model(torch.from_numpy(n), torch.from_numpy(i))
            for n, i in zip(np.array_split(numbers, 20), np.array_split(ids, 20), strict=True)
        ]
    return float(roc_auc_score(labels, torch.cat(parts).numpy()))


# -- the table -----------------------------------------------------------------------------------


def in_child(options, side, **changes):
    arguments = {**vars(options), "side": side, **changes}
    started = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(started.stdout.splitlines()[-1])


def speed(options):
    sides = [f"bigdl, {n}×{max(1, os.cpu_count() // n)}" for n in options.workers]
    sides += [f"growing, {n}×{max(1, os.cpu_count() // n)}" for n in options.workers]
    sides += ["plain"] if options.rows > 2e7 else ["plain", "plain, Adagrad"]
    has_fbgemm = bool(importlib.util.find_spec("fbgemm_gpu"))
    sides += ["fbgemm"] if has_fbgemm else []
    if importlib.util.find_spec("torchrec"):
        sides += [f"torchrec, {n}×{max(1, os.cpu_count() // n)}" for n in options.workers]
    if options.model == "dlrm":
        sides += [OURS_ON_THEIRS] if has_fbgemm else []
        sides += [f"keras, {n}×{max(1, os.cpu_count() // n)}" for n in options.workers]
        sides += ["keras.fit"]
    wanted = options.sides or ["bigdl", "growing", "plain", "fbgemm", "torchrec", OURS_ON_THEIRS]
    sides = [side for side in sides if side.partition(",")[0] in wanted]
    measurements = {side: [] for side in sides}
    for repeat in range(options.repeats):
        for side in sides:
            measurements[side].append(in_child(options, side, seed=repeat))
            print(f"  {side}: {measurements[side][-1]}", file=sys.stderr)
    small = {s: in_child(options, s, rows=1000, epochs=1)["peak"] for s in sides}
    rows = sum(fields_of(options.rows))
    ours = ("bigdl", "growing", "keras, ", OURS_ON_THEIRS)
    others = [side for side in sides if not side.startswith(ours)]
    of_others = [statistics.median(f["samples_s"] for f in measurements[side]) for side in others]
    best = max(of_others, default=float("nan"))
    print(
        f"\n{options.model}, {rows:,} rows of {WIDTH}, batches of {options.batch_size:,}, "
        f"MLPs of {options.hidden}"
    )
    print(
        "| Implementation | samples/s (range) | ratio to the fastest of the others | "
        "CPU seconds for a million | memory / table and state |\n|---|---|---|---|---|"
    )
    for side in sides:
        rates = sorted(each["samples_s"] for each in measurements[side])
        is_wide = side in ("plain, Adagrad", "keras.fit")
        state = 4 * rows * (2 * WIDTH if is_wide else WIDTH + 1)
        memory = statistics.median(f["peak"] - small[side] for f in measurements[side]) / state
        median = statistics.median(rates)
        cpu = statistics.median(each["cpu"] for each in measurements[side])
        print(
            f"| {side} | {median:,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f}) | {median / best:.2f} "
            f"| {cpu:.1f} | {memory:.2f} |"
        )
    return measurements


def aucs(options):
    """Return the AUC of two workers with sharded tables and with dense gradients, by seed."""
    print("| seed | dense | sharded | difference |\n|---|---|---|---|")
    aucs_by_run = []
    for seed in range(options.auc):
        changes = {"seed": seed, "rows": options.auc_rows, "test": 200_000, "adagrad": True}
        a, b = (in_child(options, side, **changes)["auc"] for side in ("dense, 2×1", "bigdl, 2×1"))
        aucs_by_run.append((a, b))
        print(f"| {seed} | {a:.5f} | {b:.5f} | {b - a:+.5f} |", flush=True)
    return aucs_by_run


def child(arguments):
    options = argparse.Namespace(**arguments)
    options.fields = fields_of(options.rows)
    options.sharded_optimizer = lambda model: (
        torch.optim.Adagrad(model.parameters(), lr=options.lr)
        if options.adagrad
        else RowwiseAdagrad(model.parameters(), lr=options.lr)
    )
    print(json.dumps(run_side(options, options.side)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="of all tables together")
    parser.add_argument("--samples", type=int, default=400_000, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=64, help="width of the MLPs")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", choices=list(MODELS), default="dlrm")
    parser.add_argument(
        "--sides",
        nargs="+",
        help="of bigdl, growing, plain, fbgemm, torchrec (the default), keras, keras.fit",
    )
    parser.add_argument("--storage", choices=["memory", "mmap"], default="memory")
    parser.add_argument("--folder", help="for checkpoints; default that of temporary files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--auc", type=int, default=0, help="seeds; instead of speeds")
    parser.add_argument("--auc-rows", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    if options.quick:
        options.rows, options.samples, options.repeats = 100_000, 40_000, 1
    options.seed, options.test, options.adagrad = 0, None, False
    report = aucs(options) if options.auc else speed(options)
    print(f"\nPython {platform.python_version()}, torch {torch.__version__}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
