"""The driver's loop of a training by the parameter layer: groups of steps, epochs, checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace

from bigdl.common.errors import UsageError, WorkerLost
from bigdl.orca.data.feeds.batches import BatchPlan
from bigdl.orca.learn.checkpoint import CheckpointDirectory, Snapshot
from bigdl.orca.learn.failure import FailurePolicy
from bigdl.orca.learn.position import Position
from bigdl.orca.learn.pytorch.figures import score_of, validation_names
from bigdl.orca.learn.pytorch.fit_settings import FitSettings
from bigdl.orca.learn.pytorch.keeper import Batches
from bigdl.orca.learn.pytorch.layer_figures import LayerFigures
from bigdl.orca.learn.pytorch.layer_model import LayerModel
from bigdl.orca.learn.pytorch.layer_options import LayerOptions
from bigdl.orca.learn.pytorch.runner import Runner
from bigdl.orca.learn.pytorch.state import dumps, loads
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.orca.learn.pytorch.sums import EpochSums
from bigdl.orca.learn.trigger import TriggerState
from bigdl.orca.sync.parameter_layer.rank import LayerPlan, Step
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
        self._options, self.settings, self._validate = options, settings, validate
        self._policy, self._on_progress = policy, on_progress
        built = model.built
        self.model, self.optimizer = built.model, built.optimizer
        self.criterion, self.scheduler = built.criterion, built.scheduler
        self.device = next(self.model.parameters()).device
        self._directory = None
        if settings.run_url is not None:
            self._directory = CheckpointDirectory(settings.run_url, settings.keep)
        self._summary = StepSummary() if settings.summary else None
        self._figures = self._no_figures()
        self._open_rows()
        self._is_current = True  # whether the driver's model is that of the ranks
        self._latest = self._begin(start)
        self.first_epoch, self.num_epochs = settings.goal.first, self._last_epoch()

    # -- the fit -------------------------------------------------------------------------------

    def fit(self) -> Snapshot:
        """Train to the end; returns the final state."""
        self.call("before_run")
        if self.position.partial:  # an earlier fit ended inside this epoch
            self._close_epoch(self.position.partial)
        while not self._is_over():
            try:
                self._epoch()
            except WorkerLost as error:
                self._go_back(error)
        self.call("after_run")
        if not self.settings.goal.is_reached(self.position):
            self.position.ends[self.settings.goal.key] = self.position.counted
        if self._latest.manifest != {**self._latest.manifest, **self.position.to_json()}:
            self._save()
        return self._latest

    def _epoch(self):
        position = self.position
        self.call("before_train_epoch")
        while position.step < self._plan.steps and not self._is_over():
            if self._group() and position.step < self._plan.steps:
                self._save()
        is_whole = position.step == self._plan.steps
        entry = self._figures.entry()
        if entry is None:  # it was stopped before the first step
            return
        entry = {"epoch": position.epoch + 1, "global_step": position.global_step, **entry}
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
            self._save()

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
        steps, is_due = self._next_steps()
        started = time.perf_counter()
        self._is_current = False
        while True:
            try:
                records = self._transport.run(steps)
                break
            except WorkerLost as error:
                if not self._transport.keeps_state:
                    raise
                self._forgive(error)
                logger.warning("%s; the group of %d steps is run again", error, len(steps))
        seconds = time.perf_counter() - started
        self._figures.add(records, seconds)
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

    def _next_steps(self) -> tuple[list[Step], bool]:
        """The steps up to the end of the group, the epoch or the fit, or up to a checkpoint.

        Position and schedule move along, so every step has the hyper-parameters that it would have
        in a group of its own.
        """
        position, built, ranks = self.position, self._layer.built, self.size
        steps: list[Step] = []
        while len(steps) < self._options.group_size:
            ranges = [self._plan.batch(position.step, rank)[:2] for rank in range(ranks)]
            steps.append(Step(position.epoch, position.step, self._layer.hyper(), tuple(ranges)))
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

    # -- rows ----------------------------------------------------------------------------------

    def _open_rows(self):
        settings, known = self.settings, self._transport.rows()
        rows = [each["rows"] for each in known]
        if not sum(rows):
            raise UsageError("The training data has no rows")
        drop_last = settings.drop_last or any(each["drop_last"] for each in known)
        self._plan = BatchPlan(rows, settings.batch_size, drop_last)
        if not self._plan.steps:
            raise UsageError(
                f"drop_last leaves no batch: the data has {sum(rows)} rows and batch_size is "
                f"{settings.batch_size}"
            )
        self._batches = Batches(
            seed=settings.seed,
            batch_size=settings.batch_size,
            rows=rows,
            fingerprint=[each["fingerprint"] for each in known],
            shuffle=settings.shuffle,
            drop_last=drop_last,
            windows=[each["window"] for each in known],
        )
        self._inputs = next((each["inputs"] for each in known if each["inputs"]), None)

    def _last_epoch(self) -> int:
        goal, position = self.settings.goal, self.position
        if goal.steps is None:
            return goal.epochs
        left = goal.steps - position.global_step
        begun = position.step if position.partial is None else 0
        return position.counted + -(-(left + begun) // self._plan.steps)

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
        summary = None if snapshot is None else snapshot.files.get("summary.pt")
        if self._summary is not None and summary is not None:
            self._summary.put(loads(summary))
        states = self._layer.states(self._layer_plan, self._layer.residuals(snapshot))
        self._transport.start(states)
        self._is_current = True
        return self._snapshot(states) if snapshot is None else snapshot

    def _pull(self) -> list:
        """Bring the state of the ranks to the driver's model."""
        states = self._transport.states()
        if not self._is_current:
            self._layer.take(states, self._layer_plan)
            self._is_current = True
        return states

    def _save(self):
        self._latest = self._snapshot(self._pull())
        if self._directory is not None:
            self._directory.write(self._latest)

    def _snapshot(self, states) -> Snapshot:
        position = self.position
        manifest = {**position.to_json(), **vars(self._batches), "inputs": self._inputs}
        if position.step:
            manifest["sums"] = [own.to_json() for own in self._figures.of_ranks]
            manifest["rows_since_merge"] = [0] * self.size
        files = self._layer.files(states)
        if self._summary is not None:
            files["summary.pt"] = dumps(self._summary.take())
        return Snapshot(manifest, files)

    def _forgive(self, error: WorkerLost) -> None:
        decision = self._policy.decide()
        if not decision.retry:
            raise WorkerLost(f"{error} ({decision.reason})") from None

    def _go_back(self, error: WorkerLost) -> None:
        """Start again from the newest state that is known."""
        while True:
            self._forgive(error)
            where = self._latest.position
            logger.warning("%s; going on from %s", error, where)
            try:
                self._layer.load(self._latest)
                self._begin(self._latest)
                return
            except WorkerLost as another:
                error = another
