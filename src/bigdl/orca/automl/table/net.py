"""Neural network as a model of a table."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.orca.automl import hp
from bigdl.orca.automl.table.columns import REGRESSION, MatrixRows
from bigdl.orca.automl.table.model import PreparedModel, softmax
from bigdl.orca.automl.table.preparation import FittedPreparation

if TYPE_CHECKING:
    from bigdl.orca.automl.table.network import TableNetwork


@dataclass
class NetModel(PreparedModel):
    """Multilayer perceptron of PyTorch, with embeddings of categories, trained by the Estimator."""

    name = "net"
    packages = ("torch",)
    extra = "automl"
    defaults = (
        {"units": 128, "layers": 2, "dropout": 0.1, "lr": 2e-3, "weight_decay": 1e-3},
        {"units": 256, "layers": 3, "dropout": 0.3, "lr": 1e-3, "weight_decay": 1e-2},
    )

    shape: dict[str, Any]
    weights: dict[str, Any]

    @classmethod
    def space(cls):
        return {
            "units": hp.choice([64, 128, 256, 512]),
            "layers": hp.randint(1, 4),
            "dropout": hp.uniform(0.0, 0.5),
            "lr": hp.loguniform(3e-4, 1e-2),
            "weight_decay": hp.loguniform(1e-5, 1e-1),
        }

    @classmethod
    def fit(cls, config, data):
        from bigdl.orca.automl.table.network import train_network

        preparation = FittedPreparation.fit(data.rows, data.settings.counts)
        shape = {
            "numbers": 2 * data.rows.numbers.shape[1],
            "categories": preparation.widths,  # in addition to missing and unknown ones
            "outputs": max(1, data.settings.classes),
            "center": float(data.y.mean()) if data.settings.task == REGRESSION else 0.0,
            "scale": float(data.y.std() or 1.0) if data.settings.task == REGRESSION else 1.0,
            **{name: config[name] for name in ("units", "layers", "dropout")},
        }
        train = _inputs(preparation, data.rows), data.y
        held_out = _inputs(preparation, data.held_out), data.held_out_y
        weights = train_network(shape, config, train, held_out, data)
        return cls(preparation, shape, weights)

    def scores(self, rows):
        from bigdl.orca.automl.table.network import outputs_of

        outputs = outputs_of(self._network, _inputs(self.preparation, rows))
        if self.shape["outputs"] > 1:
            return softmax(outputs)
        return outputs * self.shape["scale"] + self.shape["center"]

    @functools.cached_property
    def _network(self) -> TableNetwork:
        from bigdl.orca.automl.table.network import TableNetwork

        network = TableNetwork(self.shape).eval()
        network.load_state_dict(self.weights)
        return network


def _inputs(preparation: FittedPreparation, rows: MatrixRows) -> dict[str, np.ndarray]:
    """Return the inputs of the network: numbers, and codes from 1 if there are categories."""
    inputs = {"numbers": preparation.scaled_numbers(rows)}
    if rows.codes.shape[1]:
        inputs["codes"] = preparation.known_codes(rows).astype(np.int64) + 1
    return inputs if inputs["numbers"].shape[1] else {"codes": inputs["codes"]}
