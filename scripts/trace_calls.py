#!/usr/bin/env python3
"""Count the files and functions of src/bigdl that one user call enters.

python scripts/trace_calls.py fit              # also: fit-keras, predict, quantize
python scripts/trace_calls.py fit --functions  # their names, in the order of the first call

Driver and worker are counted apart.  Comprehensions and lambdas belong to the function around them;
what runs at import does not count.  A move is a pair of functions of two files of which one calls
the other.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

SOURCE = str(Path(__file__).resolve().parents[1] / "src" / "bigdl") + "/"
FUNCTION = 0x3  # CO_OPTIMIZED and CO_NEWLOCALS: not the body of a class or a module


class CallTrace:
    """Trace of entered functions and calls between files, written to a file immediately.

    Processes may end without notice, so every new function is a separate line.

    Parameters
    ----------
    path : str
    """

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._seen: set = set()
        self._local = threading.local()

    def start(self) -> None:
        """Start to trace all threads."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        """Stop the trace in this thread and in new ones."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _on_event(self, frame, event, _) -> None:
        code = frame.f_code
        if code.co_name == "<module>" and event in ("call", "return"):
            depth = getattr(self._local, "imports", 0)
            self._local.imports = depth + (1 if event == "call" else -1)
        if event != "call" or getattr(self._local, "imports", 0) > 0:
            return
        if not code.co_filename.startswith(SOURCE) or code.co_flags & FUNCTION != FUNCTION:
            return
        own, caller = self._function(frame), frame.f_back
        if own not in self._seen:
            self._note(own, [own])
        while caller is not None and not caller.f_code.co_filename.startswith(SOURCE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            move = self._function(caller), own
            if move not in self._seen:
                self._note(move, list(move))

    @staticmethod
    def _function(frame) -> tuple[str, str]:
        """Return the file and name of a function, for a comprehension of the enclosing function."""
        name = frame.f_code.co_qualname
        while name.endswith(">"):
            name = name.rpartition(".<locals>.")[0] or name.rstrip(">")
        return frame.f_code.co_filename.removeprefix(SOURCE), name

    def _note(self, key, functions) -> None:
        self._seen.add(key)
        os.write(self._file, (json.dumps(functions) + "\n").encode())


SITE = f"""\
import os, sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from trace_calls import CallTrace
CallTrace(os.path.join({{folder!r}}, f"worker-{{{{os.getpid()}}}}")).start()
"""


def torch_estimator(workers: int = 1):
    """Return an Estimator with the local backend, and rows for it."""
    import numpy as np
    import torch
    from torch import nn

    from bigdl.orca.learn.pytorch import Estimator

    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    estimator = Estimator.from_torch(
        model=lambda config: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.MSELoss(),
        backend="local",
        workers_per_node=workers,
    )
    return estimator, (x, x.sum(axis=1, keepdims=True))


def fit() -> Callable[[], object]:
    """Fit two epochs with two local workers."""
    estimator, data = torch_estimator(2)
    return lambda: estimator.fit(data, epochs=2, batch_size=16)


def fit_keras() -> Callable[[], object]:
    """Fit a Keras model with two local workers."""
    from bigdl.orca.learn.tf2 import Estimator

    def creator(config):
        import keras

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        return model

    _, data = torch_estimator()
    estimator = Estimator.from_keras(model_creator=creator, backend="local", workers_per_node=2)
    return lambda: estimator.fit(data, epochs=2, batch_size=16, verbose=0)


def predict() -> Callable[[], object]:
    """Predict arrays after a fit."""
    estimator, data = torch_estimator()
    estimator.fit(data, epochs=1, batch_size=16)
    return lambda: estimator.predict(data[0])


def quantize() -> Callable[[], object]:
    """Quantize a model to int8 with OpenVINO."""
    import torch
    from torch import nn

    from bigdl.nano.pytorch import InferenceOptimizer

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    x = torch.randn(64, 4)
    rows = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    return lambda: InferenceOptimizer.quantize(
        model, precision="int8", accelerator="openvino", calib_data=loader
    )


CALLS = {"fit": fit, "fit-keras": fit_keras, "predict": predict, "quantize": quantize}


def summary(paths: list[Path], names: bool) -> str:
    """Return the combined counts of several processes, and optionally the functions."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    functions = list(dict.fromkeys(tuple(line[0]) for line in lines if len(line) == 1))
    moves = {tuple(map(tuple, line)) for line in lines if len(line) == 2}
    files = {file for file, _ in functions}
    text = f"{len(files)} files, {len(functions)} functions, {len(moves)} moves between files"
    return "\n  ".join([text, *(f"{file}: {name}" for file, name in functions if names)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--functions", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        call = CALLS[arguments.call]()
        Path(folder, "sitecustomize.py").write_text(SITE.format(folder=folder))
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        trace = CallTrace(f"{folder}/driver")
        trace.start()
        call()
        trace.stop()
        print("driver:", summary([Path(folder, "driver")], arguments.functions))
        workers = sorted(Path(folder).glob("worker-*"))
        if workers:
            print("worker:", summary(workers, arguments.functions))


if __name__ == "__main__":
    main()
