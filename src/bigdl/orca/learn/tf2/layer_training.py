"""The driver's side of a Keras fit by the parameter layer."""

from __future__ import annotations

from dataclasses import replace

from bigdl.common.checks import check_positive
from bigdl.orca.learn.layer_fit.loop import LayerTraining
from bigdl.orca.learn.tf2.evaluation import EvaluateProgram
from bigdl.orca.learn.tf2.layer_loop import KerasLayerLoop, check_callbacks
from bigdl.orca.learn.tf2.layer_model import KerasLayerModel
from bigdl.orca.learn.tf2.layer_replica import KerasReplicaProgram
from bigdl.orca.learn.tf2.parts import Packed
from bigdl.orca.learn.tf2.training import KerasTraining

__all__ = ["KerasLayerTraining"]


class KerasLayerTraining(LayerTraining, KerasTraining):
    """:class:`~bigdl.orca.learn.tf2.training.KerasTraining` by the parameter layer."""

    def _unpacked(self, program):
        parts, callbacks = program.packed.unpack()
        check_positive("batch_size", program.settings.batch_size)
        check_callbacks(callbacks)
        return parts, callbacks

    def _model(self, parts, settings, start):
        return KerasLayerModel(parts, settings.seed, start)

    def _replicas(self, program, parts, model, ranks, sampling):
        settings = replace(program.settings, trigger=None)
        packed = Packed.of(parts)
        return KerasReplicaProgram(packed, program.config, settings, model.start, ranks, sampling)

    def _evaluation(self, program, parts, feed):
        settings = program.settings
        return EvaluateProgram(
            Packed.of(parts, []),
            program.config,
            settings.validation,
            settings.seed,
            self._sync,
        )

    def _loop(self, run, parts, callbacks):
        return KerasLayerLoop(run, callbacks)
