"""Nano's defaults compared with the settings that they replace: no default may be slower.

    python benchmarks/defaults.py [--only trainer loop trace quantize decoder] [--models resnet18 …]
        [--repeats 7] [--threads 2] [--json results.json]

============  ====================================================================================
``trainer``   plain Lightning's Trainer and Nano's: a fit that is too short to measure anything
              (``nano``), and one whose precision and layout a measurement has chosen
              (``nano, measured``), with what it chose
``loop``      a plain torch loop and the same in ``TorchNano``
``trace``     eager and ``trace(accelerator="openvino")``, and OpenVINO by hand in fp32 and with
              the precision that it takes by default on this processor
``quantize``  eager and ``quantize`` in bf16, without a runtime and in OpenVINO, and in int8;
              what is slower than eager warns of it
``decoder``   ``generate`` of a decoder, eager and in OpenVINO: processor seconds of all threads
============  ====================================================================================

Each side runs in a separate process with as many threads. Each repeat runs all of them in turn, so
that the noise of a shared machine meets all of them. Ratios are medians over the repeats of the
ratio within one repeat, with their range; above 1 is faster than the first side. Models are small
and have random weights: with its settings as they are the whole takes about ten minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

from nano_inference import machine, versions
from nano_training import fit_of, trainer_class

MODELS = {
    "trainer": ("resnet18", "encoder", "mlp"),
    "loop": ("resnet18", "encoder", "mlp"),
    "trace": ("resnet18", "encoder", "mlp"),
    "quantize": ("resnet18", "encoder", "mlp"),
    "decoder": ("llama", "gpt2"),
}
SIDES = {
    "trainer": ("plain Lightning", "nano", "nano, measured"),
    "loop": ("plain torch", "nano", "nano, measured"),
    "trace": ("eager", "nano openvino", "openvino fp32 by hand", "openvino's default"),
    "quantize": ("eager", "nano bf16", "nano openvino bf16", "nano openvino int8"),
    "decoder": ("eager", "nano openvino"),
}
STEPS = {"resnet18": 6, "encoder": 10, "mlp": 60}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


# -- the models: from public descriptions, with random weights -----------------------------------


def model_of(name):
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "resnet18":
        from bigdl.nano.pytorch.vision.models import resnet18

        return nn.Sequential(resnet18(), nn.Linear(512, 10))
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        return nn.Sequential(
            nn.Embedding(5000, 256), nn.TransformerEncoder(layer, 4), Mean(), nn.Linear(256, 10)
        )
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                         nn.Linear(1024, 10))  # fmt: skip


def Mean():
    from torch import nn

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    return Mean()


def inputs_of(name, rows):
    import torch

    torch.manual_seed(1)
    if name == "resnet18":
        return torch.randn(rows, 3, 64, 64)
    return torch.randint(0, 5000, (rows, 64)) if name == "encoder" else torch.randn(rows, 256)


def decoder_of(name):
    import torch
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": 32000, "n_embd": 512, "n_layer": 4, "n_head": 8}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TOKENS)).eval()
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 2048}
    config = transformers.LlamaConfig(**sizes, **heads, num_hidden_layers=4, **TOKENS)
    return transformers.LlamaForCausalLM(config).eval()


# -- the sides: each returns a function that is timed, and its report ---------------------


def data_of(name):
    import torch

    x = inputs_of(name, 16 * STEPS[name])
    rows = torch.utils.data.TensorDataset(x, torch.randint(0, 10, (len(x),)))
    return torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)


def _measures(side):
    """Let a fit of a few steps run the measurement of precision and memory format."""
    if side.endswith("measured"):
        from bigdl.nano.pytorch.training import step_autotune

        step_autotune.REPAID_STEPS = step_autotune.REPAID_STEPS_AMX = 2


def trainer_side(name, side):
    import torch
    from pytorch_lightning import LightningModule

    _measures(side)

    class Program(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model_of(name)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-3)

    run = fit_of(trainer_class(side.startswith("nano")), Program(), data_of(name))
    return run, lambda: ", ".join(run.told.get("settings", ())[:2])


def loop_side(name, side):
    import torch

    from bigdl.nano.pytorch import TorchNano

    _measures(side)
    net, told = model_of(name), []

    def train(model, optimizer, loader, backward):
        for x, y in loader:
            optimizer.zero_grad()
            backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()

    class Loop(TorchNano):
        def train(self):
            optimizer = torch.optim.Adam(net.parameters(), 1e-3)
            train(*self.setup(net, optimizer, data_of(name)), self.backward)

    def run():
        if side == "plain torch":
            optimizer = torch.optim.Adam(net.parameters(), 1e-3)
            train(net.train(), optimizer, data_of(name), torch.Tensor.backward)
        else:
            loop = Loop()
            loop.train()
            told[:] = loop.settings[:2]

    return run, lambda: ", ".join(told)


def inference_side(name, side):
    import torch

    from bigdl.nano.pytorch import InferenceOptimizer

    net, x = model_of(name).eval(), inputs_of(name, 4)
    threads, notes = torch.get_num_threads(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if side == "nano openvino":
            model = InferenceOptimizer.trace(net, x, accelerator="openvino", thread_num=threads)
        elif side == "nano bf16":
            model = InferenceOptimizer.quantize(net, "bf16", input_sample=x, thread_num=threads)
        elif side.startswith("nano openvino"):
            precision = side.split()[-1]
            # random weights differ more in int8 than trained ones, which is not measured here
            data = {"calib_data": x, "strict_check": False} if precision == "int8" else {}
            model = InferenceOptimizer.quantize(
                net, precision, accelerator="openvino", input_sample=x, thread_num=threads, **data
            )
        else:
            model = net
        notes += [str(each.message) for each in caught if "times as long" in str(each.message)]
    calls = 10 if name == "resnet18" else 20
    if "openvino" in side and not side.startswith("nano"):
        run = by_hand(
            net, x, threads, {} if "default" in side else {"INFERENCE_PRECISION_HINT": "f32"}
        )
    else:

        def run():
            with InferenceOptimizer.get_context(model):
                return model(x)

    def several():
        for _ in range(calls):
            run()

    return several, lambda: "warns" if notes else ""


def by_hand(net, x, threads, config):
    import openvino
    import torch

    torch.backends.mha.set_fastpath_enabled(False)  # it is no operation of OpenVINO
    network = openvino.convert_model(torch.export.export(net, (x,)))
    network.reshape(list(x.shape))
    properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, **config}
    request = openvino.compile_model(network, "CPU", properties).create_infer_request()
    array = x.numpy()
    return lambda: request.infer([array], share_inputs=True)


def decoder_side(name, side):
    import torch

    from bigdl.nano.pytorch import InferenceOptimizer

    model = decoder_of(name)
    ids = torch.randint(3, 32000, (4, 128))
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if side != "eager":
        model = InferenceOptimizer.trace(
            model, prompt, accelerator="openvino", thread_num=torch.get_num_threads()
        )

    def run():
        with torch.no_grad():
            model.generate(**prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)

    return run, lambda: f"peak {_peak_mb()} MB"


def _peak_mb():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


BUILDERS = {
    "trainer": trainer_side,
    "loop": loop_side,
    "trace": inference_side,
    "quantize": inference_side,
    "decoder": decoder_side,
}


# -- a process for each side ----------------------------------------------------------------------


def worker(case):
    """Build an implementation, run it for each line of stdin, and report the times."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(case["threads"])
    run, told = BUILDERS[case["part"]](case["model"], case["side"])
    clock = time.process_time if case["part"] == "decoder" else time.perf_counter
    for _ in range(2):  # what is measured and kept, compiled and allocated
        run()
    answers.write("ready\n")
    for _ in sys.stdin:
        began = clock()
        run()
        answers.write(json.dumps({"seconds": clock() - began, "told": told()}) + "\n")


class Worker:
    """Process that runs one implementation on demand."""

    def __init__(self, case, cache):
        command = [sys.executable, __file__, "--worker", json.dumps(case)]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "XDG_CACHE_HOME": cache}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.case = case
        self.process = subprocess.Popen(
            command, env=environment, stderr=subprocess.DEVNULL, **pipes
        )
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.case} failed, its process ended with {self.process.wait()}")
        return line

    def run(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.answer())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure(part, model, options):
    """Return the seconds of each implementation in every repeat, and its report."""
    measurements, workers = {}, {}
    with tempfile.TemporaryDirectory(prefix="bigdl-defaults-") as cache:
        try:
            for side in SIDES[part]:
                case = {"part": part, "model": model, "side": side, "threads": options.threads}
                workers[side] = Worker(case, os.path.join(cache, str(len(workers))))
            for repeat in range(options.repeats):
                sides = list(workers) if repeat % 2 else list(reversed(workers))
                for side in sides:
                    time.sleep(0.3)  # threads of the side before may still spin
                    answer = workers[side].run()
                    entry = measurements.setdefault(side, {"seconds": [], "told": ""})
                    entry["seconds"].append(answer["seconds"])
                    entry["told"] = answer["told"]
        finally:
            for each in workers.values():
                each.close()
    return {side: measurements[side] for side in SIDES[part]}


def report(part, model, measurements):
    base = measurements[SIDES[part][0]]["seconds"]
    for side, entry in measurements.items():
        ratios = [before / after for before, after in zip(base, entry["seconds"], strict=True)]
        milliseconds = 1000 * statistics.median(entry["seconds"])
        print(
            f"| {part} | {model} | {side} | {milliseconds:.1f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}–{max(ratios):.2f}) | {entry['told']} |",
            flush=True,
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--models", nargs="*", help="of those that a part has; by default all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        worker(json.loads(options.worker))
        return
    print(f"{machine()}; {versions()}; {options.threads} threads\n", flush=True)
    print(
        "| part | model | Implementation | ms | × the first | report |\n|---|---|---|---|---|---|"
    )
    results = {}
    for part in options.only:
        for model in MODELS[part]:
            if options.models is None or model in options.models:
                results[f"{part} {model}"] = measurements = measure(part, model, options)
                report(part, model, measurements)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
