"""From a Parquet table to tensor batches: Spark Connect, classic Spark, and TorchDistributor.

    python benchmarks/connect.py [--rows 2000000] [--repeats 5] [--json results.json]

Every repeat runs all sides one after another (interleaved), so that the noise of a shared machine
meets all of them. Spark Connect and TorchDistributor use the same server, which runs in a process
of its own on this machine, and the classic Spark has the same settings.

===============  ================================================================================
``connect``      ``ConnectEngine.run`` with the DataFrame: the first epoch includes the Spark job,
                 conversion and spooling; later epochs read the memory-mapped spool
``connect rank0``  the same where workers cannot connect to the program and meet at rank 0
``classic``      ``SparkEngine.run`` with the same DataFrame
``distributor``  ``TorchDistributor._train_on_dataframe`` with its own loader, of a DataFrame that
                 was cut in even partitions, as it asks for
===============  ================================================================================

Ratios are medians over the repeats of the ratio within one repeat, with their range. Gates:
``connect`` at least 3 x ``distributor``, and 0.6 x ``classic`` in the first epoch.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH, WORKERS = 4096, 2
COLUMNS = [*(f"f{i}" for i in range(7)), "label"]
FIRST, LATER = "first epoch", "later epoch"


# -- the sides: each returns {phase: rows per second} ------------------------------------------


def engine_side(engine, frame):
    from feed import _epochs_program

    from bigdl.orca.data.feeds import as_feed

    started = time.perf_counter()
    feed = as_feed(frame, COLUMNS[:-1], COLUMNS[-1:])
    with engine.open(_epochs_program(COLUMNS), feed, WORKERS) as job:
        results = job.attempt()
        ended = time.perf_counter()
    rows = sum(r["rows"] for r in results)
    rest = max(r["later"] for r in results)
    return {FIRST: rows / (ended - started - rest), LATER: rows / max(r[LATER] for r in results)}


def distributor_side(frame, rows):
    from pyspark.ml.torch.distributor import TorchDistributor

    def train(samples, batch):
        import time

        from pyspark.ml.torch.distributor import _get_spark_partition_data_loader

        seconds = []
        for _ in range(2):
            began, seen = time.perf_counter(), 0
            for columns in _get_spark_partition_data_loader(samples, batch):
                seen += len(columns[0])
            assert seen == samples, (seen, samples)
            seconds.append(time.perf_counter() - began)
        return seconds

    distributor = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=False)
    started = time.perf_counter()
    even = frame.select(*COLUMNS).repartition(WORKERS)
    seconds = distributor._train_on_dataframe(train, even, rows // WORKERS, BATCH)
    total = time.perf_counter() - started
    return {FIRST: rows / (total - seconds[1]), LATER: rows / seconds[1]}


def serve(master, path, rows):
    """Run the implementations named on standard input, in a separate process."""
    from bigdl.orca import OrcaContext, init_orca_context
    from bigdl.orca.engine import ConnectEngine, SparkEngine

    if master == "classic":
        init_orca_context("local", cores=WORKERS, memory="2g")
    else:
        init_orca_context("spark-connect", master=master)
    frame = OrcaContext.get_spark_session().read.parquet(path)
    sides = {
        "classic": lambda: engine_side(SparkEngine(), frame),
        "connect": lambda: engine_side(ConnectEngine(), frame),
        "connect rank0": lambda: engine_side(ConnectEngine(rendezvous="rank0"), frame),
        "distributor": lambda: distributor_side(frame, rows),
    }
    for line in sys.stdin:
        print(f"figures {json.dumps(sides[line.strip()]())}", flush=True)


# -- this process: the table, the server, the report --------------------------------------------


class Program:
    """Process that runs implementations on demand."""

    def __init__(self, master, path, rows):
        command = [sys.executable, __file__, "--serve", master, path, str(rows)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, stderr=subprocess.DEVNULL, **pipes)

    def run(self, side):
        print(side, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("figures "):
                return json.loads(line.removeprefix("figures "))
        raise SystemExit(f"The process of {side!r} ended with {self._process.wait()}")

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)


def start_server(folder):
    """Start a Spark Connect server on the loopback interface; return its process and address."""
    import pyspark

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = Path(pyspark.__file__).parent
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.ui.enabled": "false",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
    }
    server = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = [str(home / "bin/spark-submit"), "--master", f"local[{WORKERS}]", "--class", server]
    for name, value in conf.items():
        command += ["--conf", f"{name}={value}"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with open(Path(folder, "server.log"), "wb") as log:
        process = subprocess.Popen(
            [*command, "spark-internal"], cwd=folder, env=environment, stdout=log, stderr=log
        )
    while socket.socket().connect_ex(("127.0.0.1", port)):
        if process.poll() is not None:
            raise SystemExit(Path(folder, "server.log").read_text()[-2000:])
        time.sleep(0.2)
    return process, f"sc://127.0.0.1:{port}"


def write_table(path, rows):
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path(path).mkdir()
    draw = np.random.default_rng(0)
    for part in range(4):
        count = rows * (part + 1) // 4 - rows * part // 4
        columns = {name: draw.random(count, np.float32) * 100 for name in COLUMNS[:-1]}
        columns["label"] = draw.integers(0, 10, count, np.int32)
        pq.write_table(pa.table(columns), f"{path}/part-{part}.parquet")


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        master, path, rows = options.serve
        serve(master, path, int(rows))
        return
    rows = options.rows // WORKERS * WORKERS
    with tempfile.TemporaryDirectory(prefix="bigdl-benchmark-") as folder:
        path = os.path.join(folder, "table")
        write_table(path, rows)
        server, url = start_server(folder)
        programs = [Program("classic", path, rows), Program(url, path, rows)]
        try:
            sides = {"classic": programs[0], **dict.fromkeys(SIDES[1:], programs[1])}
            for _ in range(options.warm_up):
                for side in ("classic", "connect"):
                    sides[side].run(side)
            rounds = [{s: sides[s].run(s) for s in SIDES} for _ in range(options.repeats)]
        finally:
            for program in programs:
                program.close()
            server.terminate()
            server.wait(60)
    print(f"{rows} rows of {len(COLUMNS)} columns, {WORKERS} workers, rows/s")
    for side in SIDES:
        for phase in (FIRST, LATER):
            print(
                f"{side:14} {phase:12} {statistics.median(r[side][phase] for r in rounds):14,.0f}"
            )
    for other in ("distributor", "classic", "connect rank0"):
        for phase in (FIRST, LATER):
            ratios = [r["connect"][phase] / r[other][phase] for r in rounds]
            print(f"connect / {other:14} {phase:12} {spread(ratios)}")
    if options.json:
        Path(options.json).write_text(json.dumps(rounds, indent=1))


SIDES = ("classic", "connect", "connect rank0", "distributor")

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
