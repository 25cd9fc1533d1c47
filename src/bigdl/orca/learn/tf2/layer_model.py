"""The driver's own Keras model of a training by the parameter layer.

Its optimizer is there also for what callbacks set.  The model turns what the ranks' metrics have
added up to into figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.learn.layer_fit.loop import LayerModel
from bigdl.orca.learn.layer_fit.options import LayerOptions
from bigdl.orca.learn.tf2.evaluation import numbers_of
from bigdl.orca.learn.tf2.forms import zeros_of
from bigdl.orca.learn.tf2.layer_optimizer import LayerOptimizer, check_trainable
from bigdl.orca.learn.tf2.layer_replica import running_weights
from bigdl.orca.learn.tf2.opening import build_for
from bigdl.orca.learn.tf2.parts import KerasParts, fit_divisor
from bigdl.orca.learn.tf2.shared_moments import synchronized_layers
from bigdl.orca.learn.tf2.state import (
    array_of,
    dump_optimizers,
    dump_weights,
    optimizers_of,
    put_optimizers,
    put_weights,
)
from bigdl.orca.parameter_layer.plan import LayerPlan
from bigdl.training.checkpoint import Snapshot

__all__ = ["KerasLayerModel"]


class KerasLayerModel(LayerModel):
    """A Keras model and its optimizer.

    Parameters
    ----------
    parts : KerasParts
    seed : int
    snapshot : Snapshot, optional
        What to start from.

    Raises
    ------
    UsageError
        For a model that the parameter layer cannot train.

    Attributes
    ----------
    model : keras.Model
    optimizer : LayerOptimizer
    """

    def __init__(self, parts: KerasParts, seed: int, snapshot: Snapshot | None):
        self.model = parts.build_on_driver(seed, training=True)
        self._check()
        self._weights = list(self.model.trainable_weights)
        check_trainable(self._weights)
        self.optimizer = LayerOptimizer(self.model.optimizer, self._weights)
        self.sums = fit_divisor(self.model) == "none"
        self._changing = running_weights(self.model)
        if snapshot is not None:
            self.load(snapshot)
        self.start = dump_weights(self.model)
        self._initial = self._running()

    def _check(self):
        model = self.model
        if model.optimizer is None or len(optimizers_of(model)) > 1:
            raise UsageError(
                f"backend='bigdl' trains with the one optimizer of model.compile, {model.name} has "
                f"{len(optimizers_of(model)) if model.optimizer else 'none there'}; use "
                "backend='spark'"
            )
        if not model.built:
            raise UsageError(
                "backend='bigdl' needs to know the weights before it reads the rows, and the model "
                "has none until it is told the shape of its input; give it a keras.Input, or call "
                "model.build in the model creator"
            )
        for layer in synchronized_layers(model):
            raise UsageError(
                "With backend='bigdl' no worker waits for another inside a step, and "
                f"BatchNormalization(synchronized=True) does, as {layer.name} is; use "
                "backend='spark' or synchronized=False"
            )

    def build_for(self, form) -> None:
        """Make the variables of the metrics, for batches of a form that a replica described."""
        build_for(self.model, zeros_of(form))
        if self.sums and self.model.losses:
            raise UsageError(
                "A loss with reduction='sum' does not go with regularization, which every worker "
                "would add; use reduction='sum_over_batch_size'"
            )

    def plan(self, ranks: int, options: LayerOptions) -> LayerPlan:
        """The plan of a training of this model."""
        optimizer = self.optimizer
        return LayerPlan(
            tuple(int(np.prod(weight.shape)) for weight in self._weights),
            optimizer.groups,
            optimizer.sliced,
            ranks,
            options.compression,
            self.sums,
            optimizer.clamp,
            optimizer.norm,
            max_drop=options.max_drop,
            slack=0.0,
            with_norms=optimizer.with_norms,
        )

    def hyper(self) -> tuple[dict, ...]:
        """The numbers of the optimizer for the next step."""
        return self.optimizer.hyper()

    # -- figures -------------------------------------------------------------------------------

    def figures(self, added: Sequence[Sequence[float]]) -> dict:
        """The figures of metrics to whose states so much was added since they were reset."""
        model = self.model
        model.reset_metrics()
        for variable, numbers in zip(model.metrics_variables, added, strict=True):
            own = array_of(variable)
            more = np.asarray(numbers, "float64").reshape(own.shape)
            variable.assign((own.astype("float64") + more).astype(own.dtype))
        return numbers_of(model.get_metrics_result())

    # -- the state of the ranks ----------------------------------------------------------------

    def vector(self, plan: LayerPlan) -> np.ndarray:
        """The trainable weights as they are now, in the order of the flat vector."""
        return plan.geometry.flatten([array_of(weight) for weight in self._weights])

    def _shapes(self):
        return [tuple(weight.shape) for weight in self._weights]

    def _running(self):
        return [np.array(array_of(weight)) for weight in self._changing]

    def _put(self, parts, running):
        for weight, part in zip(self._weights, parts, strict=True):
            weight.assign(part.reshape(weight.shape))
        for weight, values in zip(self._changing, running, strict=True):
            weight.assign(values)

    def _optimizer_state(self):
        return self.optimizer.state()

    def _put_optimizer_state(self, state):
        self.optimizer.put_state(state)

    # -- files ---------------------------------------------------------------------------------

    def load(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint, of this or of another backend."""
        put_weights(self.model, snapshot.files["model.pt"])
        if "optimizer.pt" in snapshot.files:
            put_optimizers(self.model, snapshot.files["optimizer.pt"])

    def files(self) -> dict[str, bytes]:
        """What a checkpoint holds of the model and the optimizer: the slices of all ranks."""
        return {"model.pt": dump_weights(self.model), "optimizer.pt": dump_optimizers(self.model)}
