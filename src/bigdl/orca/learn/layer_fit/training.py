"""The driver's side of a fit by the parameter layer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from bigdl.common.errors import UsageError, WorkerLost
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.engine.causes import NoRows
from bigdl.orca.learn.layer_fit.options import LayerOptions, check_callbacks
from bigdl.orca.learn.progress import ProgressBar
from bigdl.orca.learn.pytorch.evaluation import EvaluateProgram, EvaluationSettings
from bigdl.orca.learn.pytorch.layer_loop import LayerLoop
from bigdl.orca.learn.pytorch.layer_model import LayerModel
from bigdl.orca.learn.pytorch.layer_replica import ReplicaProgram
from bigdl.orca.learn.training import Training

__all__ = ["LayerTraining", "Opening", "open_transport", "validate_by"]


@dataclass
class Opening:
    """How the jobs of a fit are opened.

    Attributes
    ----------
    engine : Engine
    feed : FeedGroup
        ``data`` and perhaps ``validation``.
    layer : LayerOptions, optional
    """

    engine: Any
    feed: FeedGroup
    layer: LayerOptions | None = None

    def __call__(self, program):
        return self.engine.open(program, self.feed)


class LayerTraining(Training):
    """:class:`~bigdl.orca.learn.training.Training` by the parameter layer."""

    def _train(self, open_job, program, start, policy, show_progress):
        options, settings, parts = open_job.layer, program.settings, program.parts
        check_callbacks(settings.callbacks, settings.accumulate)
        model = LayerModel(parts, settings, start)
        engine = open_job.engine
        ranks = engine.num_workers
        options.check(ranks)
        plan = model.plan(ranks, options, settings.clipping)
        of_ranks = replace(settings, callbacks=(), metrics=(), trigger=None)
        replicas = ReplicaProgram(parts, of_ranks, model.start, ranks, options.sampling)
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
                job = opened.enter_context(_validation_job(engine, parts, settings, validation))
                validate = validate_by(job, policy)
            loop = LayerLoop(
                model,
                plan,
                transport,
                options,
                engine.cluster,
                settings,
                parts.config,
                start,
                validate=validate,
                policy=policy,
                on_progress=bar.update,
            )
            return loop.fit()


def open_transport(options: LayerOptions, engine, plan, program, feed: FeedGroup):
    """The transport that was chosen.

    Parameters
    ----------
    options : LayerOptions
    engine : Engine
    plan : LayerPlan
    program : callable
        ``program(rank, shards)`` makes a replica.
    feed : FeedGroup
        Of one feed.
    """
    if options.transport == "barrier":
        from bigdl.orca.sync.parameter_layer.barrier import BarrierTransport

        return BarrierTransport(engine, plan, program, feed)
    from bigdl.orca.sync.parameter_layer.shuffle import ShuffleTransport

    cluster = engine.cluster
    per_node = -(-plan.ranks // max(cluster.nodes, 1))
    threads = max(1, cluster.cores_per_node // per_node)
    return ShuffleTransport(cluster, plan, program, feed, threads=threads)


def _validation_job(engine, parts, settings, feed):
    """A job that evaluates weights on the validation data, again and again."""
    from bigdl.orca.sync.torch_distributed import TorchDistributedSync

    evaluation = EvaluationSettings(
        settings.batch_size,
        settings.metrics,
        per_worker=settings.per_worker,
        precision=settings.precision,
        weighted=settings.weighted,
    )
    program = EvaluateProgram(
        replace(parts, optimizer=None, scheduler_creator=None),
        evaluation,
        feed.feature_cols,
        feed.label_cols,
        (),
        TorchDistributedSync,
    )
    return engine.open(program, feed, keep_spools=True)


def validate_by(job, policy):
    """A function of weights that evaluates them by a job, as often as the policy allows."""

    def validate(weights):
        while True:
            try:
                return job.attempt(state=weights)[0]
            except NoRows:
                raise UsageError("The validation data has no rows") from None
            except WorkerLost as error:
                policy.forgive(error)

    return validate
