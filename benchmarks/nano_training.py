"""Training with Nano compared with plain Lightning: from JPEG files to updated weights.

    python benchmarks/nano_training.py --data-dir DIR
        [--only pipeline scratch transfer import head tabular resnet18 mlp transformer
                short12 short24] [--images 128] [--batch 64]
        [--repeats 5] [--cores 1] [--clock cpu] [--json results.json] [--quick]

The data are a folder with ``train/cat/*.jpg`` and ``train/dog/*.jpg`` (or the classes directly);
without ``--data-dir`` they are ``$BIGDL_DATA/cats-dogs``. The program is that of Fig. 2 of Dai et
al. (BigDL 2.0, CVPR 2022): resize to 256, no jitter, random crop of 224, random flip, resize to
128, and ResNet50 on cats and dogs, here with random weights: speed does not depend on them.

===================  ============================================================================
``pipeline``         files to batches of tensors: PIL transforms as torchvision applies them, and
                     Nano's datasets and transforms, with one thread and with all
``scratch``          all weights are trained: plain Lightning against Nano's Trainer with its
                     default settings and Nano's pipeline; a row for each setting left out, and for
                     TorchInductor, which is none of the default settings
``transfer``         the trunk is frozen and in eval mode, the head is trained: plain Lightning,
                     also with the trunk under ``no_grad``, against the frozen prefix in fp32, bf16
                     and int8; ``cached`` trains on features kept on disk, which needs transforms
                     that draw nothing, so it does other work than the rest
``import``           the frozen trunk again, in a program in which only the import is changed:
                     whole fits, with finding and building the other runtime
``head``             the head of a frozen encoder of texts (4 layers of width 256, 64 tokens) is
                     trained, with only the import changed
``tabular``          a small network on 32 columns, with only the import changed
``resnet18``, ``mlp``, ``transformer``
                     all weights are trained on random tensors in memory, with only the import
                     changed, and in a loop written by hand in each precision and memory format.
                     ``nano first`` finds an empty cache in each repeat, so it measures
``short12``, ``short24``
                     as ``import``, in fits of 12 and of 24 steps; ``nano first`` converts in each
                     repeat, ``nano`` is run again and finds the cache
===================  ============================================================================

Plain sides run in two processes, one with glibc's allocator as it is and one that keeps freed
memory (``bigdl.common.memory.tune_allocator``); Nano's Trainer tunes it by itself, in a third
process. A repeat asks every side in turn to train on the same number of images, so that the noise
of a shared machine meets all of them. Ratios are medians over the repeats of the ratio within one
repeat, with their range.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import metadata
from pathlib import Path

ALLOCATORS = ("default", "tuned")  # of the sides without Nano's Trainer, which has its "own"
# Steps of a fit, by scenario.
IN_MEMORY = {"resnet18": 48, "mlp": 300, "transformer": 48}
SHORT = {"short12": 12, "short24": 24}
STEPS = IN_MEMORY | SHORT
SIDES = {
    "pipeline": ("pil", "nano one thread", "nano"),
    "scratch": (
        "plain",
        "nano",
        "nano without pipeline",
        "nano without channels_last",
        "nano without bf16",
        "nano without fused optimizer",
        "nano without tuned process",
        "nano with inductor",
    ),
    "transfer": (
        "plain",
        "plain no_grad",
        "nano fp32",
        "nano bf16",
        "nano int8",
        "nano bf16 without pipeline",
        "nano int8 without pipeline",
        "nano int8 cached",
    ),
    "import": ("plain", "nano", "nano without frozen prefix"),
    "head": ("plain", "nano"),
    "tabular": ("plain", "nano"),
    **dict.fromkeys(
        IN_MEMORY,
        (
            "plain",
            "nano first",
            "nano",
            "hand fp32",
            "hand fp32 channels_last",
            "hand bf16",
            "hand bf16 channels_last",
        ),
    ),
    **dict.fromkeys(SHORT, ("plain", "nano first", "nano")),
}
# Of a scenario and a side, the ratio to the plain program that is aimed at.
GATES = {
    ("pipeline", "nano"): 1.8,
    ("scratch", "nano"): 2.8,
    ("transfer", "nano bf16"): 5.0,
    ("transfer", "nano int8"): 8.0,
    ("import", "nano"): 5.0,
    ("head", "nano"): 1.0,
    ("tabular", "nano"): 1.0,
    **{(name, "nano first"): 1.0 for name in IN_MEMORY},
    **{(name, "nano"): 2.0 for name in SHORT},
}
# Of a scenario, how many times as many images, rows or texts as --images.
SHARES = {"scratch": 1, "import": 8, "head": 8, "tabular": 200}
CALIBRATION_ROWS = 32
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


# -- the plain program: what torchvision's transforms do with PIL images --------------------------


def pil_dataset(root):
    import numpy as np
    import torch
    from PIL import Image
    from torch.utils.data import Dataset

    def shorter_edge(image, size):
        width, height = image.size
        scale = size / min(width, height)
        longer = int(size * max(width, height) / min(width, height))
        if scale == 1:
            return image
        new = (size, longer) if width <= height else (longer, size)
        return image.resize(new, Image.Resampling.BILINEAR)

    def transform(image):
        image = shorter_edge(image, 256)
        left = int(torch.randint(image.width - 224 + 1, ()))
        top = int(torch.randint(image.height - 224 + 1, ()))
        image = image.crop((left, top, left + 224, top + 224))
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = shorter_edge(image, 128)
        values = torch.from_numpy(np.array(image))
        return values.permute(2, 0, 1).contiguous().float().div(255)

    class PilFolder(Dataset):
        def __init__(self):
            classes = sorted(path for path in Path(root).iterdir() if path.is_dir())
            self.samples = [
                (file, label)
                for label, folder in enumerate(classes)
                for file in sorted(folder.glob("*.jpg"))
            ]

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, index):
            path, label = self.samples[index]
            with open(path, "rb") as file:
                return transform(Image.open(file).convert("RGB")), label

    return PilFolder()


def nano_dataset(root, augmented=True):
    from bigdl.nano.pytorch.vision import transforms
    from bigdl.nano.pytorch.vision.datasets import ImageFolder

    random_steps = [transforms.RandomCrop(224), transforms.RandomHorizontalFlip()]
    steps = random_steps if augmented else [transforms.CenterCrop(224)]
    chain = [transforms.Resize(256), transforms.ColorJitter(), *steps, transforms.Resize(128)]
    return ImageFolder(root, transforms.Compose([*chain, transforms.ToTensor()]))


def mixed(dataset, images):
    """Return a subset of samples of all classes, the same for every implementation."""
    from torch.utils.data import Subset

    order = list(range(len(dataset)))
    random.Random(0).shuffle(order)
    return Subset(dataset, (order * (1 + images // len(order)))[:images])


def loader_of(dataset, batch):
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True)


# -- the sides: each is built once and returns a function that trains on all images once ----------


def pipeline_side(case, name):
    dataset = mixed(
        pil_dataset(case["root"]) if name == "pil" else nano_dataset(case["root"]), case["images"]
    )
    if name == "nano one thread":
        from bigdl.nano.pytorch.vision import transforms

        # A function of the user's, which may not like threads.
        dataset.dataset.transform.transforms.append(transforms.Lambda(lambda tensor: tensor))
    loader = loader_of(dataset, case["batch"])

    def run():
        for _ in loader:
            pass

    return run, {}


def classifier(case, frozen, no_grad=False):
    import torch

    from bigdl.nano.pytorch.vision.models import ImageClassifier, resnet50

    class Classifier(ImageClassifier):
        losses = ()

        def forward(self, images):
            if not no_grad:
                return super().forward(images)
            with torch.no_grad():
                features = self.backbone(images)
            return self.head(features)

        def training_step(self, batch, batch_idx):
            images, labels = batch
            loss = self.criterion(self(images), labels)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            trained = [p for p in self.parameters() if p.requires_grad]
            return torch.optim.SGD(trained, 0.01, momentum=0.9)

    torch.manual_seed(0)
    backbone = resnet50()
    photographs = loader_of(mixed(nano_dataset(case["root"]), 32), 16)
    norms = [part for part in backbone.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # plain averages, for the statistics of a few batches
    with torch.no_grad():  # without statistics random features grow without bound
        for images, _ in photographs:
            backbone(images)
    for norm in norms:
        norm.momentum = 0.1
    model = Classifier(backbone.freeze() if frozen else backbone, 2)
    model.losses = []
    return model


def fit_of(trainer_of, model, loader, **options):
    """Return a function that trains the model on the loader once."""
    import logging

    for name in ("pytorch_lightning", "bigdl"):
        logging.getLogger(name).setLevel(logging.ERROR)

    told = {}

    def run():
        trainer = trainer_of(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(model, loader)
        told["settings"] = getattr(trainer, "settings", ())

    run.told = told
    return run


LEFT_OUT = {
    "channels_last": {"channels_last": False},
    "bf16": {"precision": 32},
    "fused optimizer": {"fused_optimizers": False},
    "tuned process": {"tune_process": False},
}


def trainer_class(nano):
    if nano:
        from bigdl.nano.pytorch import Trainer

        return Trainer
    import pytorch_lightning

    return pytorch_lightning.Trainer


def scratch_side(case, name):
    left_out = name.partition(" without ")[2]
    nano = name.startswith("nano")
    dataset = nano_dataset if nano and left_out != "pipeline" else pil_dataset
    model = classifier(case, frozen=False)
    loader = loader_of(mixed(dataset(case["root"]), case["images"]), case["batch"])
    options = LEFT_OUT.get(left_out, {"inductor": True} if "inductor" in name else {})
    return fit_of(trainer_class(nano), model, loader, **options), {"model": model}


def transfer_side(case, name):
    from bigdl.nano.pytorch.frozen import accelerate_frozen_prefix

    kind, _, left_out = name.partition(" without ")
    model = classifier(case, frozen=True, no_grad=kind == "plain no_grad")
    nano = kind.startswith("nano")
    dataset = nano_dataset if nano and left_out != "pipeline" else pil_dataset
    data = mixed(dataset(case["root"]), case["images"])
    about = {"model": model}
    if nano:
        calibration = loader_of(mixed(nano_dataset(case["root"]), CALIBRATION_ROWS), 8)
        started = time.perf_counter()
        prefix = accelerate_frozen_prefix(
            model,
            next(iter(calibration)),
            precision=kind.split()[1],
            calib_data=calibration,
            sample_size=CALIBRATION_ROWS,
        )
        about |= {"error": prefix.segments[0].error, "method": prefix.segments[0].method}
        about["prefix"] = prefix
        if kind.endswith("cached"):
            fixed = mixed(nano_dataset(case["root"], augmented=False), case["images"])
            about["folder"] = tempfile.TemporaryDirectory(prefix="bigdl-features-")
            data = prefix.cached(fixed, about["folder"].name, case["batch"])
        about["build_s"] = time.perf_counter() - started
    return fit_of(trainer_class(nano), model, loader_of(data, case["batch"])), about


def import_side(case, name):
    nano = name.startswith("nano")
    model = classifier(case, frozen=True)
    dataset = nano_dataset if nano else pil_dataset
    loader = loader_of(mixed(dataset(case["root"]), case["images"]), case["batch"])
    return fit_of(trainer_class(nano), model, loader, **prefix_options(name)), {"model": model}


def prefix_options(name):
    return {"frozen_prefix": False} if name.endswith("without frozen prefix") else {}


def trained_by_adam(parts, forward):
    """Return a LightningModule that trains the parameters that are not frozen."""
    import pytorch_lightning
    import torch

    class Program(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleDict(parts)
            self.losses = []

        def forward(self, x):
            return forward(self.parts, x)

        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 1e-3)

    return Program()


def head_side(case, name):
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    encoder = nn.Sequential(nn.Embedding(5000, 256), nn.TransformerEncoder(layer, 4))
    encoder.requires_grad_(False).eval()
    model = trained_by_adam(
        {"encoder": encoder, "head": nn.Linear(256, 2)},
        lambda parts, x: parts["head"](parts["encoder"](x)[:, 0]),
    )
    texts = torch.randint(0, 5000, (case["images"], 64))
    data = torch.utils.data.TensorDataset(texts, torch.arange(len(texts)) % 2)
    nano = name.startswith("nano")
    run = fit_of(trainer_class(nano), model, loader_of(data, case["batch"]), **prefix_options(name))
    return run, {"model": model}


def tabular_side(case, name):
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2)]
    model = trained_by_adam({"all": nn.Sequential(*layers)}, lambda parts, x: parts["all"](x))
    data = torch.utils.data.TensorDataset(
        torch.randn(case["images"], 32), torch.arange(case["images"]) % 2
    )
    nano = name.startswith("nano")
    return fit_of(trainer_class(nano), model, loader_of(data, case["batch"])), {"model": model}


def memory_program(name):
    """Return a network and a batch of its input."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "resnet18":
        from bigdl.nano.pytorch.vision.models import resnet18

        return nn.Sequential(resnet18(), nn.Linear(512, 10)), torch.randn(32, 3, 128, 128)
    if name == "mlp":
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(256, 64)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    layers = [nn.Embedding(5000, 256), nn.TransformerEncoder(layer, 2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64 * 256, 10)), torch.randint(0, 5000, (32, 64))


def memory_side(case, name):
    import torch

    net, x = memory_program(case["scenario"])
    y = torch.arange(len(x)) % 10
    steps = IN_MEMORY[case["scenario"]]
    loader = torch.utils.data.DataLoader([(x, y)] * steps, batch_size=None)
    if not name.startswith("hand"):
        model = trained_by_adam({"all": net}, lambda parts, x: parts["all"](x))
        return fit_of(trainer_class(name.startswith("nano")), model, loader), {"model": model}
    _, precision, *layout = name.split()
    memory_format = torch.channels_last if layout else torch.contiguous_format
    net.to(memory_format=memory_format)

    def run():
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        for images, labels in loader:
            if layout and images.dim() == 4:
                images = images.contiguous(memory_format=memory_format)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = torch.nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()

    return run, {}


BUILDERS = {
    "pipeline": pipeline_side,
    "scratch": scratch_side,
    "transfer": transfer_side,
    "import": import_side,
    "head": head_side,
    "tabular": tabular_side,
    **dict.fromkeys(IN_MEMORY, memory_side),
    **dict.fromkeys(SHORT, import_side),
}


# -- a process: all sides that run with one allocator ----------------------------------------------


def worker(case):
    """Build all implementations, run those named on stdin, and report the times."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print
    warnings.simplefilter("ignore")
    clock = CLOCKS[case["clock"]]
    if case["cores"]:  # before a library counts them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case["cores"]])
    if case["allocator"] == "tuned":
        from bigdl.common.memory import tune_allocator

        assert tune_allocator(), "this allocator cannot be tuned"
    os.environ["XDG_CACHE_HOME"] = case["cache"]
    runs, abouts = {}, {}
    for name in case["sides"]:
        runs[name], abouts[name] = BUILDERS[case["scenario"]](case, name)
        runs[name]()  # the first batches compile, allocate and read files
        prefix = abouts[name].get("prefix")
        assert prefix is None or prefix.segments[0].reason is None, prefix.report()
    told = {
        name: {key: about[key] for key in ("build_s", "method", "error") if key in about}
        for name, about in abouts.items()
    }
    answers.write(json.dumps(told) + "\n")
    for line in sys.stdin:
        name = line.strip()
        if name.endswith(" first"):
            os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=case["cache"])
        else:
            os.environ["XDG_CACHE_HOME"] = case["cache"]
        started = clock()
        runs[name]()
        answer = {"seconds": clock() - started}
        settings = getattr(runs[name], "told", {}).get("settings", ())
        answer["prefix"] = next((each for each in settings if "frozen prefix" in each), "")
        if "model" in abouts[name]:
            answer["loss"] = float(abouts[name]["model"].losses[-1])
        answers.write(json.dumps(answer) + "\n")


class Worker:
    """Process that runs implementations on demand."""

    def __init__(self, case):
        command = [sys.executable, __file__, "--worker", json.dumps(case)]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side failed, its process ended with {self.process.wait()}")
        return json.loads(line)

    def run(self, name):
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def allocators_of(scenario, side):
    """Return the processes in which an implementation runs."""
    if scenario == "pipeline" or side.startswith(("plain", "hand")):
        return ALLOCATORS
    # What a tuned allocator leaves behind must not help the side that does without.
    return ("untouched",) if side.endswith("tuned process") else ("own",)


def measure(scenario, options):
    with tempfile.TemporaryDirectory(prefix="bigdl-cache-") as cache:
        return measure_sides(scenario, options, cache)


def measure_sides(scenario, options, cache):
    """Return milliseconds per image of each implementation and allocator, in every repeat."""
    case = {"scenario": scenario, "root": options.root, "batch": options.batch}
    case |= {"clock": options.clock, "cores": 1 if options.clock == "cpu" else options.cores}
    case["images"] = options.images * SHARES.get(scenario, 4)  # as much time for all
    if scenario in STEPS:
        case["images"] = options.batch * STEPS[scenario]
    sides = [side for side in SIDES[scenario] if side in options.sides]
    shares = {}
    for side in sides:
        for allocator in allocators_of(scenario, side):
            shares.setdefault(allocator, []).append(side)
    workers = {
        allocator: Worker({**case, "cache": cache, "allocator": allocator, "sides": share})
        for allocator, share in shares.items()
    }
    measurements = {}
    try:
        for _ in range(options.repeats):
            for side in sides:
                for allocator in allocators_of(scenario, side):
                    answer = workers[allocator].run(side)
                    entry = measurements.setdefault((side, allocator), {"ms": [], "loss": None})
                    entry["ms"].append(1000 * answer["seconds"] / case["images"])
                    entry["loss"] = answer.get("loss")
                    entry["prefix"] = answer.get("prefix", "")
        for side, allocator in measurements:
            measurements[side, allocator] |= workers[allocator].about[side]
    finally:
        for each in workers.values():
            each.close()
    return measurements


# -- tables ----------------------------------------------------------------------------------------


def ratio(measurements, key, base):
    """Return median and range of the speedup over the base."""
    pairs = zip(measurements[base]["ms"], measurements[key]["ms"], strict=True)
    ratios = [before / after for before, after in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


def report(scenario, measurements):
    plain = SIDES[scenario][0]
    bases = [(plain, allocator) for allocator in ALLOCATORS if (plain, allocator) in measurements]
    titles = "".join(f" × {side}, {allocator} |" for side, allocator in bases)
    print(
        f"\n### {scenario}\n\n| Implementation | allocator | ms/image |{titles} loss | built in |"
    )
    print("|---|---|---|" + "---|" * len(bases) + "---|---|")
    for key, entry in measurements.items():
        cells = []
        for base in bases:
            middle, low, high = ratio(measurements, key, base)
            cells.append(f"{middle:.2f} ({low:.2f}…{high:.2f})")
        loss = "" if entry["loss"] is None else f"{entry['loss']:.3f}"
        built = ""
        if "build_s" in entry:
            built = f"{entry['build_s']:.0f} s, {entry['method']}, error {entry['error']:.2g}"
        built = built or entry.get("prefix", "")
        row = [*key, f"{statistics.median(entry['ms']):.2f}", *cells, loss, built]
        print("| " + " | ".join(row) + " |")
    report_gates(scenario, measurements, bases)
    sys.stdout.flush()


def report_gates(scenario, measurements, bases):
    for (where, side), gate in GATES.items():
        key = (side, allocators_of(scenario, side)[-1])
        if where != scenario or key not in measurements or not bases:
            continue
        reached = {base: ratio(measurements, key, base)[0] for base in bases}
        verdict = "met" if reached[bases[0]] >= gate else "MISSED"
        ratios = ", ".join(f"{value:.2f}× {' '.join(base)}" for base, value in reached.items())
        print(
            f"\n{scenario}, {side}: {ratios} (gate against the default process: {gate}: {verdict})"
        )


def versions():
    names = ("torch", "pytorch-lightning", "openvino", "opencv-python-headless", "pillow", "numpy")
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in names if name in installed)


def machine():
    from bigdl.common.cpu import core_count, isa_flags

    wanted = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    flags = isa_flags()
    with open("/proc/cpuinfo") as file:
        name = next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")
    return f"{core_count()} cores, {name}, {' '.join(f for f in wanted if f in flags)}"


def options_of(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", help="a folder with train/, or with a folder for each class")
    parser.add_argument("--only", nargs="*", choices=SIDES, default=list(SIDES))
    every = sorted({side for sides in SIDES.values() for side in sides})
    parser.add_argument("--sides", nargs="*", choices=every, default=every)
    parser.add_argument("--images", type=int, default=128, help="of a side in each repeat")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor time on one core, which a busy machine disturbs less",
    )
    parser.add_argument("--cores", type=int, help="of each side; by default all")
    parser.add_argument("--quick", action="store_true", help="2 short repeats of the main sides")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        return options
    if options.quick:
        options.repeats, options.batch, options.images = 2, 32, 64
        options.sides = [side for side in options.sides if " without " not in side]
    if options.images < options.batch:
        parser.error(f"--images {options.images} is less than one batch of {options.batch}")
    folder = options.data_dir or (
        os.environ.get("BIGDL_DATA") and Path(os.environ["BIGDL_DATA"], "cats-dogs")
    )
    if not folder or not Path(folder).is_dir():
        parser.error("pass --data-dir, or set BIGDL_DATA to the folder that holds cats-dogs")
    train = Path(folder, "train")
    options.root = str(train if train.is_dir() else folder)
    return options


def main(argv=None):
    options = options_of(argv)
    if options.worker:
        worker(json.loads(options.worker))
        return
    print(f"Python {platform.python_version()}, {versions()}; {machine()}", flush=True)
    results = {}
    for scenario in options.only:
        measurements = measure(scenario, options)
        report(scenario, measurements)
        results[scenario] = {", ".join(key): entry for key, entry in measurements.items()}
    if options.json:
        about = {"versions": versions(), "machine": machine(), "batch": options.batch}
        Path(options.json).write_text(json.dumps({**about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
