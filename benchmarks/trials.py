"""Overhead of a trial: ours on Spark, Ray and local processes, against other ways to run a study.

    python benchmarks/trials.py [--trials 100] [--seconds 0.05] [--rounds 3] [--slots 2]
        [--pruning] [--parties ours-spark threads ...] [--json results.json]
    python benchmarks/trials.py --budget 3 [--seeds 10] [--parties ours-spark job-per-trial ...]

All parties run the same number of trials, two at a time, on this machine. A trial suggests three
parameters with TPE and sleeps, so the machine's speed hardly matters; with ``--pruning`` it sleeps
in ten steps, reports after each and asks a median pruner. Parties take turns in each round, and
each has run two trials before, so processes and imports are not measured. ``overhead`` is
(seconds - trials x sleep / slots) / trials, in milliseconds; with pruning only ``seconds`` count.

With ``--slots 1 --pruning --parties ours-spark serial``, each party must prune the trials of
``serial``. With ``--budget``, each party searches for as many seconds, with each seed; printed is
the number of trials, the best value, and how often it is not worse than that of the first party.

Peers: ``threads`` is ``study.optimize(n_jobs=)``; ``joblib`` asks and tells in the driver and runs
each batch of trials with joblib's processes, and ``joblib-spark`` on Spark (``pip install
joblibspark``); ``job-per-trial`` asks and tells in threads that run a
Spark job for each trial, as joblib-spark and hyperopt's SparkTrials do; ``ray-tune`` is Ray Tune
with OptunaSearch and reused actors.
"""

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import optuna

from bigdl.tuning import optimize

STEPS = 10


def create_study(pruning, seed=1):
    pruner = optuna.pruners.MedianPruner(5) if pruning else optuna.pruners.NopPruner()
    return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)


def loss(x, rate, units):
    return (x - 1) ** 2 + rate + units / 100


def suggested(trial):
    return {
        "x": trial.suggest_float("x", -4, 4),
        "rate": trial.suggest_float("rate", 1e-5, 1, log=True),
        "units": trial.suggest_int("units", 1, 64),
    }


class Objective:
    def __init__(self, seconds, pruning):
        self.seconds, self.pruning = seconds, pruning

    def __call__(self, trial):
        value = loss(**suggested(trial))
        if not self.pruning:
            time.sleep(self.seconds)
            return value
        for step in range(STEPS):
            time.sleep(self.seconds / STEPS)
            trial.report(value + 1 / (step + 1), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value


def sleep_and_compute(params, seconds):
    time.sleep(seconds)
    return loss(**params)


class StopAt:
    """Callback that starts no trial after a time of ``time.time()``."""

    def __init__(self, deadline):
        self.deadline = deadline

    def __call__(self, study, trial):
        if time.time() > self.deadline:
            study.stop()


def threads(study, objective, trials, slots, **options):
    study.optimize(objective, trials, n_jobs=slots, **options)


def serial(study, objective, trials, slots):
    study.optimize(objective, trials)


def with_joblib_spark(study, objective, trials, slots):
    import joblib
    import joblibspark

    joblibspark.register_spark()
    with joblib.parallel_backend("spark", n_jobs=slots):
        with_joblib(study, objective, trials, slots)


def with_joblib(study, objective, trials, slots):
    import joblib

    with joblib.Parallel(n_jobs=slots) as parallel:
        for _ in range(0, trials, slots):
            asked = [study.ask() for _ in range(slots)]
            params = [suggested(trial) for trial in asked]
            call = joblib.delayed(sleep_and_compute)
            values = parallel(call(each, objective.seconds) for each in params)
            for trial, value in zip(asked, values, strict=True):
                study.tell(trial, value)


def job_per_trial(study, objective, trials, slots, callbacks=()):
    from bigdl.orca import OrcaContext

    sc = OrcaContext.get_spark_context()
    seconds = objective.seconds

    def run(_):
        if any(time.time() > each.deadline for each in callbacks):
            return
        trial = study.ask()
        params = suggested(trial)
        job = sc.parallelize([params], 1).map(lambda each: sleep_and_compute(each, seconds))
        study.tell(trial, job.collect()[0])

    with ThreadPoolExecutor(slots) as pool:
        list(pool.map(run, range(trials)))


def ray_tune(study, objective, trials, slots):
    from ray import tune
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.optuna import OptunaSearch

    def train(config):
        tune.report({"value": sleep_and_compute(config, objective.seconds)})

    os.environ.update(TUNE_GLOBAL_CHECKPOINT_S="600", TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1")
    space = {
        "x": tune.uniform(-4, 4),
        "rate": tune.loguniform(1e-5, 1),
        "units": tune.randint(1, 65),
    }
    search = OptunaSearch(sampler=study.sampler, metric="value", mode="min")
    tune.Tuner(
        train,
        param_space=space,
        tune_config=tune.TuneConfig(
            search_alg=ConcurrencyLimiter(search, slots), num_samples=trials, reuse_actors=True
        ),
        run_config=tune.RunConfig(verbose=0),
    ).fit()


def ours(backend):
    def run(study, objective, trials, slots, **options):
        optimize(study, objective, trials, backend=backend, concurrency=slots, **options)

    return run


PARTIES = {
    "ours-spark": ours("spark"),
    "ours-local": ours("local"),
    "ours-ray": ours("ray"),
    "threads": threads,
    "joblib": with_joblib,
    "joblib-spark": with_joblib_spark,
    "job-per-trial": job_per_trial,
    "ray-tune": ray_tune,
    "serial": serial,
}
CANNOT_PRUNE = ("joblib", "joblib-spark", "job-per-trial", "ray-tune")


def start(parties, slots):
    if any("ray" in party for party in parties):
        from bigdl.orca import init_orca_context

        init_orca_context("local", cores=slots, memory="2g", init_ray_on_spark=True)
    elif any(party in ("ours-spark", "joblib-spark", "job-per-trial") for party in parties):
        from bigdl.orca import init_orca_context

        init_orca_context("local", cores=slots, memory="2g")


TAKE_CALLBACKS = ("ours-spark", "ours-local", "ours-ray", "threads", "job-per-trial")


def compare_budgets(parties, budget, seeds, seconds, slots):
    """Print the best values after the same time, with each seed."""
    best, counts = ({party: [] for party in parties} for _ in range(2))
    for seed in range(seeds):
        for party in parties if seed % 2 == 0 else reversed(parties):
            study = create_study(False, seed)
            stop = StopAt(time.time() + budget)
            PARTIES[party](study, Objective(seconds, False), 100_000, slots, callbacks=[stop])
            in_time = [
                trial.value
                for trial in study.trials
                if trial.value is not None and trial.datetime_complete.timestamp() <= stop.deadline
            ]
            best[party].append(min(in_time))
            counts[party].append(len(in_time))
    print(f"{budget:g} s of trials of {seconds:g} s, {slots} at a time, {seeds} seeds")
    print(f"{'party':14} {'trials':>8} {'best, median':>14} {'range':>20} {'not worse':>10}")
    reference = best[parties[0]]
    for party in parties:
        values = best[party]
        spread = f"{min(values):.5f}-{max(values):.5f}"
        wins = sum(value <= other for value, other in zip(values, reference, strict=True))
        trials, median = statistics.median(counts[party]), statistics.median(values)
        print(f"{party:14} {trials:8g} {median:14.5f} {spread:>20} {wins:>7}/{seeds}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--pruning", action="store_true")
    parser.add_argument("--budget", type=float, help="seconds of each search")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--parties", nargs="+", choices=PARTIES)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    trials, seconds, slots = arguments.trials, arguments.seconds, arguments.slots
    parties = arguments.parties or [party for party in PARTIES if party != "serial"]
    if arguments.pruning:
        parties = [party for party in parties if party not in CANNOT_PRUNE]
    if arguments.budget is not None:
        parties = [party for party in parties if party in TAKE_CALLBACKS]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    start(parties, slots)
    objective = Objective(seconds, arguments.pruning)
    for party in parties:
        PARTIES[party](create_study(False), Objective(0.2, False), 2, slots)
    if arguments.budget is not None:
        compare_budgets(parties, arguments.budget, arguments.seeds, seconds, slots)
        return
    walls, best, pruned = ({party: [] for party in parties} for _ in range(3))
    for _ in range(arguments.rounds):
        for party in parties:
            study = create_study(arguments.pruning)
            begin = time.perf_counter()
            PARTIES[party](study, objective, trials, slots)
            walls[party].append(time.perf_counter() - begin)
            if study.trials:
                best[party].append(study.best_value)
                pruned[party].append({t.number for t in study.trials if t.state.name == "PRUNED"})
    print(f"{trials} trials of {seconds:g} s, {slots} at a time")
    print(f"{'party':14} {'seconds':>8} {'range':>15} {'overhead ms':>12} {'pruned':>7}")
    results = {}
    for party in parties:
        wall = statistics.median(walls[party])
        lanes = 1 if party == "serial" else slots
        overhead = (wall - trials * seconds / lanes) / trials * 1000
        spread = f"{min(walls[party]):.2f}-{max(walls[party]):.2f}"
        stopped = statistics.median(map(len, pruned[party])) if pruned[party] else 0
        shown = "" if arguments.pruning else f"{overhead:.1f}"
        print(f"{party:14} {wall:8.2f} {spread:>15} {shown:>12} {stopped:7g}")
        if slots == 1 and "serial" in parties and pruned[party] != pruned["serial"]:
            raise SystemExit(f"{party} pruned other trials than serial Optuna")
        results[party] = {"seconds": walls[party], "overhead_ms": overhead, "best": best[party]}
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
