"""Worker side of an MXNet fit: starts the MXNet processes and collects their results.

MXNet's key-value store sums the gradients. Its scheduler runs on worker 0, and its servers are
assigned to the workers round-robin.
"""

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bigdl.common.cpu import THREAD_VARIABLES
from bigdl.common.errors import UsageError
from bigdl.common.timeouts import STORE_END_S, STORE_LOOK_S
from bigdl.orca.learn.mxnet.environment import isolated_python
from bigdl.runtime.engine import user_import_path
from bigdl.runtime.process import exit_message
from bigdl.runtime.shards.values import structured_columns
from bigdl.runtime.worker import Worker

WEIGHTS = "model.params"
_STATE = (WEIGHTS, "optimizer.states")
_PROGRAM = Path(__file__).with_name("program.py")


def run(
    files: dict[str, bytes], job: dict, batch_size: int, servers: int | None, worker: Worker
) -> dict:
    """Train in MXNet processes; rank 0 sends back the model and optimizer files.

    Parameters
    ----------
    files : dict of str to bytes
        The pickled functions, and the state to resume training from.
    job : dict
        JSON-serializable: epochs, seed and batches per epoch.
    batch_size : int
        Number of rows per batch of each worker.
    servers : int, optional
        Number of key-value servers; default the number of workers.
    worker : Worker

    Returns
    -------
    dict
        The worker's metrics of the last epoch.
    """
    with tempfile.TemporaryDirectory(dir=worker.local_dir or None, prefix="mxnet-") as directory:
        folder = Path(directory)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        columns = job.pop("columns")
        shards = {
            name: _store_shard(name, columns, folder, batch_size, worker) for name in worker.shards
        }
        job = {**job, "shards": shards, "path": user_import_path()}
        (folder / "job.json").write_text(json.dumps(job))
        with _processes(folder, servers or worker.world_size, worker) as processes:
            outcome = _outcome(folder, processes)
        if worker.rank == 0:
            for file in _STATE:
                worker.send(file, {}, (folder / file).read_bytes())
    return outcome["stats"]


def _store_shard(
    name: str, columns: list | None, folder: Path, batch_size: int, worker: Worker
) -> dict:
    """Write a shard's columns as ``.npy`` files; return the files and the number of batches.

    All workers get the same number of batches, whose sizes differ by at most one row.
    """
    shard = worker.shards[name]
    rows = worker.channel.all_gather(f"mxnet {name}", worker.rank, shard.rows, worker.world_size)
    if min(rows) == 0:
        raise UsageError(
            f"Worker {rows.index(0)} has no rows; use fewer workers", code="data-empty"
        )
    files: dict[str, list[str]] = {}
    named = columns or structured_columns(shard.names)
    for role, names in zip(("features", "labels"), named, strict=True):
        files[role] = []
        for column in names:
            values = shard.column(column)
            for array in values.values() if isinstance(values, dict) else [values]:
                files[role].append(f"{name}-{role}-{len(files[role])}.npy")
                np.save(folder / files[role][-1], array)
    return {**files, "batches": min(min(rows), -(-max(rows) // batch_size))}


@contextlib.contextmanager
def _processes(folder: Path, servers: int, worker: Worker) -> Iterator[list[subprocess.Popen]]:
    """Return a context manager that runs this worker's MXNet processes; the first one trains."""
    size = worker.world_size
    with socket.create_server((worker.host, 0)) as free:
        address = free.getsockname()[:2]
    host, port = worker.channel.all_gather("mxnet", worker.rank, address, size)[0]
    environment = {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(worker.threads)),
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": worker.host,
        "DMLC_NUM_WORKER": str(size),
        "DMLC_NUM_SERVER": str(servers),
    }
    roles = ["worker", *["server"] * len(range(worker.rank, servers, size))]
    roles += ["scheduler"] * (worker.rank == 0)
    processes = []
    try:
        for role in roles:
            processes.append(
                subprocess.Popen(
                    [isolated_python(), "-Iu", str(_PROGRAM), str(folder)],
                    env={**environment, "DMLC_ROLE": role},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            )
            threading.Thread(target=_print_lines, args=(processes[-1].stdout,), daemon=True).start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _print_lines(lines):
    for line in lines:
        print(line, end="")


def _outcome(folder: Path, processes: list[subprocess.Popen]) -> dict:
    """Wait for the training process and return its result, or raise its error."""
    training, *store = processes
    while training.poll() is None and not any(each.poll() for each in store):
        time.sleep(STORE_LOOK_S)
    path = folder / "outcome.json"
    if not path.exists():
        code = next(each.returncode for each in processes if each.returncode is not None)
        raise UsageError(
            f"An MXNet process {exit_message(code)}; see its output for the reason",
            code="program-failed",
        )
    outcome = json.loads(path.read_text())
    if outcome.get("error") == "RejectedRequest":
        raise UsageError(outcome["message"], code="argument-value")
    if "error" in outcome:
        # keep the original class name and traceback
        raise type(outcome["error"], (RuntimeError,), {})(f"in MXNet\n{outcome['traceback']}")
    for each in store:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(STORE_END_S)
    return outcome
