"""The driver's side of a PyTorch fit by the parameter layer."""

from __future__ import annotations

from dataclasses import replace

from bigdl.orca.learn.layer_fit.training import LayerTraining
from bigdl.orca.learn.pytorch.evaluation import EvaluateProgram, EvaluationSettings
from bigdl.orca.learn.pytorch.layer_loop import TorchLayerLoop, check_callbacks
from bigdl.orca.learn.pytorch.layer_model import TorchLayerModel
from bigdl.orca.learn.pytorch.layer_replica import TorchReplicaProgram
from bigdl.orca.learn.pytorch.training import TorchTraining

__all__ = ["TorchLayerTraining"]


class TorchLayerTraining(LayerTraining, TorchTraining):
    """:class:`~bigdl.orca.learn.pytorch.training.TorchTraining` by the parameter layer."""

    def _unpacked(self, program):
        settings = program.settings
        check_callbacks(settings.callbacks, settings.accumulate)
        return program.parts, settings.callbacks

    def _model(self, parts, settings, start):
        return TorchLayerModel(parts, settings, start)

    def _replicas(self, program, parts, model, ranks, sampling):
        settings = replace(program.settings, callbacks=(), metrics=(), trigger=None)
        return TorchReplicaProgram(parts, settings, model.start, ranks, sampling)

    def _evaluation(self, program, parts, feed):
        settings = program.settings
        evaluation = EvaluationSettings(
            settings.batch_size,
            settings.metrics,
            per_worker=settings.per_worker,
            precision=settings.precision,
            weighted=settings.weighted,
        )
        return EvaluateProgram(
            replace(parts, optimizer=None, scheduler_creator=None),
            evaluation,
            feed.feature_cols,
            feed.label_cols,
            (),
            self._sync,
        )

    def _loop(self, run, parts, callbacks):
        return TorchLayerLoop(run, parts.config)
