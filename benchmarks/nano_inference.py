"""Nano's inference compared with plain PyTorch and with the same runtimes used by hand.

    python benchmarks/nano_inference.py [--models resnet50 ncf] [--threads 1 2] [--repeats 7]
        [--methods eager "openvino int8" "nano openvino int8"] [--json results.json] [--quick]

=========================  ======================================================================
``eager``                  plain PyTorch in ``inference_mode``: the base of all ratios
``compile …``              by hand: ``torch.compile`` with freezing, channels last for images,
                           autocast for bf16
``openvino …``             by hand: ``convert_model``, the shape of the input, the latency hint, a
                           reused infer request, shared memory; int8 by ``nncf.quantize``
``onnxruntime …``          by hand: ``torch.onnx.export`` and a session; int8 by static QDQ
``nano …``                 ``InferenceOptimizer.trace`` or ``quantize``, run in ``get_context``
=========================  ======================================================================

Every side runs in a separate process on the same cores, once with glibc's allocator as it is
and once set to keep freed memory (``bigdl.common.memory.tune_allocator``), which is per process.
Each repeat runs all of them in turn over a pipe to run for a moment, so that the noise of a shared
machine meets all of them. Ratios are medians over the repeats of the ratio within one repeat, with
their range. Weights are random: speed does not depend on them, but the accuracy of int8 does; the
column of the error is the relative L2 distance of the outputs to eager's.

The peak is what large matrix products and convolutions reach on the same cores in the precision
of the side.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np

CALIBRATION_ROWS = 16  # at least, and two batches
ALLOCATORS = ("default", "tuned")
BATCHES = {
    "resnet50": (1, 8, 32),
    "mobilenet_v2": (1, 32),
    "resnet18": (1,),  # takes a few ms in int8: shows what a wrapper costs
    "bert_mini": (1, 8),
    "ncf": (1, 1024),
}
HAND = [
    *(f"openvino {precision}" for precision in ("fp32", "bf16", "int8")),
    *(f"onnxruntime {precision}" for precision in ("fp32", "int8")),
    *(f"compile {precision}" for precision in ("fp32", "bf16")),
]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SIDES = ["eager", *HAND, *(f"nano {name}" for name in HAND)]


# -- the models: from public descriptions, with random weights -----------------------------------


def model_of(name):
    import torch

    torch.manual_seed(0)
    if name == "bert_mini":
        return _bert_mini().eval()
    if name == "ncf":
        return _ncf().eval()
    from bigdl.nano.pytorch.vision import models

    return _with_statistics(getattr(models, name)(include_top=True))


def _with_statistics(model):
    """Set normalization statistics, so that activations of an untrained network do not vanish."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # a plain mean over the batches
    with torch.no_grad():
        model.train()(torch.rand(4, 3, 224, 224))
    return model.eval()


def inputs_of(name, batch, seed):
    """Return the arrays of one batch."""
    random = np.random.default_rng(seed)
    if name == "bert_mini":
        return [random.integers(0, 30_522, (batch, 128))]
    if name == "ncf":
        return [random.integers(0, 6040, batch), random.integers(0, 3706, batch)]
    return [random.standard_normal((batch, 3, 224, 224), dtype=np.float32)]


def _bert_mini(layers=4, width=256, heads=4, length=128):
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

        def forward(self, x):
            n, t, _ = x.shape
            q, k, v = self.qkv(x).view(n, t, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            x = self.norm1(x + self.out(mixed.transpose(1, 2).reshape(n, t, width)))
            return self.norm2(x + self.narrow(nn.functional.gelu(self.wide(x))))

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(30_522, width)
            self.places = nn.Parameter(0.02 * torch.randn(length, width))
            self.norm = nn.LayerNorm(width)
            self.layers = nn.Sequential(*(Layer() for _ in range(layers)))
            self.pooler = nn.Linear(width, width)

        def forward(self, ids):
            x = self.layers(self.norm(self.words(ids) + self.places))
            return torch.tanh(self.pooler(x[:, 0]))

    return Encoder()


def _ncf(users=6040, items=3706, width=64):
    import torch
    from torch import nn

    class NeuMF(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
            self.deep = nn.Sequential(
                nn.Linear(2 * width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
            )
            self.score = nn.Linear(width + 64, 1)

        def forward(self, user, item):
            u, i = self.user(user), self.item(item)
            deep = self.deep(torch.cat([u[:, :width], i[:, :width]], 1))
            return torch.sigmoid(self.score(torch.cat([u[:, width:] * i[:, width:], deep], 1)))

    return NeuMF()


# -- what the sides by hand load: made once per model and batch ----------------------------------


def prepare(case):
    """Write the reference, the OpenVINO model and the ONNX model to the folder of the case."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    folder, sides = Path(case["folder"]), case["sides"]
    model = model_of(case["model"])
    inputs = tensors(inputs_of(case["model"], case["batch"], 0))
    with torch.inference_mode():
        np.save(folder / "reference.npy", model(*inputs).numpy())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    if any(side.startswith("openvino") for side in sides):
        prepare_openvino(case, model, inputs, folder)
    if any(side.startswith("onnxruntime") for side in sides):
        prepare_onnx(case, model, inputs, folder)
    return {"flops": counter.get_total_flops()}


def calibration(case):
    """Return calibration batches, which are not used for the measurement."""
    batches = max(2, CALIBRATION_ROWS // case["batch"])
    return [inputs_of(case["model"], case["batch"], seed) for seed in range(1, batches + 1)]


def prepare_openvino(case, model, inputs, folder):
    import openvino

    converted = openvino.convert_model(
        model, example_input=inputs, input=[tuple(value.shape) for value in inputs]
    )
    openvino.save_model(converted, folder / "fp32.xml", compress_to_fp16=False)
    if "openvino int8" in case["sides"]:
        import nncf

        kind = nncf.ModelType.TRANSFORMER if case["model"] == "bert_mini" else None
        quantized = nncf.quantize(converted, nncf.Dataset(calibration(case)), model_type=kind)
        openvino.save_model(quantized, folder / "int8.xml", compress_to_fp16=False)


def prepare_onnx(case, model, inputs, folder):
    import torch

    path = str(folder / "fp32.onnx")
    torch.onnx.export(model, inputs, path, dynamo=True, external_data=False, verbose=False)
    if "onnxruntime int8" not in case["sides"]:
        return
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self, names):
            self.batches = (dict(zip(names, arrays, strict=True)) for arrays in calibration(case))

        def get_next(self):
            return next(self.batches, None)

    fused = str(folder / "fused.onnx")
    quant_pre_process(path, fused, skip_symbolic_shape=True)
    reader = Reader([value.name for value in onnx_session(path, 1).get_inputs()])
    quantize_static(  # QDQ; unsigned inputs are what VNNI multiplies by signed weights
        fused,
        folder / "int8.onnx",
        reader,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


def tensors(arrays):
    import torch

    return tuple(torch.from_numpy(array) for array in arrays)


# -- the sides: each returns a function of no arguments that gives the output --------------------


def eager_side(case, precision, stack):
    import torch

    model, inputs = model_of(case["model"]), tensors(case["inputs"])
    stack.enter_context(torch.inference_mode())
    return lambda: model(*inputs)


def compile_side(case, precision, stack):
    import torch
    import torch._inductor.config

    torch._inductor.config.freezing = True
    model, inputs = model_of(case["model"]), tensors(case["inputs"])
    if inputs[0].ndim == 4:
        model = model.to(memory_format=torch.channels_last)
        inputs = tuple(value.contiguous(memory_format=torch.channels_last) for value in inputs)
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"))
    compiled = torch.compile(model)
    return lambda: compiled(*inputs)


def openvino_side(case, precision, stack):
    import openvino

    file = "int8.xml" if precision == "int8" else "fp32.xml"
    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": case["threads"],
        "INFERENCE_PRECISION_HINT": "f32" if precision == "fp32" else "bf16",
    }
    compiled = openvino.Core().compile_model(Path(case["folder"], file), "CPU", config)
    request = compiled.create_infer_request()
    inputs = case["inputs"]
    return lambda: request.infer(inputs, share_inputs=True)[0]


def onnx_session(path, threads):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def onnxruntime_side(case, precision, stack):
    session = onnx_session(str(Path(case["folder"], f"{precision}.onnx")), case["threads"])
    names = [value.name for value in session.get_inputs()]
    feed = dict(zip(names, case["inputs"], strict=True))
    return lambda: session.run(None, feed)[0]


def nano_side(case, precision, stack):
    """Build Nano's model; `precision` is the part after "nano": a runtime and a precision."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from bigdl.nano.pytorch import InferenceOptimizer

    runtime, precision = precision.split()
    inputs = tensors(case["inputs"])
    settings = {
        "accelerator": {"compile": "jit"}.get(runtime, runtime),
        "input_sample": inputs,
        "thread_num": case["threads"],
    }
    if runtime == "compile":
        # of the sample's sizes only, as torch.compile by hand
        settings |= {"use_ipex": True, "channels_last": inputs[0].ndim == 4, "dynamic_axes": False}
    if precision == "int8":
        columns = (
            torch.cat(column) for column in zip(*map(tensors, calibration(case)), strict=True)
        )
        columns = list(columns)
        rows = TensorDataset(*columns, torch.zeros(len(columns[0])))
        settings["calib_data"] = DataLoader(rows, batch_size=case["batch"])
        settings["sample_size"] = len(rows)
    model = model_of(case["model"])
    if precision == "fp32":
        model = InferenceOptimizer.trace(model, **settings)
    else:
        model = InferenceOptimizer.quantize(model, precision=precision, **settings)
    stack.enter_context(InferenceOptimizer.get_context(model))
    return lambda: model(*inputs)


BUILDERS = {
    "eager": eager_side,
    "compile": compile_side,
    "openvino": openvino_side,
    "onnxruntime": onnxruntime_side,
    "nano": nano_side,
}


def as_array(output):
    """Return the output of an implementation as floats."""
    array = output.float().numpy() if hasattr(output, "numpy") else output
    return np.array(array, dtype=np.float32)


def peaks(case):
    """Return operations per second of large products, by precision."""
    import torch

    clock, size = CLOCKS[case["clock"]], 2048
    rates = {}
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = torch.randn(2, size, size).to(kind)
        images, filters = torch.randn(8, 256, 32, 32).to(kind), torch.randn(256, 256, 3, 3).to(kind)
        images = images.contiguous(memory_format=torch.channels_last)
        rates[name] = max(
            _rate(lambda a=a, b=b: a @ b, 2 * size**3, clock),
            _rate(
                lambda i=images, f=filters: torch.conv2d(i, f, padding=1),
                2 * 9 * 256 * images.numel(),
                clock,
            ),
        )
    rates["int8"] = max(_int8_rates(size, case["threads"], clock))
    return rates


def _int8_rates(size, threads, clock):
    """Return the int8 rates of oneDNN in torch and of OpenVINO (with unsigned inputs for VNNI)."""
    import nncf
    import openvino
    import torch

    a, b = torch.randint(-127, 127, (2, size, size), dtype=torch.int8)
    yield _rate(lambda: torch._int_mm(a, b), 2 * size**3, clock)
    depth = 4  # between the layers the values stay 8 bits wide
    layers = (
        layer
        for _ in range(depth)
        for layer in (torch.nn.Linear(size, size, bias=False), torch.nn.ReLU())
    )
    x = torch.rand(size, size)
    model = openvino.convert_model(torch.nn.Sequential(*layers), example_input=x)
    model.reshape([size, size])
    model = nncf.quantize(model, nncf.Dataset([x.numpy()]), subset_size=1)
    config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(model, "CPU", config).create_infer_request()
    array = x.numpy()
    yield _rate(lambda: request.infer([array], share_inputs=True), depth * 2 * size**3, clock)


def _rate(call, operations, clock):
    call()
    times = []
    for _ in range(10):
        started = clock()
        call()
        times.append(clock() - started)
    return operations / min(times)


# -- a worker: one side in one process -----------------------------------------------------------


def worker(case):
    """Build the implementation, report its properties, then run it as often as stdin says."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print
    if case["allocator"] == "tuned":
        from bigdl.common.memory import tune_allocator

        assert tune_allocator(), "this allocator cannot be tuned"
    if case["side"] in ("prepare", "peaks"):
        answers.write(json.dumps({"prepare": prepare, "peaks": peaks}[case["side"]](case)) + "\n")
        return
    case["inputs"] = inputs_of(case["model"], case["batch"], 0)
    name, _, precision = case["side"].partition(" ")
    with contextlib.ExitStack() as stack:
        started = time.perf_counter()
        call = BUILDERS[name](case, precision, stack)
        output = as_array(call())
        reference = np.load(Path(case["folder"], "reference.npy"))
        error = np.linalg.norm(output.reshape(reference.shape) - reference)
        about = {
            "build_s": time.perf_counter() - started,
            "error": float(error / np.linalg.norm(reference)),
        }
        answers.write(json.dumps(about) + "\n")
        clock = CLOCKS[case["clock"]]
        for line in sys.stdin:
            calls = int(line)
            started = clock()
            for _ in range(calls):
                call()
            answers.write(json.dumps(clock() - started) + "\n")


class Side:
    """Parent's side of a worker process."""

    def __init__(self, case):
        cores = sorted(os.sched_getaffinity(0))[: case["threads"]]
        variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  `close` closes it
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **dict.fromkeys(variables, str(case["threads"]))},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.about = None
        self.calls = 1

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError("\n".join(self.log.read().strip().splitlines()[-3:]))
        return json.loads(line)

    def run(self):
        """Return the seconds per call."""
        self.process.stdin.write(f"{self.calls}\n")
        self.process.stdin.flush()
        return self.answer() / self.calls

    def warm_up(self, seconds):
        """Run until compilers and caches have settled, and set the number of calls per repeat."""
        for _ in range(3):
            once = self.run()
        self.calls = max(1, round(seconds / once))

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
        self.log.close()


def once(case):
    """Return the single answer of a worker."""
    side = Side(case)
    try:
        return side.answer()
    finally:
        side.close()


# -- measuring and reporting ---------------------------------------------------------------------


def measure(model, batch, threads, options):
    """Return milliseconds and errors of each (side, allocator), and operations per call."""
    with tempfile.TemporaryDirectory(prefix="bigdl-bench-") as folder:
        case = {"model": model, "batch": batch, "threads": threads, "folder": folder}
        case["clock"] = options.clock
        about = once({**case, "side": "prepare", "allocator": "default", "sides": options.methods})
        sides = {}
        try:
            for name in options.methods:
                for allocator in ALLOCATORS:
                    key = (name, allocator)
                    sides[key] = Side({**case, "side": name, "allocator": allocator})
                    try:
                        sides[key].about = sides[key].answer()
                        sides[key].warm_up(options.seconds)
                    except RuntimeError as error:
                        print(f"  {name}, {allocator}: not possible: {error}", flush=True)
                        sides.pop(key).close()
            measurements = {key: {"ms": [], **side.about} for key, side in sides.items()}
            for _ in range(options.repeats):
                for key, side in sides.items():
                    time.sleep(0.02)  # the threads of the last one stop spinning
                    measurements[key]["ms"].append(1e3 * side.run())
        finally:
            for side in sides.values():
                side.close()
    return measurements, about["flops"]


def ratio(measurements, side, base):
    """Return the speedup of `side` over `base`: median and range over the repeats."""
    pairs = zip(measurements[base]["ms"], measurements[side]["ms"], strict=True)
    values = [slow / fast for slow, fast in pairs]
    return statistics.median(values), min(values), max(values)


def shown(values):
    middle, low, high = values
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def report(model, batch, threads, measurements, flops, peak):
    print(f"\n{model}, batch {batch}, {threads} core(s), {flops / 1e9:.2f} GFLOP per call\n")
    print(
        "| Implementation | allocator | ms | × eager, default | × eager, tuned | % peak | error |"
    )
    print("|---|---|---|---|---|---|---|")
    for (name, allocator), metrics in measurements.items():
        ms = statistics.median(metrics["ms"])
        precision = name.split()[-1] if " " in name else "fp32"
        share = flops / (ms / 1e3) / peak[precision]
        times = shown((ms, min(metrics["ms"]), max(metrics["ms"])))
        ratios = " | ".join(
            shown(ratio(measurements, (name, allocator), ("eager", base))) for base in ALLOCATORS
        )
        print(
            f"| {name} | {allocator} | {times} | {ratios} | {100 * share:.0f} "
            f"| {metrics['error']:.2g} |"
        )
    report_overhead(measurements)
    if model == "resnet50":
        report_gates(batch, measurements)


def report_overhead(measurements):
    """Print Nano's overhead over the same runtime by hand, in the same process type."""
    lines = []
    for name, allocator in measurements:
        nano = (f"nano {name}", allocator)
        if nano in measurements:
            middle, low, high = ratio(measurements, (name, allocator), nano)
            ms = statistics.median(measurements[nano]["ms"])
            lines.append(
                f"| {name} | {allocator} | {ms:.2f} | {100 * (middle - 1):+.1f} "
                f"({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f}) |"
            )
    if lines:
        print("\n| nano's | allocator | ms | more time than by hand, % |\n|---|---|---|---|")
        print("\n".join(lines))


def report_gates(batch, measurements):
    nano = [key for key in measurements if key[0].startswith("nano ")]
    checks = []
    if batch in (1, 32):
        checks.append((7 if batch == 1 else 10, nano, "default"))
    checks.append((5, [key for key in nano if key[1] == "tuned"], "tuned"))
    for gate, candidates, base in checks:
        if not candidates:
            continue
        reached = {key: ratio(measurements, key, ("eager", base))[0] for key in candidates}
        best = max(reached, key=reached.get)
        verdict = "met" if reached[best] >= gate else "MISSED"
        print(
            f"\nBest against eager, {base}: {best[0]}, {best[1]}, {reached[best]:.2f}× "
            f"(gate: {gate}: {verdict})"
        )


def versions():
    names = ("torch", "openvino", "nncf", "onnxruntime", "onnx", "numpy")
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in names if name in installed)


def machine():
    from bigdl.common.cpu import isa_flags

    wanted = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    flags = isa_flags()
    with open("/proc/cpuinfo") as file:
        name = next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")
    return f"{os.cpu_count()} cores, {name}, {' '.join(f for f in wanted if f in flags)}"


def options_of(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", choices=BATCHES, default=list(BATCHES))
    parser.add_argument(
        "--batches", nargs="*", type=int, help="instead of the default of each model"
    )
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--methods", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a side in each repeat")
    parser.add_argument("--quick", action="store_true", help="2 short repeats, first batch, 1 core")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor time, which a busy machine disturbs less; for one core only",
    )
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.methods = [side for side in SIDES if side == "eager" or side in options.methods]
    if options.clock == "cpu" and options.threads != [1]:
        parser.error("processor time says nothing about the speed of several cores: --threads 1")
    if options.quick:
        options.repeats, options.seconds, options.threads = 2, 0.1, options.threads[:1]
    return options


def main(argv=None):
    options = options_of(argv)
    if options.worker:
        worker(json.loads(options.worker))
        return
    print(f"Python {platform.python_version()}, {versions()}; {machine()}", flush=True)
    results = []
    for threads in options.threads:
        case = {"side": "peaks", "allocator": "default", "threads": threads}
        case["clock"] = options.clock
        peak = once(case)
        rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in peak.items())
        print(f"\nPeak on {threads} core(s), billion operations a second: {rates}", flush=True)
        for model in options.models:
            for batch in (options.batches or BATCHES[model])[: 1 if options.quick else None]:
                measurements, flops = measure(model, batch, threads, options)
                report(model, batch, threads, measurements, flops, peak)
                results.append(
                    {
                        "model": model,
                        "batch": batch,
                        "threads": threads,
                        "flops": flops,
                        "peak": peak,
                        "sides": {", ".join(key): values for key, values in measurements.items()},
                    }
                )
    if options.json:
        about = {"versions": versions(), "machine": machine(), "results": results}
        Path(options.json).write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
