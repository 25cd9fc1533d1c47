"""Search the best network for scikit-learn's digits, on Ray or in local processes.

Run it with ``python examples/orca/automl/auto_digits.py``; ``--help`` lists the options.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.automl import hp
from bigdl.orca.automl.auto_estimator import AutoEstimator


def model_creator(config):
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, config["channels"], 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(config["dropout"]),
        nn.Linear(16 * config["channels"], 10),
    )


def digits():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    return train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)


def train_loader(config):
    images, _, labels, _ = digits()
    rows = TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    return DataLoader(rows, batch_size=config["batch_size"], shuffle=True)


def test_loader(config):
    _, images, _, labels = digits()
    rows = TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    return DataLoader(rows, batch_size=256)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="ray", choices=["ray", "local"])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--logs", default="/tmp/auto_digits")
    parser.add_argument("--chart", help="file for a chart of the trials, such as trials.html")
    options = parser.parse_args(arguments)

    started = None
    if options.backend == "ray":
        started = init_orca_context(runtime="ray", cores=options.cores)
    auto_est = AutoEstimator.from_torch(
        model_creator=model_creator,
        optimizer="Adam",
        loss="CrossEntropyLoss",
        logs_dir=options.logs,
        name="auto_digits",
        backend=options.backend,
    )
    auto_est.fit(
        train_loader,
        epochs=options.epochs,
        validation_data=test_loader,
        metric="accuracy",
        n_sampling=options.trials,
        concurrency=options.cores,
        search_space={
            "lr": hp.loguniform(1e-4, 1e-1),
            "channels": hp.choice([4, 8, 16]),
            "dropout": hp.uniform(0.0, 0.5),
            "batch_size": hp.choice([32, 64]),
        },
        scheduler="AsyncHyperBand",
        scheduler_params={"reduction_factor": 3},
    )
    print(auto_est.trials().to_string())
    print("best configuration:", auto_est.get_best_config())
    _, images, _, labels = digits()
    with torch.no_grad():
        predicted = auto_est.get_best_model()(torch.from_numpy(images)).argmax(1).numpy()
    accuracy = float((predicted == labels).mean())
    print(f"accuracy of the best model: {accuracy:.4f}")
    if options.chart:
        auto_est.plot_parallel_coordinates(options.chart)
    if started is not None:
        stop_orca_context()
    return {"accuracy": accuracy, "trials": auto_est.trials()}


if __name__ == "__main__":
    main()
