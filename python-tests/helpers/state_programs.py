"""Programs that call the public verbs, and print what each has changed in their process.

    python state_programs.py nano

prints for each verb of the program ``nano`` a line of JSON: its name and the differences.
"""

import contextlib
import json
import logging
import signal
import site
import sys
import warnings
from pathlib import Path

import numpy as np
import program_state

# What a package that is imported for the first time sets for itself; it stays.
OF_IMPORTS = tuple(
    f"environment: {name}"
    for name in (
        "CRC32C_SW_MODE",
        "HDF5_PLUGIN_PATH",
        "KERAS_BACKEND",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "RAY_CLIENT_MODE",
        "TF2_BEHAVIOR",
        "TF_CPP_MIN_LOG_LEVEL",
        "TORCHINDUCTOR_CACHE_DIR",
        "TPU_",
    )
)


def as_a_program():
    """Set up the process as programs do, so that what is put back is not the default."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    sys.excepthook = lambda *error: sys.__excepthook__(*error)
    warnings.filterwarnings("error", "a warning of the program")
    for name in ("bigdl", "bigdl.orca", "bigdl.nano", "py4j", "pytorch_lightning", "optuna"):
        logging.getLogger(name).setLevel(logging.ERROR)
    np.random.seed(1)


@contextlib.contextmanager
def verb(name, allowed=()):
    """Print what a call changes."""
    before = program_state.snapshot()
    try:
        yield
    finally:
        after = program_state.snapshot()
        lines = program_state.differences(before, after, (*OF_IMPORTS, *allowed))
        print("STATE", json.dumps([name, lines]), flush=True)


# Ray's and setuptools' own packages, which they append to the path for themselves.
OF_IMPORTS += ("process: path: gone [], added ['" + site.getsitepackages()[0],)


def _data(rows=32):
    x = np.random.default_rng(0).random((rows, 4), "float32")
    return x, x.sum(1, keepdims=True)


def nano():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from bigdl.nano.pytorch import InferenceOptimizer, TorchNano, Trainer

    as_a_program()
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, _data())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    traced = {}
    for accelerator in ("jit", "onnxruntime", "openvino"):
        with verb(f"trace {accelerator}"):
            traced[accelerator] = InferenceOptimizer.trace(
                model, input_sample=x[:4], accelerator=accelerator, thread_num=2
            )
        with verb(f"a call of {accelerator}"), InferenceOptimizer.get_context(traced[accelerator]):
            traced[accelerator](x[:4])
        if accelerator:
            with verb(f"save and load {accelerator}"):
                InferenceOptimizer.save(traced[accelerator], f"model-{accelerator}")
                InferenceOptimizer.load(f"model-{accelerator}", model=model)
    drawn = ("random numbers: torch",)  # by an iterator of a DataLoader, as in plain torch
    for accelerator in (None, "onnxruntime", "openvino"):
        with verb(f"quantize {accelerator}", drawn):
            quantized = InferenceOptimizer.quantize(
                model, accelerator=accelerator, calib_data=loader, input_sample=x[:4]
            )
            with InferenceOptimizer.get_context(quantized):
                quantized(x[:4])
    with verb("optimize", drawn):
        optimizer = InferenceOptimizer()
        optimizer.optimize(model, training_data=loader, includes=["openvino_fp32", "jit_fp32"])
        optimizer.get_best_model()
    with verb("Trainer.fit", drawn):
        trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
        compiled = Trainer.compile(
            model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        trainer.fit(compiled, loader)
    with verb("Trainer.predict", drawn):
        trainer.predict(compiled, DataLoader(x, batch_size=8))

    class Program(TorchNano):
        def train(self):
            net = torch.nn.Linear(4, 1)
            net, optimizer, batches = self.setup(
                net, torch.optim.SGD(net.parameters(), lr=0.1), loader
            )
            for inputs, targets in batches:
                optimizer.zero_grad()
                self.backward(torch.nn.functional.mse_loss(net(inputs), targets))
                optimizer.step()

    with verb("TorchNano", drawn):
        Program().train()


def local():
    import pandas as pd
    import torch

    from bigdl.orca.automl import hp
    from bigdl.orca.automl.auto_estimator import AutoEstimator
    from bigdl.orca.learn.pytorch import Estimator

    as_a_program()
    torch.set_num_threads(1)
    x, y = _data()
    with verb("from_torch"):
        estimator = Estimator.from_torch(
            model=lambda config: torch.nn.Linear(4, 1),
            optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.MSELoss(),
            backend="local",
        )
    with verb("fit"):
        estimator.fit((x, y), epochs=1, batch_size=8, validation_data=(x, y))
    with verb("evaluate"):
        estimator.evaluate((x, y), batch_size=8)
    with verb("predict"):
        estimator.predict(x)
    frame = pd.DataFrame({"x": list(x), "y": y[:, 0]})
    for accelerate in ("openvino_fp32", "onnxruntime_fp32", "jit_fp32"):
        with verb(f"predict {accelerate}"):
            estimator.predict(frame, feature_cols=["x"], accelerate=accelerate)
    with verb("save and load"):
        estimator.save("weights.pt")
        estimator.load("weights.pt")
    of_its_import = ("loggers: optuna: handlers", "loggers: optuna: propagate")
    with verb("AutoEstimator.fit", of_its_import):
        auto = AutoEstimator.from_torch(
            model_creator=lambda config: torch.nn.Linear(4, 1),
            optimizer="SGD",
            loss="MSELoss",
            backend="local",
        )
        auto.fit(
            data=(x, y),
            validation_data=(x, y),
            epochs=1,
            metric="mse",
            metric_mode="min",
            n_sampling=1,
            search_space={"lr": hp.uniform(0.01, 0.1), "batch_size": hp.choice([8, 16])},
        )
        auto.get_best_model()


def spark():
    import pandas as pd
    import torch

    from bigdl.friesian.feature import FeatureTable
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.data.pandas import read_csv
    from bigdl.orca.learn.pytorch import Estimator

    as_a_program()
    before = program_state.snapshot()
    of_its_import = ("loggers: py4j: handlers",)
    while_it_is_there = (*of_its_import, "signals: SIGINT", "environment: SPARK_", "process: path")
    with verb("init_orca_context", while_it_is_there):
        init_orca_context("local", cores=1)
    session = OrcaContext.get_spark_session()
    x, y = _data()
    frame = pd.DataFrame({"x": [row.tolist() for row in x], "y": y[:, 0], "k": 1})
    df = session.createDataFrame(frame)
    frame[["y", "k"]].to_csv("rows.csv", index=False)
    estimator = Estimator.from_torch(
        model=lambda config: torch.nn.Linear(4, 1),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
    )
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    with verb("fit"):
        estimator.fit(df, epochs=1, batch_size=8, **columns)
    with verb("evaluate"):
        estimator.evaluate(df, batch_size=8, **columns)
    with verb("predict"):
        estimator.predict(df, feature_cols=["x"]).collect()
    with verb("predict openvino_fp32"):
        estimator.predict(df, feature_cols=["x"], accelerate="openvino_fp32").collect()
    with verb("XShards"):
        shards = read_csv("rows.csv").transform_shard(lambda each: each * 2)
        shards.collect()
        len(shards)
    with verb("FeatureTable"):
        table = FeatureTable(df)
        table.category_encode(columns=["k"])[0].compute()
        table.min_max_scale(columns=["y"])[0].show()
    with verb("stop_orca_context", while_it_is_there):
        stop_orca_context()
    lines = program_state.differences(
        before, program_state.snapshot(), (*OF_IMPORTS, *of_its_import)
    )
    print("STATE", json.dumps(["init to stop", lines]))


def ray():
    import torch

    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    as_a_program()
    before = program_state.snapshot()
    while_it_is_there = ("environment: RAY_", "environment: PYTHONBREAKPOINT")
    with verb("init_orca_context", while_it_is_there):
        init_orca_context(runtime="ray", cores=1)
    x, y = _data()
    with verb("fit"):
        Estimator.from_torch(
            model=lambda config: torch.nn.Linear(4, 1),
            optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.MSELoss(),
            backend="ray",
        ).fit((x, y), epochs=1, batch_size=8)
    with verb("stop_orca_context", while_it_is_there):
        stop_orca_context()
    lines = program_state.differences(before, program_state.snapshot(), OF_IMPORTS)
    print("STATE", json.dumps(["init to stop", lines]))


def keras():
    import keras

    from bigdl.nano.tf.keras import InferenceOptimizer
    from bigdl.orca.learn.tf2 import Estimator

    as_a_program()
    x, y = _data()

    def creator(config):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
        return model

    with verb("from_keras"):
        estimator = Estimator.from_keras(model_creator=creator, backend="local")
    with verb("fit"):
        estimator.fit((x, y), epochs=1, batch_size=8)
    with verb("predict"):
        estimator.predict(x)
    model = creator({})
    for accelerator in ("openvino", "onnxruntime"):
        with verb(f"trace {accelerator}"):
            InferenceOptimizer.trace(model, accelerator=accelerator)
        with verb(f"quantize {accelerator}"):
            InferenceOptimizer.quantize(model, accelerator=accelerator, x=x, y=y)

    from bigdl.nano.tf.keras import Sequential

    with verb("Nano's model", ("random numbers: random",)):  # seeds, as in plain Keras
        model = Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
        model.fit(x, y, epochs=1, verbose=0)


def servers():
    import torch

    from bigdl.nano.pytorch import InferenceOptimizer
    from bigdl.nano.serving import Client, ModelServer

    as_a_program()
    x = torch.from_numpy(_data()[0])
    model = torch.nn.Linear(4, 1)
    traced = InferenceOptimizer.trace(model, input_sample=x[:4], accelerator="onnxruntime")
    folder = Path("models/linear/1")
    folder.mkdir(parents=True)
    InferenceOptimizer.save(traced, folder)
    with (
        verb("ModelServer"),
        ModelServer("models", http_port=0, grpc_port=0) as server,
        Client(f"http://127.0.0.1:{server.http_port}") as client,
    ):
        client.infer("linear", x[:4].numpy())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
