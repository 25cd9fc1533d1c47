"""Sequence models of RecTools, for ``benchmarks/sequence_models.py``.

Runs in an environment with rectools[torch]. Each line of the standard input is a JSON object with
the files of the training rows and of the recommendations, the model and its arguments; the answer
is a line with the seconds and CPU seconds of the training.
"""

import json
import logging
import sys
import time
import warnings

import pandas as pd
import torch
from pytorch_lightning import Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import BERT4RecModel, HSTUModel, SASRecModel
from rectools.models.nn.transformers.ligr import LiGRLayers


def trainer(epochs):
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def model_of(task):
    """Return a model with the sizes, the loss and the optimizer of the other side."""
    arguments = {
        "n_blocks": 2,
        "n_heads": task["heads"],
        "n_factors": task["dim"],
        "dropout_rate": 0.2,
        "session_max_len": task["max_len"],
        "lr": 0.001,
        "batch_size": task["batch_size"],
        "get_trainer_func": lambda: trainer(task["epochs"]),
        "loss": "softmax",
    }
    if task["model"] == "eSASRec":
        arguments |= {"loss": "sampled_softmax", "n_negatives": 256}
        return SASRecModel(**arguments, transformer_layers_type=LiGRLayers)
    if task["model"] == "BERT4Rec":
        return BERT4RecModel(**arguments, mask_prob=0.2)
    if task["model"] == "HSTU":
        return HSTUModel(**arguments, relative_time_attention=True, relative_pos_attention=True)
    return SASRecModel(**arguments)


def run(task):
    seed_everything(task["seed"])
    rows = pd.read_csv(task["train"]).rename(columns={"user": "user_id", "item": "item_id"})
    rows = rows.sort_values(["user_id", "time", "item_id"], kind="stable")
    # distinct times keep the order by item within a second
    number = rows.groupby(["user_id", "time"]).cumcount()
    rows["datetime"] = pd.to_datetime(rows.pop("time"), unit="s") + pd.to_timedelta(number, "us")
    rows["weight"] = 1.0
    dataset, model = Dataset.construct(rows), model_of(task)
    began, cpu = time.perf_counter(), time.process_time()
    model.fit(dataset)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    options = {}
    if task["model"] == "HSTU":  # the time of the request: that of the user's last known event
        context = rows.groupby("user_id", as_index=False)["datetime"].max()
        options["context"] = context[context.user_id.isin(task["users"])]
    lists = model.recommend(task["users"], dataset, task["k"], filter_viewed=True, **options)
    lists = lists.rename(columns={Columns.User: "user", Columns.Item: "item", Columns.Rank: "rank"})
    lists[["user", "item", "rank"]].to_csv(task["lists"], index=False)
    return {"seconds": seconds, "cpu_seconds": cpu}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
