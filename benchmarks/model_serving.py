"""Throughput and latency of a model server, and the time of the parts of a request.

    python benchmarks/model_serving.py --wrk wrk [--pytriton env/bin/python] [--rows 1 100]
        [--clients 1 8 32] [--seconds 3] [--rounds 3] [--json results.json] [--quick]

The model is a ranker of 256 numbers a row (512, 256 and 1 units) in OpenVINO. ``bigdl-serve``
serves it with batching and without; ``--pytriton`` names a Python that has nvidia-pytriton and
openvino, which serves the same network with Triton's dynamic batcher. wrk sends the same binary
tensors of the Open Inference Protocol to each, in turns, round by round: medians of the rounds, and
their range. Server and load share the machine, so a call of the network has one thread everywhere:
with more, it waits for the load's.

A first table has the time of one request, alone: of the bare network, of ``ServedModel.predict``,
and of the servers as a client sees it.
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.serving import Client, ServedModel

WIDTH = 256
PYTRITON = """
import signal, sys
import numpy as np, openvino
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

xml, http, grpc, metrics = sys.argv[1], *map(int, sys.argv[2:5])
config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
compiled = openvino.Core().compile_model(xml, "CPU", config)

@batch
def infer(x):
    return {"output": compiled(x)[0]}

with Triton(config=TritonConfig(http_port=http, grpc_port=grpc, metrics_port=metrics)) as triton:
    triton.bind(
        "ranker", infer,
        inputs=[Tensor(name="x", dtype=np.float32, shape=(256,))],
        outputs=[Tensor(name="output", dtype=np.float32, shape=(1,))],
        config=ModelConfig(max_batch_size=4096, batcher=DynamicBatcher()),
    )
    triton.serve()
"""
LUA = """
wrk.method = "POST"
wrk.headers["Inference-Header-Content-Length"] = "%d"
wrk.headers["Content-Type"] = "application/octet-stream"
local file = io.open("%s", "rb")
wrk.body = file:read("*a")
file:close()
"""


class Ranker(nn.Module):
    """Ranker that scores rows (N, 256)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()),
            *(nn.Linear(256, 1), nn.Sigmoid()),
        )

    def forward(self, x):
        return self.net(x)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Server:
    """Server in a separate process."""

    def __init__(self, name, command, port, grpc_port, timeout=120):
        self.name, self.port = name, port
        self.url, self.grpc_url = f"http://127.0.0.1:{port}", f"grpc://127.0.0.1:{grpc_port}"
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        end = time.monotonic() + timeout
        with Client(self.url) as client:
            while not client.is_ready("ranker"):
                if self.process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{name} does not start: {' '.join(command[:3])} …")
                time.sleep(0.2)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def ours(name, directory, *options):
    http, grpc = free_ports(2)
    command = [sys.executable, "-m", "bigdl.nano.serving.main", str(directory), "--name", "ranker"]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--threads", "1", *options]
    return Server(name, command, http, grpc)


def pytriton(python, directory, folder):
    ports = free_ports(3)
    program = folder / "pytriton_server.py"
    program.write_text(PYTRITON)
    network = str(directory / "ov_saved_model.xml")
    return Server("pytriton", [python, str(program), network, *map(str, ports)], *ports[:2])


def load_script(rows, folder):
    x = np.random.default_rng(0).random((rows, WIDTH), dtype=np.float32)
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [rows, WIDTH],
        "parameters": {"binary_data_size": x.nbytes},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body, script = folder / f"body-{rows}", folder / f"load-{rows}.lua"
    body.write_bytes(head + x.tobytes())
    script.write_text(LUA % (len(head), body))
    return script


UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def measured(wrk, server, script, clients, seconds):
    """Return requests/s, and milliseconds of the 50th and 99th percentile."""
    command = [wrk, "-t1", f"-c{clients}", f"-d{seconds}s", "--latency", "-s", str(script)]
    command.append(f"{server.url}/v2/models/ranker/infer")
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        raise SystemExit(f"{server.name} refused requests:\n{text}")
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", text)[1])
    times = (re.search(rf"{p}%\s+([\d.]+)(us|ms|s)", text) for p in (50, 99))
    return rate, *(float(each[1]) * UNITS[each[2]] for each in times)


def median_ms(call, calls):
    call()
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def one_request(model, servers, rows, calls):
    """Return the milliseconds of one request alone, by path."""
    x = np.random.default_rng(0).random((rows, WIDTH), dtype=np.float32)
    inputs = {"x": x}
    bare = model._runner.run
    metrics = {"the network": [], "ServedModel.predict": []}
    clients = [(s.name, kind, Client(u)) for s in servers for kind, u in _urls(s)]
    for _ in range(3):
        metrics["the network"].append(median_ms(lambda: bare([x]), calls))
        metrics["ServedModel.predict"].append(median_ms(lambda: model.predict(inputs), calls))
        for name, kind, client in clients:
            took = median_ms(lambda client=client: client.infer("ranker", inputs), calls)
            metrics.setdefault(f"{name}, {kind}", []).append(took)
    for *_, client in clients:
        client.close()
    return {name: statistics.median(each) for name, each in metrics.items()}


def _urls(server):
    return [("HTTP", server.url), ("gRPC", server.grpc_url)]


def stage_means(server):
    """Return the mean microseconds of each stage, from the server's metrics."""
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    sums = dict(re.findall(r'bigdl_stage_seconds_sum\{.*stage="(\w+)".*\} ([\d.e+-]+)', text))
    counts = dict(re.findall(r'bigdl_stage_seconds_count\{.*stage="(\w+)".*\} ([\d.e+-]+)', text))
    return {stage: float(sums[stage]) / float(counts[stage]) * 1e6 for stage in sums}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wrk", default="wrk")
    parser.add_argument("--pytriton", metavar="PYTHON")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.rows = 1, 1, options.rows[:1]
    torch.manual_seed(0)
    results = {"one request": {}, "load": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        directory = folder / "ranker"
        sample = torch.rand(4, WIDTH)
        fast = InferenceOptimizer.trace(Ranker(), sample, accelerator="openvino")
        InferenceOptimizer.save(fast, directory)
        servers = []
        try:
            servers.append(ours("batching", directory, "--max-batch-size", "512"))
            if options.pytriton:
                servers.append(pytriton(options.pytriton, directory, folder))
            with ServedModel(directory, thread_num=1) as model:
                expected = model.predict(sample.numpy())
                for server in servers:
                    with Client(server.url) as client:
                        answer = client.infer("ranker", {"x": sample.numpy()})
                        np.testing.assert_allclose(answer, expected, atol=1e-5)
                for rows in options.rows:
                    metrics = one_request(model, servers, rows, 200)
                    results["one request"][rows] = metrics
                    print(f"\n| {rows} rows, alone | ms |\n|---|---|")
                    for name, took in metrics.items():
                        print(f"| {name} | {took:.3f} |")
            stages = stage_means(servers[0])
            results["stages"] = stages
            print("\nstages, µs:", ", ".join(f"{k} {v:.0f}" for k, v in stages.items()))
            servers.insert(1, ours("each alone", directory, "--max-batch-size", "1"))
            print(
                "\n| rows | clients | server | requests/s | p50 ms | p99 ms |\n" + "|---" * 6 + "|"
            )
            for rows in options.rows:
                script = load_script(rows, folder)
                for clients in options.clients:
                    runs = {server.name: [] for server in servers}
                    for _ in range(options.rounds):
                        for server in servers:
                            run = measured(options.wrk, server, script, clients, options.seconds)
                            runs[server.name].append(run)
                    for name, each in runs.items():
                        rates, halves, tails = zip(*each, strict=True)
                        p50, p99 = statistics.median(halves), statistics.median(tails)
                        print(
                            f"| {rows} | {clients} | {name} | {statistics.median(rates):,.0f} "
                            f"({min(rates):,.0f} to {max(rates):,.0f}) | {p50:.2f} | {p99:.2f} |"
                        )
                        metrics = {"rates": rates, "p50": halves, "p99": tails}
                        results["load"].append(
                            {"rows": rows, "clients": clients, "server": name, **metrics}
                        )
        finally:
            for server in servers:
                server.stop()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
