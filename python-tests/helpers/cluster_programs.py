"""Programs of users that run on every cluster, with ARGUMENTS of init_orca_context."""

# Of BACKEND: the weights of FIT, and how many rows are predicted.
OTHER_BACKEND = """
    import json
    import torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    init_orca_context(**ARGUMENTS)
    rows = OrcaContext.get_spark_session().range(64, numPartitions=2).selectExpr(
        "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
        "array(float(sin(id) + 2 * cos(id))) AS y",
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    estimator = Estimator.from_torch(
        model=model if BACKEND == "bigdl" else lambda config: model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1)
        if BACKEND == "bigdl"
        else lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
        loss=torch.nn.MSELoss(),
        backend=BACKEND,
    )
    estimator.fit(rows, epochs=3, batch_size=64, feature_cols=["x"], label_cols=["y"])
    predicted = estimator.predict(rows, feature_cols=["x"]).count()
    weight, bias = estimator.get_model().parameters()
    stop_orca_context()
    weights = [*weight.detach().reshape(-1).tolist(), bias.item()]
    print(json.dumps({"weights": weights, "predicted": predicted}))
"""


# Tasks of Ray on the nodes of Spark.
ON_RAY = """
    import json, os
    import ray
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

    init_orca_context(**ARGUMENTS)
    OrcaContext.get_ray_context()

    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    def place():
        return os.getcwd(), ray.get_runtime_context().get_node_id()

    nodes = [node for node in ray.nodes() if node["Resources"].get("CPU")]
    places = ray.get([place.remote() for _ in range(8)])
    stop_orca_context()
    addresses = [node["NodeManagerAddress"] for node in nodes]
    print(json.dumps({"addresses": addresses, "nodes": sorted({node for _, node in places})}))
"""


# A search whose best rate is 0.1.
SEARCH = """
    import json
    import numpy as np, torch
    from torch.utils.data import DataLoader, TensorDataset
    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.automl import hp
    from bigdl.orca.automl.auto_estimator import AutoEstimator

    def loader(config):
        x = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 3)).astype("float32"))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)

    if __name__ == "__main__":
        init_orca_context(**ARGUMENTS)
        search = AutoEstimator.from_torch(
            model_creator=lambda config: torch.nn.Linear(3, 1),
            optimizer="SGD", loss="MSELoss", logs_dir="logs", name="search",
        )
        search.fit(
            loader, epochs=2, validation_data=loader, metric="mse", metric_mode="min",
            n_sampling=4, search_space={"lr": hp.choice([1e-4, 1e-1])},
        )
        best = search.get_best_config()
        stop_orca_context()
        print(json.dumps(best))
"""


# Neural collaborative filtering by the program in the folder EXAMPLES, with DATA and OUTPUT.
MOVIELENS = """
    import json, sys
    sys.path.insert(0, EXAMPLES)
    import neumf
    import train_dataframe
    from bigdl.orca import init_orca_context, stop_orca_context

    neumf.start = lambda options: init_orca_context(**ARGUMENTS)
    report = train_dataframe.main([
        "--data-dir", DATA, "--users", "100", "--epochs", "2",
        "--workers_per_node", "1", "--output", OUTPUT, "--fused",
    ])
    stop_orca_context()
    print(json.dumps({name: float(value) for name, value in report.items()}))
"""


# The published quickstart of BigDL 2.x, with MODEL_DIR and data made here.
FASHION = """
    import argparse, json, os
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.optim as optim
    from torch.utils.data import DataLoader, TensorDataset
    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.learn.metrics import Accuracy
    from bigdl.orca.learn.pytorch import Estimator

    def images(seed, size):
        labels = np.random.default_rng(seed).integers(0, 10, size)
        pixels = np.zeros((size, 1, 28, 28), np.float32)
        for row, label in enumerate(labels):
            pixels[row, 0, 2 * label : 2 * label + 4] = 1
        return TensorDataset(torch.from_numpy(pixels), torch.from_numpy(labels))

    def train_data_creator(config, batch_size):
        return DataLoader(images(0, 640), batch_size=batch_size, shuffle=True, num_workers=0)

    def validation_data_creator(config, batch_size):
        return DataLoader(images(1, 160), batch_size=batch_size, num_workers=0)

    def model_creator(config):
        return nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten(), nn.Linear(864, 10)
        )

    def optimizer_creator(model, config):
        return optim.SGD(model.parameters(), lr=config.get("lr", 0.05), momentum=0.9)

    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster_mode", default="yarn-client")
    options = parser.parse_args()
    if options.cluster_mode == "bigdl-submit":
        init_orca_context(cluster_mode="bigdl-submit")
    else:
        init_orca_context(**{**ARGUMENTS, "cluster_mode": options.cluster_mode})
    orca_est = Estimator.from_torch(
        model=model_creator, optimizer=optimizer_creator, loss=nn.CrossEntropyLoss(),
        metrics=[Accuracy()], model_dir=MODEL_DIR, backend="spark",
        config={"lr": 0.05}, use_tqdm=True, workers_per_node=1,
    )
    orca_est.fit(data=train_data_creator, epochs=3, batch_size=32,
                 validation_data=validation_data_creator)
    result = orca_est.evaluate(data=validation_data_creator, batch_size=32)
    stop_orca_context()
    print(json.dumps({name: float(value) for name, value in result.items()}))
"""


# Workers that take 3 GB: ONCE, as long as PLACE is not there, or in every attempt.
TOO_MUCH = """
    import json, time
    from pathlib import Path
    import numpy as np, torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    def model(config):
        place = Path(PLACE)
        if not place.exists():
            if ONCE:
                place.touch()
            kept = np.ones((3 << 30) // 8)
            for _ in range(60):  # YARN looks every few seconds
                kept += 1  # or the system may take back what nobody uses
                time.sleep(1)
            raise AssertionError(f"{kept.nbytes} bytes, and nobody minds")
        return torch.nn.Linear(3, 1)

    sc = init_orca_context(**ARGUMENTS)
    rows = OrcaContext.get_spark_session().range(96, numPartitions=2).selectExpr(
        "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
        "float(sin(id) + 2 * cos(id)) AS y",
    )
    estimator = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), 0.05),
        loss=torch.nn.MSELoss(),
    )
    history = estimator.fit(
        rows, epochs=2, batch_size=32, feature_cols=["x"], label_cols=["y"], seed=7
    )
    stop_orca_context()
    print(json.dumps({"epochs": len(history)}))
"""
