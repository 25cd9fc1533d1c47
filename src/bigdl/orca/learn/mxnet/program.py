"""Script that the MXNet processes run, in an environment without BigDL.

``DMLC_ROLE`` is the role of a process. Importing mxnet runs the scheduler and the servers of the
key-value store. A worker then trains with the files in the directory of its argument.
"""

import ctypes
import importlib
import itertools
import json
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings


class RejectedRequest(Exception):
    """Raised for a fit request that cannot be satisfied."""


def main():
    ctypes.CDLL(None).prctl(
        1, int(signal.Signals["SIGKILL"])
    )  # PR_SET_PDEATHSIG: end with the parent process
    warnings.simplefilter("ignore")
    # module names in pickles of NumPy 2
    for name in ("_core", "_core.multiarray", "_core.numeric"):
        sys.modules[f"numpy.{name}"] = importlib.import_module(f"numpy.{name[1:]}")
    import mxnet  # noqa: F401

    if os.environ["DMLC_ROLE"] != "worker":
        return
    os.chdir(sys.argv[1])
    with open("job.json") as file:
        job = json.load(file)
    sys.path += job.pop("path")
    try:
        with open("creators.pkl", "rb") as file:
            outcome = {"stats": train(**pickle.load(file), **job)}
    except BaseException as error:
        name, text = type(error).__name__, traceback.format_exc()
        outcome = {"error": name, "message": str(error), "traceback": text}
    with open("outcome.json", "w") as file:
        json.dump(outcome, file)
    if "stats" not in outcome:
        os._exit(1)  # exit at once: the store would wait for the other workers


def train(creators, config, functions, epochs, resize, shards, seed):
    """Train and return the metrics of the last epoch."""
    import mxnet as mx
    import numpy as np

    kv = mx.kv.create("dist_sync")
    random.seed(seed)
    np.random.seed(seed)
    inputs = {name: function(config, kv) for name, function in functions.items()}
    for name, files in shards.items():
        inputs[name] = ShardIter(**files, seed=seed if name == "data" else None)
    mx.random.seed(
        seed
    )  # reset, so that all workers start from the same weights whatever their data consumed
    model = creators["model_creator"](config)
    metrics, validation_metrics = (
        creators[name] and mx.metric.create(creators[name](config))
        for name in ("eval_metrics_creator", "validation_metrics_creator")
    )
    is_symbol = isinstance(model, mx.mod.BaseModule)
    if not is_symbol and creators["loss_creator"] is None:
        raise RejectedRequest("loss_creator is required for a gluon model; pass one to from_mxnet")
    loss = None if is_symbol else creators["loss_creator"](config)
    trainer, stats = None, {}
    for epoch in range(epochs):
        begin, losses, seen = time.time(), 0.0, 0
        if metrics:
            metrics.reset()
        batches = batches_of(inputs["data"], resize)
        for number in itertools.count(1):
            batch = next(batches, None)
            batch_rows = 0 if batch is None else len(batch.data[0])
            if trainer is None:
                if batch is None:
                    raise RejectedRequest("A worker has no batch; every worker needs some rows")
                trainer = (SymbolTrainer if is_symbol else GluonTrainer)(
                    model, loss, config, kv, batch
                )
            rows, running = trainer.store.total(batch_rows, batch is not None)
            if running < kv.num_workers:
                break
            losses += trainer.step(batch, rows, metrics)
            seen += batch_rows
            if number % config["log_interval"] == 0:
                print(f"Epoch {epoch + 1}, batch {number}: {describe(losses / seen, metrics)}")
        if running:
            raise RejectedRequest(
                f"Some workers have more than {number - 1} batches, the number of others; pass "
                "train_resize_batch_num, the number of batches per worker and epoch"
            )
        stats = {"epoch_time": time.time() - begin}
        if not is_symbol:
            stats["loss"] = losses / seen
        stats.update(metrics.get_name_value() if metrics else ())
        if "validation" in inputs:
            validation_metrics.reset()
            for batch in batches_of(inputs["validation"]):
                trainer.predict(batch, validation_metrics)
            values = validation_metrics.get_name_value()
            stats.update((f"validation_{name}", value) for name, value in values)
        if kv.rank == 0:
            print(f"Epoch {epoch + 1}/{epochs}: {stats}")
    trainer.save()
    return {name: float(value) for name, value in stats.items()}


def describe(loss, metrics):
    return f"loss {loss:.4g} {metrics.get_name_value() if metrics else ''}"


def as_list(value):
    return list(value) if isinstance(value, list | tuple) else [value]


def batches_of(data, number=None):
    """Yield `number` batches, restarting the data as needed; if None, yield one pass."""
    import mxnet as mx

    left = number or sys.maxsize
    while left:
        before = left
        if hasattr(data, "reset"):
            data.reset()
        for batch in itertools.islice(data, left):
            left -= 1
            if not isinstance(batch, mx.io.DataBatch):
                *features, label = batch
                features = as_list(features[0] if len(features) == 1 else features)
                batch = mx.io.DataBatch(features, as_list(label))
            yield batch
        if number is None or left == before:
            return


class ShardIter:
    """Iterator over this worker's rows in a fixed number of nearly equal batches."""

    def __init__(self, features, labels, batches, seed):
        import numpy as np

        self.arrays = [
            [np.load(file, mmap_mode="r") for file in files] for files in (features, labels)
        ]
        self.batches = batches
        self.order = None if seed is None else np.random.RandomState(seed)

    def __iter__(self):
        import mxnet as mx
        import numpy as np

        rows = len(self.arrays[0][0])
        order = np.arange(rows) if self.order is None else self.order.permutation(rows)
        for part in np.array_split(order, self.batches):
            yield mx.io.DataBatch(*([mx.nd.array(a[part]) for a in each] for each in self.arrays))


class GradientStore:
    """All-reduces gradients through MXNet's key-value store.

    Values are pushed and pulled in two steps, because ``pushpull`` of a dist_sync store, which
    gluon's Trainer calls, sometimes returns wrong values (MXNet 1.9.1). No optimizer runs in the
    store.
    """

    def __init__(self, kv, weights):
        import mxnet as mx

        self.kv = kv
        self.rows = len(weights)
        for key, each in enumerate([*weights, mx.nd.zeros(2)]):
            kv.init(key, each)
        for key, each in enumerate(weights):
            kv.pull(key, out=each)

    def add(self, gradients):
        """Replace gradients with their sums over all workers."""
        for key, each in enumerate(gradients):
            self._add(key, each)

    def total(self, rows, running):
        """Return the total rows of all workers, and the number of workers that have a batch."""
        import mxnet as mx

        values = mx.nd.array([rows, running])
        self._add(self.rows, values)
        return tuple(map(int, values.asnumpy()))

    def _add(self, key, values):
        self.kv.push(key, values, priority=-key)
        self.kv.pull(key, out=values, priority=-key)


class GluonTrainer:
    """Trainer of a Gluon model that sums gradients over workers and updates weights locally."""

    def __init__(self, model, loss, config, kv, batch):
        from mxnet import gluon

        self.model, self.loss = model, loss
        if os.path.exists("model.params"):
            model.load_parameters("model.params")
        model(*batch.data)  # initialize deferred weights before layers use the random generator
        self.trainer = gluon.Trainer(
            model.collect_params(),
            config["optimizer"],
            config["optimizer_params"],
            kvstore=None,
        )
        self.parameters = [p for p in model.collect_params().values() if p.grad_req != "null"]
        self.store = GradientStore(kv, [each.data() for each in self.parameters])
        if os.path.exists("optimizer.states"):
            self.trainer.load_states("optimizer.states")

    def step(self, batch, rows, metrics):
        from mxnet import autograd

        with autograd.record():
            outputs = as_list(self.model(*batch.data))
            loss = self.loss(*outputs, *batch.label)
        loss.backward()
        self.store.add([each.grad() for each in self.parameters])
        self.trainer.update(rows)
        if metrics:
            metrics.update(batch.label, outputs)
        return float(loss.mean().asscalar()) * len(batch.data[0])

    def predict(self, batch, metrics):
        metrics.update(batch.label, as_list(self.model(*batch.data)))

    def save(self):
        self.model.save_parameters("model.params")
        self.trainer.save_states("optimizer.states")


class SymbolTrainer:
    """Trainer of a symbol module, whose symbol includes the loss."""

    def __init__(self, model, loss, config, kv, batch):
        import mxnet as mx

        self.model = model
        shapes = (
            [(name, array.shape) for name, array in zip(names, arrays, strict=True)]
            for names, arrays in ((model.data_names, batch.data), (model.label_names, batch.label))
        )
        model.bind(*shapes)
        model.init_params(mx.initializer.create(config.get("init", "uniform")))
        if os.path.exists("model.params"):
            model.load_params("model.params")
        self.optimizer = mx.optimizer.create(config["optimizer"], **config["optimizer_params"])
        weights, others = model.get_params()
        self.store = GradientStore(kv, list(weights.values()))
        model.set_params(weights, others)
        model.init_optimizer(None, self.optimizer)
        if os.path.exists("optimizer.states"):
            model.load_optimizer_states("optimizer.states")

    def step(self, batch, rows, metrics):
        self.optimizer.rescale_grad = 1 / rows
        self.model.forward_backward(batch)
        # one device; inputs that are not parameters have no gradient
        self.store.add([each for (each,) in self.model._exec_group.grad_arrays if each is not None])
        self.model.update()
        if metrics:
            self.model.update_metric(metrics, batch.label)
        return 0.0

    def predict(self, batch, metrics):
        self.model.forward(batch, is_train=False)
        self.model.update_metric(metrics, batch.label)

    def save(self):
        self.model.save_params("model.params")
        self.model.save_optimizer_states("optimizer.states")


if __name__ == "__main__":
    main()
