"""Load generator of the benchmark, in a separate process.

Reads commands as JSON from its input, one a line, and answers each by a line of JSON:

``{"side": "x", "address": "127.0.0.1:1", "method": "/a.B/c", "requests": "file"}``
    a side that can be asked;
``{"run": "x", "rate": 100, "seconds": 5}``
    open loop: requests come by chance (Poisson), whether others are answered or not. It is
    the Server scenario of MLCommons' LoadGen where that is installed, else the same in here;
``{"run": "x", "outstanding": 16, "seconds": 3}``
    closed loop: the next request when one is answered.

The answer has the requests, those a second, the errors by their status, and percentiles of the time
from when a request was to be sent to its answer.
"""

import base64
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import grpc

try:
    import mlperf_loadgen as loadgen
except ImportError:
    loadgen = None

LIMIT = 30  # seconds that one request may take
CONNECTIONS = 32  # as of many clients; processes that share a port get some each


class Side:
    """Server and its requests."""

    def __init__(self, address, method, requests):
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(address, options) for _ in range(CONNECTIONS)]
        self._calls = [each.unary_unary(method) for each in channels]
        self.requests = [base64.b64decode(e) for e in json.loads(Path(requests).read_text())]
        self.errors, self.open, self._lock = Counter(), 0, threading.Condition()

    def send(self, number, then):
        """Send a request; ``then`` is called when it is answered or has failed."""
        with self._lock:
            self.open += 1
        call = self._calls[number % CONNECTIONS]
        future = call.future(self.requests[number % len(self.requests)], timeout=LIMIT)

        def answered(future):
            if (error := future.exception()) is not None:
                self.errors[error.code().name] += 1
            then()
            with self._lock:
                self.open -= 1
                self._lock.notify_all()

        future.add_done_callback(answered)

    def wait(self):
        with self._lock:
            self._lock.wait_for(lambda: not self.open, 2 * LIMIT)

    def answers(self, count):
        responses = (self._calls[0](each, timeout=60) for each in self.requests[:count])
        return [base64.b64encode(each).decode() for each in responses]


def percentiles(times):
    times = sorted(times)
    at = {name: times[min(int(len(times) * p), len(times) - 1)] for name, p in
          (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99))}  # fmt: skip
    return {name: 1000 * each for name, each in at.items()}


def closed(side, outstanding, seconds):
    times, begin = [], time.perf_counter()
    end = begin + seconds
    numbers = iter(range(10**9))

    def step():
        at = time.perf_counter()

        def then():
            now = time.perf_counter()
            times.append(now - at)
            if now < end:
                step()

        side.send(next(numbers), then)

    for _ in range(outstanding):
        step()
    while time.perf_counter() < end:
        time.sleep(0.05)
    side.wait()
    taken = time.perf_counter() - begin
    return {"requests": len(times), "requests_per_s": len(times) / taken, **percentiles(times)}


def open_by_ourselves(side, rate, seconds):
    times, chance = [], random.Random(1)
    begin = time.perf_counter()
    at, number = begin, 0
    while at - begin < seconds:
        time.sleep(max(at - time.perf_counter(), 0))

        def then(at=at):
            times.append(time.perf_counter() - at)

        side.send(number, then)
        number, at = number + 1, at + chance.expovariate(rate)
    side.wait()
    taken = time.perf_counter() - begin
    return {"requests": len(times), "requests_per_s": len(times) / taken, **percentiles(times)}


def open_by_loadgen(side, rate, seconds):
    begun = time.perf_counter()

    def issue(samples):
        for each in samples:

            def then(identity=each.id):
                loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(identity, 0, 0)])

            side.send(each.index, then)

    settings = loadgen.TestSettings()
    settings.scenario = loadgen.TestScenario.Server
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.server_target_qps = rate
    settings.server_target_latency_ns = 20_000_000
    settings.min_duration_ms = int(1000 * seconds)
    settings.min_query_count = max(int(rate * seconds), 1)
    settings.max_duration_ms = int(3000 * seconds)
    for seed in ("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed"):
        setattr(settings, seed, 7)
    count = len(side.requests)
    target = loadgen.ConstructSUT(issue, lambda: None)
    library = loadgen.ConstructQSL(count, count, lambda _: None, lambda _: None)
    output, log = loadgen.LogOutputSettings(), loadgen.LogSettings()
    with tempfile.TemporaryDirectory() as folder:
        output.outdir, output.copy_summary_to_stdout = folder, False
        log.log_output, log.enable_trace = output, False
        loadgen.StartTestWithLogSettings(target, library, settings, log)
        text = Path(folder, "mlperf_log_summary.txt").read_text()
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(target)
    side.wait()
    report = dict(line.split(" : ", 1) for line in text.splitlines() if " : " in line)
    report = {name.strip(): value.strip() for name, value in report.items()}
    done = float(report["Completed samples per second"])
    return {
        "requests": round(done * (time.perf_counter() - begun)),
        "requests_per_s": done,
        **{f"p{p}_ms": int(report[f"{p}.00 percentile latency (ns)"]) / 1e6 for p in (50, 90, 99)},
    }


def main():
    sides = {}
    print(json.dumps({"loadgen": loadgen is not None}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "side" in command:
            side = Side(command["address"], command["method"], command["requests"])
            sides[command["side"]] = side
            answer = {"answers": side.answers(command.get("check", 20))}
        else:
            side = sides[command["run"]]
            side.errors.clear()
            if "outstanding" in command:
                answer = closed(side, command["outstanding"], command["seconds"])
            else:
                drive = open_by_loadgen if loadgen else open_by_ourselves
                answer = drive(side, command["rate"], command["seconds"])
            answer["errors"] = dict(side.errors)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
