"""The driver's loop of a training by the parameter layer: groups of steps, epochs, checkpoints."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from bigdl.common.errors import WorkerLost
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.learn.checkpoint import CheckpointDirectory, Snapshot
from bigdl.orca.learn.failure import FailurePolicy
from bigdl.orca.learn.position import Position
from bigdl.orca.learn.pytorch.batches import planned
from bigdl.orca.learn.pytorch.figures import score_of, validation_names
from bigdl.orca.learn.pytorch.fit_settings import FitSettings
from bigdl.orca.learn.pytorch.group_phases import GroupPhases
from bigdl.orca.learn.pytorch.layer_figures import LayerFigures
from bigdl.orca.learn.pytorch.layer_model import LayerModel
from bigdl.orca.learn.pytorch.layer_options import LayerOptions
from bigdl.orca.learn.pytorch.runner import Runner
from bigdl.orca.learn.pytorch.state import dumps, loads
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.orca.learn.pytorch.sums import EpochSums
from bigdl.orca.learn.trigger import TriggerState
from bigdl.orca.sync.parameter_layer.plan import LayerPlan, Step
from bigdl.orca.sync.parameter_layer.stragglers import StragglerLimit
from bigdl.orca.sync.parameter_layer.transport import Transport

__all__ = ["LayerLoop"]

logger = logging.getLogger("bigdl.orca")


class LayerLoop(Runner):
    """A fit by the parameter layer; what callbacks see as their runner.

    Parameters
    ----------
    model : LayerModel
    plan : LayerPlan
    transport : Transport
    options : LayerOptions
    cluster : SparkCluster
    settings : FitSettings
    config : dict
    start : Snapshot, optional
    validate : callable, optional
        ``validate(weights)`` gives what an evaluation of these weights found.
    policy : FailurePolicy
    on_progress : callable
    """

    def __init__(
        self,
        model: LayerModel,
        plan: LayerPlan,
        transport: Transport,
        options: LayerOptions,
        cluster: SparkCluster,
        settings: FitSettings,
        config: dict,
        start: Snapshot | None,
        *,
        validate: Callable[[bytes], dict] | None,
        policy: FailurePolicy,
        on_progress: Callable[[dict], None],
    ):
        place = SimpleNamespace(rank=0, world_size=plan.ranks)
        super().__init__(place, config, settings.callbacks)
        self._layer, self._layer_plan, self._transport = model, plan, transport
        self._options, self._cluster = options, cluster
        self.settings, self._validate = settings, validate
        self._policy, self._on_progress = policy, on_progress
        built = model.built
        self.model, self.optimizer = built.model, built.optimizer
        self.criterion, self.scheduler = built.criterion, built.scheduler
        self.device = next(self.model.parameters()).device
        self._directory = None
        if settings.run_url is not None:
            self._directory = CheckpointDirectory(settings.run_url, settings.keep)
        self._summary = StepSummary() if settings.summary else None
        self._phases = GroupPhases() if settings.summary else None
        self._limit = StragglerLimit(options.stragglers)
        self._figures = self._no_figures()
        self._insist(self._open_rows)
        self._is_current = True  # whether the driver's model is that of the ranks
        self._latest = self._insist(lambda: self._begin(start))
        self.first_epoch = settings.goal.first
        self.num_epochs = settings.goal.last_epoch(self.position, self._plan.steps)

    # -- the fit -------------------------------------------------------------------------------

    def fit(self) -> Snapshot:
        """Train to the end; returns the final state."""
        self.call("before_run")
        if self.position.partial:  # an earlier fit ended inside this epoch
            self._close_epoch(self.position.partial)
        while True:
            try:
                while not self._is_over():
                    self._epoch()
                states = None if self._is_saved() else self._pull()
                break
            except WorkerLost as error:
                self._go_back(error)
        self.call("after_run")
        if not self.settings.goal.is_reached(self.position):
            self.position.ends[self.settings.goal.key] = self.position.counted
        if states is not None:
            self._save(states)
        return self._latest

    def _is_saved(self) -> bool:
        """Whether the newest snapshot is what the fit ends with."""
        known = self._latest.manifest
        is_newest = known == {**known, **self.position.to_json()}
        return is_newest and self.settings.goal.is_reached(self.position)

    def _epoch(self):
        position = self.position
        self.call("before_train_epoch")
        while position.step < self._plan.steps and not self._is_over():
            if self._group() and position.step < self._plan.steps:
                self._save(self._pull())
        is_whole = position.step == self._plan.steps
        entry = self._figures.entry()
        if entry is None:  # it was stopped before the first step
            return
        entry = {"epoch": position.epoch + 1, "global_step": position.global_step, **entry}
        if self._options.stragglers is not None:
            entry |= self._figures.dropped
        if self._validate is not None:
            self._run_validation(entry)
        self.epoch_stats, self.epoch_is_whole = entry, is_whole
        if self.callbacks:
            self._pull()
        self.call("after_train_epoch")
        if not is_whole:
            position.partial = entry
            return
        self._close_epoch(entry)
        if self.settings.trigger is not None and self.settings.trigger(
            TriggerState(
                epoch=position.epoch,
                step=position.global_step,
                epoch_finished=True,
                loss=entry["train_loss"],
                score=score_of(entry),
            )
        ):
            self._save(self._pull())

    def _run_validation(self, entry):
        self.call("before_val_epoch")
        self._pull()
        found = self._validate(dumps(self.model.state_dict()))
        figures = validation_names(found["figures"])
        entry.update(figures)
        entry["profile"].update(found["profile"])
        for own, those in zip(entry["workers"], found.get("workers", ()), strict=False):
            own.update(validation_names(those))
        self.epoch_stats, self.metrics_stats = entry, figures
        self.call("after_val_epoch")

    def _close_epoch(self, entry):
        position = self.position
        position.history.append(entry)
        position.partial = None
        position.epoch += 1
        position.step = 0
        self._figures = self._no_figures()
        self._layer.built.step_scheduler_after_epoch(self, entry)

    def _is_over(self) -> bool:
        return self.settings.goal.is_reached(self.position) or self.stop

    # -- groups --------------------------------------------------------------------------------

    def _group(self) -> bool:
        """A group of steps; returns whether a checkpoint is due after it."""
        if self._options.min_workers is not None:
            self._fit_slices_to_slots()
        steps, is_due = self._next_steps()
        started = time.perf_counter()
        self._is_current = False
        records = self._run(steps)
        seconds = time.perf_counter() - started
        self._figures.add(records, seconds)
        for sources in (record["sources"] for record in records[0]):
            self._limit.add(sources)
        if self._summary is not None:
            self._summarize(steps, seconds)
        position = self.position
        self._on_progress(
            {
                "epoch": position.epoch - self.settings.goal.first,
                "epochs": self.num_epochs - self.settings.goal.first,
                "step": position.step,
                "steps": self._plan.steps,
                "loss": self._figures.mean(),
            }
        )
        return is_due

    def _run(self, steps: list[Step]) -> list[list[dict]]:
        """Run steps until all of them are made; returns their records.

        A step that was discarded is made again, with those after it, and waits for everybody then:
        so no step is discarded twice.
        """
        found: list[list[dict]] = [[] for _ in range(self._layer_plan.owners)]
        while steps:
            records = self._asked(
                functools.partial(self._transport.run, steps),
                f"the group of {len(steps)} steps is run again",
            )
            made = sum(not record["is_void"] for record in records[0])
            for all_of_owner, own in zip(found, records, strict=True):
                all_of_owner += own[:made]
            steps = steps[made:]
            if steps:
                logger.info("Step %d is discarded: too many were late", steps[0].number)
                self._figures.dropped["discarded_steps"] += 1
                steps = [replace(steps[0], limit=None), *steps[1:]]
        return found

    def _asked(self, call, consequence: str):
        """Call the transport; again if a worker is lost meanwhile and that has changed nothing."""
        while True:
            try:
                return call()
            except WorkerLost as error:
                if not self._transport.keeps_state:
                    raise
                self._policy.forgive(error)
                logger.warning("%s; %s", error, consequence)

    def _fit_slices_to_slots(self) -> None:
        """Cut the weights in as many slices as tasks can run at once."""
        plan, fewest = self._layer_plan, self._options.min_workers
        slices = min(plan.ranks, max(fewest, self._cluster.slots()))
        if slices == plan.owners:
            return
        logger.info("The weights are cut in %d slices instead of %d", slices, plan.owners)
        self._pull()
        self._layer_plan = replace(plan, slices=slices)
        self._transport.recut(self._layer.states(self._layer_plan))

    def _next_steps(self) -> tuple[list[Step], bool]:
        """The steps up to the end of the group, the epoch or the fit, or up to a checkpoint.

        Position and schedule move along, so every step has the hyper-parameters that it would have
        in a group of its own.
        """
        position, built, ranks = self.position, self._layer.built, self.size
        steps: list[Step] = []
        while len(steps) < self._options.group_size:
            ranges = [self._plan.batch(position.step, rank)[:2] for rank in range(ranks)]
            hyper, limit = self._layer.hyper(), self._limit.seconds
            steps.append(Step(position.epoch, position.step, hyper, tuple(ranges), limit))
            position.step += 1
            position.global_step += 1
            self._layer.pass_step()
            built.step_scheduler_after_update(self)
            if position.step == self._plan.steps:
                break
            trigger = self.settings.trigger
            if trigger is not None and trigger(TriggerState(position.epoch, position.global_step)):
                return steps, True
            if self.settings.goal.is_reached(position):
                break
        return steps, False

    def _summarize(self, steps, seconds):
        first = self.position.global_step - len(steps) + 1
        pairs = zip(steps, self._figures.rows, strict=True)
        for number, (step, (loss, counted, rows)) in enumerate(pairs, first):
            mean = loss / counted if counted else float("nan")
            throughput = rows * len(steps) / seconds
            rate = float(step.hyper[0]["lr"])
            self._summary.rows.append([float(number), mean, rate, throughput, time.time()])
        self._phases.add(self.position.global_step, self._figures.phases)

    # -- rows ----------------------------------------------------------------------------------

    def _open_rows(self):
        known = self._transport.rows()
        self._plan, self._batches = planned(self.settings, known)
        self._inputs = next((each["inputs"] for each in known if each["inputs"]), None)

    def _no_figures(self):
        weighted, sums = self.settings.weighted, self._layer.sums
        return LayerFigures(self._layer_plan.ranks, weighted=weighted, sums=sums)

    # -- states --------------------------------------------------------------------------------

    def _begin(self, snapshot: Snapshot | None) -> Snapshot:
        """Put the ranks where a snapshot is; the driver's model is there already."""
        manifest = {} if snapshot is None else snapshot.manifest
        self.position = Position.of(manifest)
        self._figures = self._no_figures()
        if self.position.step and not self.position.partial:
            self._batches.check(manifest, 0)
            self._figures.of_ranks = [EpochSums(**values) for values in manifest["sums"]]
            self._figures.dropped.update(manifest.get("dropped", {}))
        files = {} if snapshot is None else snapshot.files
        for kept, name in ((self._summary, "summary.pt"), (self._phases, "phases.pt")):
            if kept is not None and name in files:
                kept.put(loads(files[name]))
        states = self._layer.states(self._layer_plan, self._layer.residuals(snapshot))
        self._transport.start(states)
        self._is_current = True
        return self._snapshot(states) if snapshot is None else snapshot

    def _pull(self) -> list:
        """Bring the state of the ranks to the driver's model."""
        states = self._asked(self._transport.states, "the state is asked for again")
        if not self._is_current:
            self._layer.take(states, self._layer_plan)
            self._is_current = True
        return states

    def _save(self, states):
        self._latest = self._snapshot(states)
        if self._directory is not None:
            self._directory.write(self._latest)

    def _snapshot(self, states) -> Snapshot:
        position = self.position
        manifest = {**position.to_json(), **vars(self._batches), "inputs": self._inputs}
        if position.step:
            manifest["sums"] = [own.to_json() for own in self._figures.of_ranks]
            manifest["rows_since_merge"] = [0] * self.size
            manifest["dropped"] = dict(self._figures.dropped)
        files = self._layer.files(states)
        if self._summary is not None:
            files["summary.pt"] = dumps(self._summary.take())
            files["phases.pt"] = dumps(self._phases.take())
        return Snapshot(manifest, files)

    def _go_back(self, error: WorkerLost) -> None:
        """Start again from the newest state that is known."""
        self._policy.forgive(error)
        logger.warning("%s; going on from %s", error, self._latest.position)
        self.stop = False  # a callback that wanted to stop is asked again

        def begin():
            self._layer.load(self._latest)
            self._begin(self._latest)

        self._insist(begin)

    def _insist(self, function):
        """Call until no worker is lost meanwhile, as often as the policy allows."""
        while True:
            try:
                return function()
            except WorkerLost as error:
                self._policy.forgive(error)
                logger.warning("%s; trying again", error)
