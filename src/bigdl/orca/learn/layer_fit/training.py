"""The driver's side of a fit by the parameter layer."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.learn.layer_fit.groups import LayerGroups, LayerRun
from bigdl.orca.learn.layer_fit.model import LayerModel
from bigdl.orca.learn.layer_fit.options import LayerOptions
from bigdl.runtime.jobs import NoRows
from bigdl.training.evaluation import evaluated
from bigdl.training.progress import ProgressBar
from bigdl.training.run_settings import RunSettings
from bigdl.training.training import Training

__all__ = ["LayerTraining", "Opening"]


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
    """:class:`~bigdl.training.training.Training` by the parameter layer.

    The program of a fit does not run; a framework says what takes its place.
    """

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def _unpacked(self, program: Any) -> tuple[Any, Sequence[Any]]:
        """The parts of a program's model and its callbacks, if the parameter layer takes them."""

    @abstractmethod
    def _model(self, parts: Any, settings: RunSettings, start) -> LayerModel:
        """The driver's own model."""

    @abstractmethod
    def _replicas(self, program: Any, parts: Any, model: LayerModel, ranks: int, sampling: str):
        """``replicas(rank, shards)`` makes a replica in a rank."""

    @abstractmethod
    def _evaluation(self, program: Any, parts: Any, feed):
        """The program that evaluates weights on the validation data."""

    @abstractmethod
    def _loop(self, run: LayerRun, parts: Any, callbacks: Sequence[Any]) -> LayerGroups:
        """The loop of epochs; its method ``fit`` gives the final state."""

    # ------------------------------------------------------------------------------------------

    def _train(self, open_job, program, start, policy, show_progress):
        options, settings, engine = open_job.layer, program.settings, open_job.engine
        parts, callbacks = self._unpacked(program)
        model = self._model(parts, settings, start)
        ranks = engine.num_workers
        options.check(ranks)
        plan = model.plan(ranks, options)
        replicas = self._replicas(program, parts, model, ranks, options.sampling)
        feeds = dict(open_job.feed.feeds)
        validation = feeds.pop("validation", None)
        bar = ProgressBar(show_progress)
        with contextlib.ExitStack() as opened:
            opened.callback(bar.close)
            transport = opened.enter_context(
                _open_transport(options, engine, plan, replicas, FeedGroup(feeds))
            )
            validate = None
            if validation is not None:
                evaluation = self._evaluation(program, parts, validation)
                job = opened.enter_context(engine.open(evaluation, validation, keep_spools=True))
                validate = _validate_by(job, policy)
            run = LayerRun(
                model,
                plan,
                transport,
                options,
                engine.cluster,
                settings,
                start,
                policy,
                bar.update,
                validate,
            )
            return self._loop(run, parts, callbacks).fit()


def _open_transport(options: LayerOptions, engine, plan, program, feed: FeedGroup):
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
        from bigdl.orca.parameter_layer.barrier import BarrierTransport

        return BarrierTransport(engine, plan, program, feed)
    from bigdl.orca.parameter_layer.shuffle import ShuffleTransport

    cluster = engine.cluster
    per_node = -(-plan.ranks // max(cluster.nodes, 1))
    threads = max(1, cluster.cores_per_node // per_node)
    return ShuffleTransport(cluster, plan, program, feed, threads=threads)


def _validate_by(job, policy):
    """A function of weights that evaluates them by a job, as often as the policy allows."""

    def validate(weights):
        try:
            return evaluated(job, weights, policy)
        except NoRows:
            raise UsageError("The validation data has no rows") from None

    return validate
