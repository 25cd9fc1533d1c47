"""Concurrent calls of a model by several threads, and OpenVINO's asynchronous API by hand.

    python benchmarks/inference_threads.py [--models mobilenet_v2 resnet50] [--threads 1 2 4 8]
        [--repeats 5] [--seconds 3] [--json results.json]

Each client has one request of one row under way, and sends the next when it has the answer.

====================  ==========================================================================
``InferenceModel``    ``InferenceModel(clients).load_module(accelerate=)``: a thread for each
                      client calls ``predict``
``accelerated``       ``InferenceOptimizer``'s model, called by the same threads
``async, latency``    by hand: ``AsyncInferQueue`` with a request for each client, compiled with
                      the latency hint; its callback starts the client's next request
``async, throughput``  the same with the throughput hint
====================  ==========================================================================

All sides run in one process and take turns. Ratios are medians over the repeats of the ratio
within one repeat, with their range.
"""

import argparse
import json
import platform
import statistics
import sys
import threading
import time
import warnings
from importlib import metadata
from pathlib import Path

import numpy as np

METHODS = {"mobilenet_v2": "openvino_bf16", "resnet50": "openvino_int8", "ranker": "openvino_fp32"}
SIDES = ("InferenceModel", "accelerated", "async, latency", "async, throughput")
BASES = SIDES[2:]


def model_of(name):
    """Return a module with random weights, and rows for it."""
    import torch

    torch.manual_seed(0)
    if name == "ranker":
        layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)]
        module = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(256, 1))
        return module.eval(), np.random.default_rng(0).random((32, 256), np.float32)
    from bigdl.nano.pytorch.vision import models

    rows = np.random.default_rng(0).random((32, 3, 224, 224), np.float32)
    module = getattr(models, name)(include_top=True)
    with torch.no_grad():
        module.train()(torch.from_numpy(rows[:8]))
    return module.eval(), rows


class Clients:
    """Requests of several clients for some seconds, with answers per second and latencies."""

    def __init__(self, clients, seconds):
        self.clients, self.seconds = clients, seconds
        self.latencies = []  # appending is atomic

    def figures(self, took):
        ordered = sorted(self.latencies)
        return {
            "requests/s": len(ordered) / took,
            "p50": 1000 * statistics.median(ordered),
            "p99": 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        }

    def by_threads(self, call, row):
        """Run every client as a thread that calls a function."""
        started = time.perf_counter()
        end = started + self.seconds

        def work():
            while (before := time.perf_counter()) < end:
                call(row)
                self.latencies.append(time.perf_counter() - before)

        threads = [threading.Thread(target=work) for _ in range(self.clients)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return self.figures(time.perf_counter() - started)

    def by_requests(self, compiled, row):
        """Run every client as an OpenVINO infer request that its callback restarts."""
        started = time.perf_counter()
        end = started + self.seconds
        left = threading.Semaphore(0)
        requests = [compiled.create_infer_request() for _ in range(self.clients)]

        def answered(state):
            request, before = state
            request.get_output_tensor(0).data.copy()  # as the other sides' callers get it
            now = time.perf_counter()
            self.latencies.append(now - before)
            if now < end:
                state[1] = now
                request.start_async({0: row}, state)
            else:
                left.release()

        for request in requests:
            request.set_callback(answered, None)
            request.start_async({0: row}, [request, time.perf_counter()])
        for _ in requests:
            left.acquire()
        for request in requests:
            request.wait()
        return self.figures(time.perf_counter() - started)


def sides_of(name, clients):
    """Return functions that run the clients of each implementation, and their answers for a row."""
    import openvino
    import torch

    from bigdl.nano.pytorch import InferenceOptimizer
    from bigdl.orca.inference import InferenceModel

    module, rows = model_of(name)
    row, method = rows[:1], METHODS[name]
    shared = InferenceModel(clients).load_module(module, accelerate=method, sample=rows)
    batches = [(torch.from_numpy(rows),)]
    options = {"calib_data": batches, "sample_size": len(rows)} if "int8" in method else {}
    accelerated = InferenceOptimizer.build(module, method, input_sample=batches[0], **options)
    network = accelerated.ov_model.clone()
    network.reshape({0: [1, *rows.shape[1:]]})
    precision = openvino.Type.bf16 if "bf16" in method else openvino.Type.f32
    compiled = {
        hint: openvino.Core().compile_model(
            network,
            "CPU",
            {"PERFORMANCE_HINT": hint.upper(), "INFERENCE_PRECISION_HINT": precision},
        )
        for hint in ("latency", "throughput")
    }
    tensor = torch.from_numpy(row)
    answers = [shared.predict(row), accelerated(tensor).numpy()]
    answers += [each(row)[0] for each in compiled.values()]
    for each in answers[1:]:
        distance = np.linalg.norm(each - answers[0]) / np.linalg.norm(answers[0])
        assert distance < 0.05, (name, distance)
    return {
        "InferenceModel": lambda run: run.by_threads(shared.predict, row),
        "accelerated": lambda run: run.by_threads(accelerated, tensor),
        "async, latency": lambda run: run.by_requests(compiled["latency"], row),
        "async, throughput": lambda run: run.by_requests(compiled["throughput"], row),
    }


def measure(name, clients, options):
    sides = sides_of(name, clients)
    measurements = {side: [] for side in sides}
    for side in sides.values():
        side(Clients(clients, min(options.seconds, 1)))
    for _ in range(options.repeats):
        for side, run in sides.items():
            measurements[side].append(run(Clients(clients, options.seconds)))
    return measurements


def spread(values, digits=2):
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def report(name, clients, measurements):
    for side, results in measurements.items():
        ratios = [
            spread(
                [
                    ours["requests/s"] / base["requests/s"]
                    for ours, base in zip(results, measurements[other], strict=True)
                ]
            )
            for other in BASES
        ]
        medians = {key: statistics.median(r[key] for r in results) for key in results[0]}
        cells = [name, str(clients), side, f"{medians['requests/s']:,.0f}", *ratios]
        cells += [f"{medians['p50']:.2f}", f"{medians['p99']:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2, 4, 8], help="clients")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of a side in each repeat")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "openvino"))
    print(f"Python {platform.python_version()}, {versions}, {sys.platform}\n")
    heads = [f"× {base}" for base in BASES]
    columns = ["model", "clients", "side", "requests/s", *heads, "p50, ms", "p99, ms"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    results = {}
    for name in options.models:
        for clients in options.threads:
            measurements = measure(name, clients, options)
            report(name, clients, measurements)
            results[f"{name}, {clients}"] = measurements
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
