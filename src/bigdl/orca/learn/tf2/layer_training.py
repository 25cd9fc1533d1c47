"""The driver's side of a Keras fit by the parameter layer."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.learn.estimator import check_positive
from bigdl.orca.learn.layer_fit.training import open_transport, validate_by
from bigdl.orca.learn.progress import ProgressBar
from bigdl.orca.learn.tf2.evaluation import EvaluateProgram
from bigdl.orca.learn.tf2.layer_loop import KerasLayerLoop, check_callbacks
from bigdl.orca.learn.tf2.layer_model import KerasLayerModel
from bigdl.orca.learn.tf2.layer_replica import KerasReplicaProgram
from bigdl.orca.learn.tf2.parts import Packed
from bigdl.orca.learn.tf2.training import KerasTraining

__all__ = ["KerasLayerTraining"]


class KerasLayerTraining(KerasTraining):
    """:class:`~bigdl.orca.learn.tf2.training.KerasTraining` by the parameter layer."""

    def _train(self, open_job, program, start, policy, show_progress):
        options, settings = open_job.layer, program.settings
        parts, callbacks = program.packed.unpack()
        check_positive("batch_size", settings.batch_size)
        check_callbacks(callbacks)
        model = KerasLayerModel(parts, settings.seed, start)
        engine = open_job.engine
        ranks = engine.num_workers
        options.check(ranks)
        plan = model.plan(ranks, options)
        packed = Packed.of(parts)
        of_ranks = replace(settings, trigger=None)
        replicas = KerasReplicaProgram(
            packed, program.config, of_ranks, model.start, ranks, options.sampling
        )
        feeds = dict(open_job.feed.feeds)
        validation = feeds.pop("validation", None)
        bar = ProgressBar(show_progress)
        with contextlib.ExitStack() as opened:
            opened.callback(bar.close)
            transport = opened.enter_context(
                open_transport(options, engine, plan, replicas, FeedGroup(feeds))
            )
            validate = None
            if validation is not None:
                evaluation = EvaluateProgram(
                    Packed.of(parts, []),
                    program.config,
                    settings.validation,
                    settings.seed,
                    self._sync,
                )
                job = engine.open(evaluation, validation, keep_spools=True)
                validate = validate_by(opened.enter_context(job), policy)
            loop = KerasLayerLoop(
                model,
                plan,
                transport,
                options,
                engine.cluster,
                settings,
                callbacks,
                start,
                validate=validate,
                policy=policy,
                on_progress=bar.update,
            )
            return loop.fit()
