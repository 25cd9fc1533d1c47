"""Overhead of a trial: ours on Spark, Ray and local processes, against other ways to run a study.

    python benchmarks/trials.py [--trials 100] [--seconds 0.05] [--rounds 3] [--slots 2]
        [--pruning] [--parties spark local ...] [--json results.json]

All parties run the same number of trials, two at a time, on this machine. A trial suggests three
parameters with TPE and sleeps, so the machine's speed hardly matters; with ``--pruning`` it sleeps
in ten steps, reports after each and asks a median pruner. Parties take turns in each round, and
each has run two trials before, so processes and imports are not measured. ``overhead`` is
(seconds - trials x sleep / slots) / trials, in milliseconds; with pruning only ``seconds`` count.

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


def create_study(pruning):
    pruner = optuna.pruners.MedianPruner(5) if pruning else optuna.pruners.NopPruner()
    return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1), pruner=pruner)


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


def threads(study, objective, trials, slots):
    study.optimize(objective, trials, n_jobs=slots)


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


def job_per_trial(study, objective, trials, slots):
    from bigdl.orca import OrcaContext

    sc = OrcaContext.get_spark_context()
    seconds = objective.seconds

    def run(_):
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
    def run(study, objective, trials, slots):
        optimize(study, objective, trials, backend=backend, concurrency=slots)

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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--pruning", action="store_true")
    parser.add_argument("--parties", nargs="+", choices=PARTIES)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    trials, seconds, slots = arguments.trials, arguments.seconds, arguments.slots
    parties = arguments.parties or [party for party in PARTIES if party != "serial"]
    if arguments.pruning:
        parties = [party for party in parties if party not in CANNOT_PRUNE]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    start(parties, slots)
    objective = Objective(seconds, arguments.pruning)
    for party in parties:
        PARTIES[party](create_study(False), Objective(0.2, False), 2, slots)
    walls, best, pruned = ({party: [] for party in parties} for _ in range(3))
    for _ in range(arguments.rounds):
        for party in parties:
            study = create_study(arguments.pruning)
            begin = time.perf_counter()
            PARTIES[party](study, objective, trials, slots)
            walls[party].append(time.perf_counter() - begin)
            if study.trials:
                best[party].append(study.best_value)
                pruned[party].append(sum(t.state.name == "PRUNED" for t in study.trials))
    print(f"{trials} trials of {seconds:g} s, {slots} at a time")
    print(f"{'party':14} {'seconds':>8} {'range':>15} {'overhead ms':>12} {'pruned':>7}")
    results = {}
    for party in parties:
        wall = statistics.median(walls[party])
        lanes = 1 if party == "serial" else slots
        overhead = (wall - trials * seconds / lanes) / trials * 1000
        spread = f"{min(walls[party]):.2f}-{max(walls[party]):.2f}"
        stopped = statistics.median(pruned[party]) if pruned[party] else 0
        shown = "" if arguments.pruning else f"{overhead:.1f}"
        print(f"{party:14} {wall:8.2f} {spread:>15} {shown:>12} {stopped:7g}")
        results[party] = {"seconds": walls[party], "overhead_ms": overhead, "best": best[party]}
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
