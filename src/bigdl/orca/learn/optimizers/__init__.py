"""Optimizers of BigDL 2.x by name, as creators of torch optimizers.

``Estimator.from_torch(optimizer=Adam(learningrate=1e-3))``: an instance is called with the model
and gives the torch optimizer; its learning rate schedule comes with it.
"""

from bigdl.orca.learn.optimizers.optimizer import (
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Ftrl,
    Optimizer,
    ParallelAdam,
    RMSprop,
)

__all__ = [
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "Ftrl",
    "Optimizer",
    "ParallelAdam",
    "RMSprop",
]
