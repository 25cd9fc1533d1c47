"""Synchronous and asynchronous parameter server in plain Ray, on the Ray of Orca.

Run it with ``python examples/orca/ray/parameter_server.py``; ``--help`` lists the options.  Orca
starts Ray on Spark (``--runtime spark``) or alone. The remaining code is ordinary Ray: an actor
holds the weights of a softmax regression on scikit-learn's digits, and other actors compute
gradients.

synchronous
    All workers compute with the same weights, and their mean gradient makes the step.
asynchronous
    Every gradient makes a step when it arrives, and its worker continues with the newest weights.
"""

import argparse

import numpy as np
import ray
from sklearn.datasets import load_digits

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context


def digits():
    """Return pixels from 0 to 1, with a constant 1 for the bias, and labels."""
    x, y = load_digits(return_X_y=True)
    return np.hstack([x / 16, np.ones((len(x), 1))]), y


def probabilities(x, weights):
    scores = x @ weights
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def accuracy(x, y, weights):
    return float((probabilities(x, weights).argmax(1) == y).mean())


@ray.remote(num_cpus=0)
class ParameterServer:
    """Ray actor that holds the weights."""

    def __init__(self, rate):
        self._rate = rate
        self._weights = np.zeros((65, 10))

    def weights(self):
        return self._weights

    def update(self, *gradients):
        """Apply the mean of the gradients and return the new weights."""
        self._weights = self._weights - self._rate * np.mean(gradients, axis=0)
        return self._weights


@ray.remote(num_cpus=1)
class Worker:
    """Ray actor that computes gradients on batches of its rows."""

    def __init__(self, number, workers, batch_size):
        x, y = digits()
        self._x, self._y = x[number::workers], y[number::workers]
        self._random = np.random.default_rng(number)
        self._batch_size = batch_size

    def gradient(self, weights):
        rows = self._random.choice(len(self._x), self._batch_size)
        x = self._x[rows]
        errors = probabilities(x, weights) - np.eye(10)[self._y[rows]]
        return x.T @ errors / len(rows)


def train_synchronously(server, workers, steps):
    weights = server.weights.remote()
    for _ in range(steps):
        weights = server.update.remote(*(worker.gradient.remote(weights) for worker in workers))
    return ray.get(weights)


def train_asynchronously(server, workers, steps):
    weights = server.weights.remote()
    running = {worker.gradient.remote(weights): worker for worker in workers}
    for _ in range(steps * len(workers)):
        (done,), _ = ray.wait(list(running))
        worker = running.pop(done)
        running[worker.gradient.remote(server.update.remote(done))] = worker
    ray.wait(list(running), num_returns=len(running))
    return ray.get(server.weights.remote())


WAYS = {"synchronous": train_synchronously, "asynchronous": train_asynchronously}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runtime", choices=["spark", "ray"], default="ray")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.5)
    arguments = parser.parse_args(argv)

    if arguments.runtime == "ray":
        init_orca_context(runtime="ray", cores=arguments.workers)
    else:
        init_orca_context(cores=arguments.workers, init_ray_on_spark=True)
        print("Ray on Spark:", OrcaContext.get_ray_context().address_info["address"])
    x, y = digits()
    accuracies = {}
    for name, train in WAYS.items():
        server = ParameterServer.remote(arguments.rate)
        workers = [
            Worker.remote(number, arguments.workers, arguments.batch_size)
            for number in range(arguments.workers)
        ]
        accuracies[name] = accuracy(x, y, train(server, workers, arguments.steps))
        print(f"{name}: accuracy {accuracies[name]:.3f}")
        for actor in (server, *workers):
            ray.kill(actor)
    return accuracies


if __name__ == "__main__":
    main()
    stop_orca_context()
