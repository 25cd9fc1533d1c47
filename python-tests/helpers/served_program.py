"""bigdl-friesian-serve with a small catalogue, in a process of its own."""

import json
import signal
import subprocess
import sys
import tempfile
import time

import torch
from served_catalogue import free_port, items_frame, users_frame

from bigdl.friesian.models import DeepFM
from bigdl.friesian.serving import (
    EmbeddedStore,
    IndexRecall,
    ItemIndex,
    ModuleRanker,
    Recommender,
)
from bigdl.friesian.serving.program import main

COMMAND = [sys.executable, "-m", "bigdl.friesian.serving.program"]


def written(folder, text, name="serving.yaml"):
    path = folder / name
    path.write_text(text)
    return str(path)


def made_in(made):
    """Write Parquet files, a saved model, and a configuration of all stages in one process.

    Returns
    -------
    folder, configuration, ports by service, model
    """
    from bigdl.nano.pytorch import InferenceOptimizer

    users, items = users_frame(), items_frame()
    users.to_parquet(made / "users.parquet")
    items.drop(columns="vector").to_parquet(made / "items.parquet")
    items[["item", "vector"]].to_parquet(made / "vectors.parquet")
    torch.manual_seed(0)
    model = DeepFM({"user": 700, "item": 1300, "kind": 9}, ["price"], dim=4, hidden=(8,)).eval()
    sample = [torch.zeros(2, dtype=torch.int64)] * 3 + [torch.zeros(2)]
    sample[2] = sample[2].to(torch.int8)
    sample = (sample[0], sample[1].to(torch.int64), sample[2], sample[3])
    saved = InferenceOptimizer.trace(model, accelerator="openvino", input_sample=sample)
    InferenceOptimizer.save(saved, str(made / "model"))
    ports = {name: free_port() for name in ("recommender", "recall", "feature", "ranking", "http")}
    text = f"""
store: features
recall:
  index: index
  user_vector: prediction
  seen: seen
ranking:
  model: model
  inputs: {json.dumps(model.feature_cols)}
recommender:
  candidates: 40
  popular: [3, 0, 6]
server:
  changes: true
{"".join(f"  {name}_port: {port}{chr(10)}" for name, port in ports.items())}
init:
  users: users.parquet
  items: items.parquet
  vectors: vectors.parquet
  vector: vector
"""
    config = written(made, text)
    assert main(["init", "--config", config]) == 0
    return made, config, ports, model


def started(config):
    """Start a server; what it logs goes to a file, since a pipe that nobody reads would stop it."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it lives as long as the process
    command = [*COMMAND, "serve", "--config", config]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    process.log = log
    line = process.stdout.readline()
    if not line.startswith("ready"):
        process.wait()
        raise AssertionError(logged(process))
    return process


def logged(process):
    """What a server has logged."""
    process.log.seek(0)
    return process.log.read()


def ended(process):
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    err = logged(process)
    assert process.returncode == 0, err
    return out, err


def expected(folder, users, k):
    made, _, _, model = folder
    store = EmbeddedStore(made / "features")
    recall = IndexRecall(store, ItemIndex.load(made / "index"), seen_col="seen")
    with Recommender(store, recall, ModuleRanker(model), candidates=40, popular=[3, 0, 6]) as one:
        return [each.item_ids.tolist() for each in one.recommend(users, k)]


def wait_for(condition):
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up, "it did not become true within 30 s"
        time.sleep(0.1)
