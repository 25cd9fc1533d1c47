"""DeepFM recommendations with bigdl-friesian-serve and with manually combined components.

    python benchmarks/serving.py [--pytriton PYTHON] [--ray PYTHON] [--feast PYTHON]
        [--load PYTHON] [--only one-request load floor store] [--seconds 4] [--rounds 1]
        [--json FILE]
    python benchmarks/serving.py --soak MINUTES [--load PYTHON]

100,000 items with vectors of 64 numbers (IVF, 8 of 400 parts searched), 26 categories of users and
items, 500 candidates for a user, the 10 best are the answer.  All sides have the same network of
OpenVINO in fp32 with one thread a call, and the same index of Faiss.  Each receives gRPC requests:

``two workers``   bigdl-friesian-serve with all stages in two processes on one port; also without
                  keeping what the model makes of users, who ask again and again here;
``one process``   the same in one process, also with the model as a whole (``not split``);
``four services`` bigdl-friesian-serve four times, one stage each;
``pytriton``      Faiss, rows in Redis and the network, in two processes with Triton;
``Ray Serve``     the same in two replicas;
``plain gRPC``    the same in threads of one process, or of two on one port, behind grpc.server,
                  without limits, metrics, deadlines or reload.

Our side splits the model: what depends on the user is computed once, what depends on an item is
kept.  By hand the whole model scores each pair.

A PYTHON is one of a separate environment with the other library (nvidia-pytriton; ray[serve];
feast[redis]; each with faiss-cpu, openvino and redis).  That of ``--load`` may have
mlcommons-loadgen, whose Server scenario is the load then.  Needs ``redis-server``.

``one-request``   milliseconds of one request alone, and of the bare search and network;
``load``          the peak rate, what a request costs the processors (with Redis), and p50 and p99
                  at parts of the peak rate;
``floor``         the same of servers that only spin for ``--spin`` milliseconds: what is left of a
                  tail is that of gRPC, the load and the queue;
``store``         rows of the stores, 1, 50 and 500 at a time, and of Feast's;
``--soak``        70 % of the peak rate for so long: memory and errors minute by minute.
"""

import argparse
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent / "serving_sides"))
from by_spin import METHOD as SPIN
from parts import BEST, DIM, NAMES, OF_ITEM, OF_USER, Parts, load_redis
from say import requests_of

from bigdl.friesian.models import DeepFM
from bigdl.friesian.serving import (
    EmbeddedStore,
    IndexRecall,
    ItemIndex,
    Recommender,
    RecommenderClient,
    RedisStore,
)
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.serving import ServedModel

SIDES = Path(__file__).parent / "serving_sides"
USERS, PARTS, SEARCHED = 5000, 400, 8
SHARES = (0.5, 0.7, 0.85)
BOUNDS = (20, 50)  # milliseconds of p99
REDIS = []  # the number of its process
METHOD = "/recommender.Recommender/getRecommendIDs"
OWN = {
    "two workers": {"workers": 2},
    "two workers, users not kept": {"workers": 2, "user_memory_mb": 0},
    "one process": {},
    "one process, not split": {"split": False},
}
STAGES = ("feature", "ranking", "recall", "recommender")


def frames(items, seed=0):
    """Return users and items with 13 categories each, and the items' vectors."""
    rng = np.random.default_rng(seed)

    def table(name, rows, columns):
        made = {each: rng.integers(0, 100, rows).astype(np.int32) for each in columns}
        return pd.DataFrame({name: np.arange(rows, dtype=np.int32), **made})

    users, films = table("user", USERS, OF_USER), table("item", items, OF_ITEM)
    users["prediction"] = list(rng.standard_normal((USERS, DIM)).astype(np.float32))
    return users, films, rng.standard_normal((items, DIM)).astype(np.float32)


def prepare(folder, users, items, vectors, port):
    """Write store, index and model, and the same for the manual implementations."""
    store = EmbeddedStore(folder / "store")
    store.replace({"user": users, "item": items})
    index = ItemIndex(items["item"], vectors, "ivf", nlist=PARTS, nprobe=SEARCHED)
    index.save(folder / "index")
    (base,) = (folder / "index").glob("files-*/base.faiss")
    (folder / "items.faiss").write_bytes(base.read_bytes())
    torch.manual_seed(0)
    model = DeepFM(dict.fromkeys(NAMES, 100), [], dim=16, hidden=(64, 32)).eval()
    sample = tuple(torch.zeros(4, dtype=torch.int32) for _ in NAMES)
    how = {"accelerator": "openvino", "input_sample": sample, "thread_num": 1}
    fast = InferenceOptimizer.trace(model, **how)
    InferenceOptimizer.save(fast, folder / "model")
    load_redis(port, users[OF_USER], np.stack(users["prediction"]), items[OF_ITEM].to_numpy())
    return store, index


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_redis(stack, folder):
    (port,) = free_ports(1)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
    REDIS.append(process.pid)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while subprocess.run(["redis-cli", "-p", str(port), "ping"], capture_output=True).returncode:
        time.sleep(0.05)
    return port


# -- sides -----------------------------------------------------------------------------------------


class Program:
    """Program that prints a ``ready`` line; ending it ends its process group."""

    def __init__(self, stack, command, log):
        self._log = log
        self.process = subprocess.Popen(
            [str(each) for each in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            start_new_session=True,
        )
        stack.callback(self._end)

    def _end(self):
        group = os.getpgid(self.process.pid) if self.process.poll() is None else None
        children = psutil.Process(self.process.pid).children(recursive=True) if group else []
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for each in children:
            if each.is_running():
                each.kill()

    def line(self):
        """Return the next line that begins with ``ready``."""
        for line in self.process.stdout:
            if line.startswith("ready"):
                return line
        raise SystemExit(f"It does not start:\n{self._log.read_text()[-3000:]}")

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"It has ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)


def served(stack, folder, name, sections):
    """Start bigdl-friesian-serve with a configuration."""
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(sections))  # JSON is YAML
    command = [sys.executable, "-m", "bigdl.friesian.serving.program", "serve", "-c", config]
    return Program(stack, command, folder / f"{name}.log")


def one_server(stack, folder, candidates, name="one", workers=1, split=True, **ranking):
    """Start all stages in one server; return it and its port."""
    (port,) = free_ports(1)
    sections = {
        "store": str(folder / "store"),
        "recall": {"index": str(folder / "index")},
        "ranking": {"model": str(folder / "model"), "inputs": NAMES, "split": split, **ranking},
        "recommender": {"candidates": candidates},
        "server": {"recommender_port": port, "workers": workers, "threads": 4},
    }
    return served(stack, folder, name, sections), port


def four_services(stack, folder, candidates):
    """Start each stage in a process; return the programs and the recommender's port."""
    ports = dict(zip(STAGES, free_ports(4), strict=True))
    url = {stage: f"127.0.0.1:{port}" for stage, port in ports.items()}
    model = {"model": str(folder / "model"), "inputs": NAMES}
    features = {"url": url["feature"]}
    of_stage = {
        "feature": {"store": str(folder / "store")},
        "ranking": {"ranking": model},
        "recall": {"features": features, "recall": {"index": str(folder / "index")}},
        "recommender": {
            "features": features,
            "recall": {"url": url["recall"]},
            "ranking": {"url": url["ranking"], "inputs": NAMES},
            "recommender": {"candidates": candidates},
        },
    }
    programs = []
    for stage, sections in of_stage.items():
        sections["server"] = {f"{stage}_port": ports[stage]}
        programs.append(served(stack, folder, stage, sections))
        if stage == "feature":
            programs[-1].line()  # the recall asks it for its columns
    for each in programs[1:]:
        each.line()
    return programs, ports["recommender"]


def varint(number):
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def recommend_request(candidates):
    """Return a function that creates the RecommendRequest message of a user."""

    def encode(user):
        ids = varint(user)
        head = b"\x08" + varint(BEST) + b"\x10" + varint(candidates)
        return head + b"\x1a" + varint(len(ids)) + ids

    return encode


def start_sides(stack, folder, redis_port, options):
    """Start all implementations; return the load generator's settings by name."""
    ours = requests_of(folder, "ours", recommend_request(options.candidates))
    told, arguments = {}, [folder, redis_port, options.candidates, SEARCHED]
    begun = {}
    for name, python, script in (
        ("pytriton", options.pytriton, "by_pytriton.py"),
        ("Ray Serve", options.ray, "by_ray_serve.py"),
        ("plain gRPC", sys.executable, "by_grpc.py"),
        ("plain gRPC, two processes", sys.executable, "by_grpc.py"),
    ):
        if python:
            command = [python, SIDES / script, *arguments]
            command += [2] if "two" in name else []
            begun[name] = Program(stack, command, folder / f"{script}.log")
            told[name] = json.loads(begun[name].line().removeprefix("ready "))
    own = {}
    for name, how in OWN.items():
        name_of_file = name.replace(",", "").replace(" ", "-")
        program, port = one_server(stack, folder, options.candidates, name_of_file, **how)
        program.line()
        own[name] = [program], port
    own["four services"] = four_services(stack, folder, options.candidates)
    for name, (_, at) in own.items():
        told[name] = {"address": f"127.0.0.1:{at}", "method": METHOD, "requests": ours}
    processes = {name: [each.process.pid, *REDIS] for name, each in begun.items()}
    for name, (programs, _) in own.items():
        processes[name] = [each.process.pid for each in programs]
    return told, processes


def processor_seconds(numbers):
    """Return the CPU seconds of processes and their children."""
    total = 0.0
    for number in numbers:
        process = psutil.Process(number)
        for each in (process, *process.children(recursive=True)):
            try:
                times = each.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
    return total


def start_load(stack, folder, options):
    load = Program(stack, [options.load, SIDES / "load.py"], folder / "load.log")
    is_loadgen = json.loads(load.process.stdout.readline())["loadgen"]
    print("load:", "MLCommons LoadGen, Server scenario" if is_loadgen else "Poisson, this script's")
    return load


# -- what is measured ------------------------------------------------------------------------------


def percent(times, *which):
    return [float(each) for each in np.percentile(times, which)]


def one_request(folder, store, index, redis_port, options):
    """Return the milliseconds of one request alone, interleaved."""
    by_hand = Parts(folder, redis_port, options.candidates, SEARCHED)
    queries = np.stack(frames(1)[0]["prediction"])
    columns = [np.zeros(options.candidates, np.int32) for _ in NAMES]
    rng = np.random.default_rng(9)
    with ExitStack() as stack:
        (address,) = [options.address] if options.address else [None]
        model = stack.enter_context(ServedModel(folder / "model", thread_num=1, input_names=NAMES))
        recall = IndexRecall(store, index)
        recommender = stack.enter_context(
            Recommender(store, recall, model, candidates=options.candidates)
        )
        recommender.warm_up()
        whole = stack.enter_context(
            Recommender(store, recall, model, candidates=options.candidates, split=False)
        )
        sides = {
            "search": lambda user: by_hand.search(queries[user : user + 1]),
            "network": lambda user: by_hand.score(columns),
            "Recommender": lambda user: recommender.recommend([user], BEST),
            "the same, model not split": lambda user: whole.recommend([user], BEST),
            "by hand": lambda user: by_hand.recommend([user]),
        }
        if address:
            client = stack.enter_context(RecommenderClient(address))
            sides["one process, gRPC"] = lambda user: client.recommend([user], BEST)
        times = {name: [] for name in sides}
        for number in range(options.requests):
            user = int(rng.integers(0, USERS))
            for name, ask in sides.items():
                begin = time.perf_counter()
                ask(user)
                if number >= 20:
                    times[name].append(1000 * (time.perf_counter() - begin))
        stages = {each["name"]: each["median"] for each in recommender.metrics.summary()}
    metrics = {name: percent(each, 50, 99) for name, each in times.items()}
    bare = metrics["search"][0] + metrics["network"][0]
    print("\n| one request alone | p50 ms | p99 ms | search + network |\n|---|---|---|---|")
    for name, (p50, p99) in metrics.items():
        print(f"| {name} | {p50:.3f} | {p99:.3f} | {p50 / bare:.2f} |")
    print("stages, median ms:", ", ".join(f"{k} {v:.3f}" for k, v in stages.items()))
    return {"figures": metrics, "stages": stages}


def check_answers(sides, answers, expected):
    """Check that all implementations return the same items."""
    for name in sides:
        for user, content in enumerate(answers[name]):
            raw = base64.b64decode(content)
            wanted = expected[user]
            if "recommender.Recommender" in sides[name]["method"]:
                ids = wanted if packed(wanted) in raw else ids_in(raw)
            else:
                ids = np.frombuffer(raw[-8 * BEST :], np.int32)[:BEST]
            same = len(set(map(int, ids)) & set(map(int, wanted)))
            if same < BEST - 1:
                raise SystemExit(f"{name} answers {list(ids)} for {user}, not {list(wanted)}")


def packed(ids):
    return b"".join(varint(int(each)) for each in ids)


def ids_in(raw):
    """Return the first packed field of the first list of a BigDL answer."""
    from bigdl.friesian.serving import wire

    return wire.message("recommender.RecommendIDProbs").FromString(raw).IDProbList[0].ID


def under_load(sides, processes, load, expected, options):
    """Return the peak rate of each implementation, and p50 and p99 at fractions of it."""
    answers = {n: load.ask(json.dumps({"side": n, **told}))["answers"] for n, told in sides.items()}
    check_answers(sides, answers, expected)
    measurements = {name: {"peak": [], "processor": [], "open": {}} for name in sides}
    for name in sides:  # warms up
        load.ask(json.dumps({"run": name, "outstanding": 8, "seconds": 1}))
    for _ in range(options.rounds):
        for name in sides:
            command = {"run": name, "outstanding": options.outstanding, "seconds": options.seconds}
            before = processor_seconds(processes[name])
            answer = load.ask(json.dumps(command))
            assert not answer["errors"], (name, answer)
            spent = processor_seconds(processes[name]) - before
            measurements[name]["processor"].append(1000 * spent / answer["requests"])
            measurements[name]["peak"].append(answer["requests_per_s"])
        for share in SHARES:
            for name in sides:
                rate = share * float(np.median(measurements[name]["peak"]))
                command = {"run": name, "rate": rate, "seconds": options.seconds}
                answer = load.ask(json.dumps(command)) | {"rate": rate}
                measurements[name]["open"].setdefault(share, []).append(answer)
    head = "".join(f" p99 ≤ {bound} ms |" for bound in BOUNDS)
    half = "p50 ms at half | p99 ms at half"
    print(f"\n| requests/s | peak | ms of a core for each |{head} {half} | errors |")
    print("|---" * (6 + len(BOUNDS)) + "|")
    for name, each in measurements.items():
        each["within"] = {}
        for bound in BOUNDS:
            rates = [
                np.median([run["requests_per_s"] for run in runs])
                for runs in each["open"].values()
                if np.median([run["p99_ms"] for run in runs]) <= bound
            ]
            each["within"][bound] = float(max(rates, default=0))
        half = each["open"][SHARES[0]]
        p50, p99 = (float(np.median([run[key] for run in half])) for key in ("p50_ms", "p99_ms"))
        errors = sum(sum(r["errors"].values()) for runs in each["open"].values() for r in runs)
        within = "".join(f" {each['within'][bound]:.0f} |" for bound in BOUNDS)
        peak = float(np.median(each["peak"]))
        core = float(np.median(each["processor"]))
        print(f"| {name} | {peak:.0f} | {core:.2f} |{within} {p50:.1f} | {p99:.1f} | {errors} |")
    for name, each in measurements.items():
        shown = ", ".join(
            f"{runs[0]['rate']:.0f}/s {np.median([r['p99_ms'] for r in runs]):.1f}"
            for runs in each["open"].values()
        )
        print(f"p99 of {name}, ms: {shown}")
    return measurements


def floor(folder, load, stack, options):
    """Return the peak rate of servers that only compute in C, and p50 and p99 at half of it."""
    latencies = {}
    head = ("a server that only spins", "requests/s", "p50 ms at half", "p99 ms at half")
    print("\n|", " | ".join(head), "|\n|---|---|---|---|")
    for processes, threads in ((1, 2), (2, 1)):
        (port,) = free_ports(1)
        for _ in range(processes):
            command = [sys.executable, SIDES / "by_spin.py", port, options.spin, threads]
            Program(stack, command, folder / "spin.log").line()
        name = f"{processes} × {threads} threads, {options.spin:g} ms"
        side = {"address": f"127.0.0.1:{port}", "method": SPIN}
        requests = requests_of(folder, "spin", varint)
        load.ask(json.dumps({"side": name, **side, "requests": requests}))
        for _ in range(options.rounds):
            command = {"run": name, "outstanding": options.outstanding, "seconds": options.seconds}
            peak = load.ask(json.dumps(command))["requests_per_s"]
            command = {"run": name, "rate": peak / 2, "seconds": options.seconds}
            answer = load.ask(json.dumps(command))
            p50, p99 = answer["p50_ms"], answer["p99_ms"]
            latencies.setdefault(name, []).append((peak, p50, p99))
            print(f"| {name} | {peak:.0f} | {p50:.1f} | {p99:.1f} |", flush=True)
    return latencies


def rows_of_stores(folder, store, redis_port, users, items, options, stack):
    """Return milliseconds and requests/s of sequential reads of 1, 50 and 500 rows."""
    remote = stack.enter_context(RedisStore(f"redis://127.0.0.1:{redis_port}", "ours_"))
    remote.replace({"user": users, "item": items})
    feast = None
    if options.feast:
        rows = min(len(items), 10_000)
        command = [options.feast, SIDES / "feast_store.py", folder, redis_port, rows]
        feast = Program(stack, command, folder / "feast.log")
        feast.line()
    rng = np.random.default_rng(3)
    latencies = {}
    for count in (1, 50, 500):
        times = {}
        for _ in range(3):
            for name, each in (("folder", store), ("Redis", remote)):
                for _ in range(options.requests // 3):
                    ids = rng.integers(0, len(items), count).tolist()
                    begin = time.perf_counter()
                    assert len(each.read("item", ids, OF_ITEM).columns) == len(OF_ITEM)
                    times.setdefault(name, []).append(1000 * (time.perf_counter() - begin))
            for name in ("sqlite", "redis") if feast else ():
                command = f"{name} {count} {max(options.requests // 3 // (1 + count // 25), 5)}"
                times.setdefault(f"Feast, {name}", []).extend(feast.ask(command))
        latencies[count] = {
            name: [*percent(t, 50, 99), 1000 / np.mean(t)] for name, t in times.items()
        }
    print("\n| rows | store | p50 ms | p99 ms | requests/s |\n|---|---|---|---|---|")
    for count, metrics in latencies.items():
        for name, (p50, p99, rate) in metrics.items():
            print(f"| {count} | {name} | {p50:.3f} | {p99:.3f} | {rate:.0f} |")
    return latencies


def memory_mb(process):
    """Return the resident memory without file pages, which are shared and reclaimable."""
    told = process.memory_info()
    return (told.rss - told.shared) / 1e6


def soak(folder, load, options, stack):
    """Run at 70 % of the peak for some minutes; fail on errors or growing memory."""
    program, port = one_server(stack, folder, options.candidates, workers=options.workers)
    program.line()
    ours = requests_of(folder, "ours", recommend_request(options.candidates))
    side = {"address": f"127.0.0.1:{port}", "method": METHOD, "requests": ours}
    load.ask(json.dumps({"side": "ours", **side}))
    rate = options.rate
    if not rate:
        command = {"run": "ours", "outstanding": options.outstanding, "seconds": 10}
        rate = 0.7 * load.ask(json.dumps(command))["requests_per_s"]
    print(f"{rate:.0f} requests/s for {options.soak} minutes")
    print("\n| minute | requests/s | p50 ms | p99 ms | errors | MB | descriptors | threads |")
    print("|---" * 8 + "|")
    processes = [psutil.Process(program.process.pid)]
    if options.workers > 1:
        processes = processes[0].children()
    rows, begin = [], time.monotonic()
    while time.monotonic() - begin < 60 * options.soak:
        answer = load.ask(json.dumps({"run": "ours", "rate": rate, "seconds": 60}))
        errors = sum(answer["errors"].values())
        row = {
            "minute": (time.monotonic() - begin) / 60,
            **{name: answer[name] for name in ("requests_per_s", "p50_ms", "p99_ms")},
            "errors": errors,
            "mb": sum(map(memory_mb, processes)),
            "descriptors": sum(each.num_fds() for each in processes),
            "threads": sum(each.num_threads() for each in processes),
        }
        rows.append(row)
        print("|", " | ".join(f"{v:.1f}" if isinstance(v, float) else f"{v}" for v in row.values()),
              "|", flush=True)  # fmt: skip
    quarter = max(len(rows) // 4, 1)
    early = float(np.median([each["mb"] for each in rows[quarter : 2 * quarter] or rows]))
    late = float(np.median([each["mb"] for each in rows[-quarter:]]))
    errors = sum(each["errors"] for each in rows)
    print(f"\nMB in the second quarter {early:.1f}, in the last {late:.1f}; {errors} errors")
    if errors or late > 1.05 * early + 5:
        raise SystemExit("The memory grows, or requests failed")
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("pytriton", "ray", "feast"):
        parser.add_argument(f"--{name}", metavar="PYTHON")
    parser.add_argument("--load", metavar="PYTHON", default=sys.executable)
    parts = ["one-request", "load", "floor", "store"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--spin", type=float, default=2.5)
    parser.add_argument("--outstanding", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--workers", type=int, default=2, help="of the soak")
    parser.add_argument("--rate", type=float, help="of the soak; default: 70 %% of the peak")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    options.address = None
    faiss.omp_set_num_threads(1)
    users, items, vectors = frames(options.items)
    results = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_port = start_redis(stack, folder)
        store, index = prepare(folder, users, items, vectors, redis_port)
        if options.soak:
            load = start_load(stack, folder, options)
            results["soak"] = soak(folder, load, options, stack)
        elif {"load", "floor"}.intersection(options.only):
            load = start_load(stack, folder, options)
        if not options.soak and "floor" in options.only:
            with ExitStack() as running:
                results["floor"] = floor(folder, load, running, options)
        if not options.soak and "load" in options.only:
            by_hand = Parts(folder, redis_port, options.candidates, SEARCHED)
            expected = by_hand.recommend(list(range(20)))[:, :BEST]
            with ExitStack() as running:
                sides, processes = start_sides(running, folder, redis_port, options)
                options.address = sides["two workers"]["address"]
                results["load"] = under_load(sides, processes, load, expected, options)
        if not options.soak and "one-request" in options.only:
            with ExitStack() as running:
                program, port = one_server(running, folder, options.candidates)
                program.line()
                options.address = f"127.0.0.1:{port}"
                results["one request"] = one_request(folder, store, index, redis_port, options)
        if not options.soak and "store" in options.only:
            arguments = folder, store, redis_port, users, items, options, stack
            results["store"] = rows_of_stores(*arguments)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return results


if __name__ == "__main__":
    main()
