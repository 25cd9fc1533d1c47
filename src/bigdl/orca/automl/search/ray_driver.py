"""The driver's side of a search on Ray: what Ray Tune asks, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ray.tune import Callback
from ray.tune.search import SearchAlgorithm, Searcher, SearchGenerator

from bigdl.orca.automl.search.ray_domains import draws_of
from bigdl.orca.automl.search.ray_trial import KEEPER
from bigdl.orca.automl.search.records import Records
from bigdl.tuning.recovery import record_process

__all__ = ["Algorithm", "Proposer", "Recorder", "Running", "drawing"]


class Running:
    """The trials of the records that Tune runs.

    Attributes
    ----------
    trials : dict of str to optuna.trial.Trial
        By Tune's id of a trial.
    configs : dict of str to dict
        What they began with.
    """

    def __init__(self):
        self.trials: dict[str, Any] = {}
        self.configs: dict[str, dict] = {}


class Proposer(Searcher):
    """Gives Tune the configurations of the trials that wait in the records.

    Parameters
    ----------
    records : Records
    running : Running
    keeper : actor
    name : str
        Of the keeper.
    draw : callable
        ``draw(trial, trial_id)`` gives the draws of a trial.
    foreign : ray.tune.search.Searcher, optional
        Who is to hear of results, too.
    concurrency : int, optional
        Trials at the same time.
    """

    def __init__(
        self,
        records: Records,
        running: Running,
        keeper,
        name: str,
        draw: Callable[[Any, str], dict],
        foreign=None,
        concurrency: int | None = None,
    ):
        super().__init__()
        self._records, self._running, self._draw = records, running, draw
        self._keeper, self._name, self._foreign = keeper, name, foreign
        self._concurrency = concurrency

    def suggest(self, trial_id):
        import ray

        if not self._records.waiting():
            # a trial that runs may be lost, and then waits again
            return None if self._running.trials else Searcher.FINISHED
        if self._concurrency and len(self._running.trials) >= self._concurrency:
            return None
        trial = self._records.study.ask()
        record_process(trial)
        config = self._records.draw(trial, self._draw(trial, trial_id))
        ray.get(self._keeper.name.remote(trial_id, trial.number))
        self._running.trials[trial_id] = trial
        self._running.configs[trial_id] = config
        return {**config, KEEPER: self._name}

    def on_trial_result(self, trial_id, result):
        if self._foreign is not None:
            self._foreign.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id, result=None, error=False):
        if self._foreign is not None:
            failed = error or not result or "failure" in result
            self._foreign.on_trial_complete(trial_id, None if failed else result, failed)

    def set_search_properties(self, metric, mode, config, **spec):
        return True


class Algorithm(SearchAlgorithm):
    """A Proposer for Tune, whatever the scheduler is: PBT refuses Tune's own way to have one.

    Nothing has to be saved: the records are written as they are made.
    """

    def __init__(self, proposer: Proposer):
        self._generator = SearchGenerator(proposer)

    @property
    def total_samples(self):
        return self._generator.total_samples

    def set_search_properties(self, metric, mode, config, **spec):
        return True

    def add_configurations(self, experiments):
        self._generator.add_configurations(experiments)

    def next_trial(self):
        return self._generator.next_trial()

    def on_trial_result(self, trial_id, result):
        self._generator.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id, result=None, error=False):
        self._generator.on_trial_complete(trial_id, result, error)

    def is_finished(self):
        return self._finished or self._generator.is_finished()


def drawing(records: Records, foreign=None) -> Callable[[Any, str], dict]:
    """What draws the values of a trial: the records, or a searcher of Ray."""

    def draw(trial, trial_id):
        if foreign is None:
            return records.proposal(trial)
        return draws_of(records.space.domains, foreign.suggest(trial_id))

    return draw


class Recorder(Callback):
    """Writes down what Tune's trials report.

    Parameters
    ----------
    records : Records
    running : Running
    changing : iterable of str
        Names that the scheduler may give other values on the way.
    """

    def __init__(self, records: Records, running: Running, changing: Iterable[str]):
        self._records, self._running, self._changing = records, running, list(changing)
        self._epochs: dict[str, int] = {}

    def on_trial_result(self, iteration, trials, trial, result, **info):
        ours, step = self._running.trials.get(trial.trial_id), result.get("step")
        if ours is None or step is None:
            return
        if step.epoch > self._epochs.get(trial.trial_id, 0):  # one may go back to a checkpoint
            self._epochs[trial.trial_id] = step.epoch
            self._records.note(ours, step)
        began = self._running.configs[trial.trial_id]
        changed = {k: trial.config[k] for k in self._changing if trial.config[k] != began.get(k)}
        if changed:
            ours.set_user_attr("changed", changed)

    def on_trial_complete(self, iteration, trials, trial, **info):
        last = trial.last_result or {}
        ours = self._running.trials.pop(trial.trial_id, None)
        if ours is None:
            return
        step = last.get("step")
        if "failure" in last or step is None:
            self._records.fail(ours, last.get("failure", "The trial ended before its first epoch"))
        else:
            self._records.end(ours, step, stopped=not step.is_last)

    def on_trial_error(self, iteration, trials, trial, **info):
        """The process of a trial was lost: it is tried again, once."""
        ours = self._running.trials.pop(trial.trial_id, None)
        if ours is not None:
            self._records.lose(ours, trial.get_error() or "The process of the trial was lost")
