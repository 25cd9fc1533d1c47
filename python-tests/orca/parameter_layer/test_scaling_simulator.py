"""The simulator of the parameter layer's scaling."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bigdl.common.errors import UsageError

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from scaling import __main__ as program
from scaling import links, report
from scaling.fitting import fitted
from scaling.links import Exchanges, Setting
from scaling.model import Cluster, Costs, Jitter, Workload
from scaling.policies import POLICIES
from scaling.published import INCEPTION, fit_inception
from scaling.simulator import simulate
from scaling.stage import Leg, Server, run_stage
from scaling.validate import (
    Calibration,
    Fit,
    Point,
    calibrated,
    check,
    group_seconds,
    predictions,
)

COSTS = Costs(
    launch_s=0.01,
    stage_s=0.004,
    dispatch_s=3e-4,
    lookup_s=1e-5,
    task_s=0.003,
    block_s=1e-5,
    byte_s=5e-10,
)
SPREAD = Jitter(sigma=0.1, straggling=0.05, slowness=2.0)
FREE = Costs()
LAUNCH = Costs(launch_s=0.25)


def run(workers, policy, costs=COSTS, *, jitter=SPREAD, parameters=1_000_000, **options):
    workload = Workload(workers, parameters, 0.5, 4, jitter)
    cluster = options.pop("cluster", Cluster(workers, 4, 1.25e9, 1e-4))
    return simulate(workload, costs, cluster, policy, **options)


# -- conservation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [1, 2, 7, 32])
def test_phases_add_up_to_every_iteration(policy, workers):
    found = run(workers, policy, iterations=7, group_size=3)
    assert np.allclose(sum(found.phases.values()), found.seconds, rtol=1e-12)
    assert all((spent >= 0).all() for spent in found.phases.values())
    assert math.isclose(sum(found.share(phase) for phase in found.phases), 1.0)


def test_a_stage_lasts_as_long_as_its_server_is_busy():
    legs = [Leg("schedule", Server.SCHEDULER, 0.5), Leg("weights", Server.CORE, 2.0)]
    found = run_stage(legs, [0.0] * 4, nodes=1, cores=2)
    # dispatched at 0.5, 1, 1.5 and 2; the two cores are free again at 2.5, 3, 4.5 and 5
    assert found == {"schedule": 2.0, "weights": 3.0}


def test_programs_of_others_take_their_part_of_the_cores():
    legs = [Leg("weights", Server.CORE, 1.0)]
    alone = run_stage(legs, [0.0], nodes=1, cores=2, others=1)
    assert alone == {"weights": 1.0}  # there is a core for each
    assert run_stage(legs, [0.0], nodes=1, cores=2, others=3) == {"weights": 2.0}


def test_nodes_do_not_share_their_networks():
    legs = [Leg("weights", Server.NETWORK, 1.0)]
    assert run_stage(legs, [0.0] * 6, nodes=6, cores=1) == {"weights": 1.0}
    assert run_stage(legs, [0.0] * 6, nodes=2, cores=1) == {"weights": 3.0}


def test_nodes_of_one_machine_share_its_cores():
    legs = [Leg("weights", Server.CORE, 1.0)]
    assert run_stage(legs, [0.0] * 4, nodes=4, cores=2) == {"weights": 1.0}
    assert run_stage(legs, [0.0] * 4, nodes=4, cores=2, machines=1) == {"weights": 2.0}


# -- closed forms ----------------------------------------------------------------------------------


def test_what_costs_nothing_takes_only_the_gradient():
    for policy in POLICIES:
        found = run(16, policy, FREE, jitter=Jitter(), cluster=Cluster(16), iterations=3)
        assert np.allclose(found.seconds, 0.5)


def test_two_jobs_cost_two_launches_and_two_rounds_of_dispatch():
    costs = Costs(launch_s=0.25, stage_s=0.125, dispatch_s=0.001)
    found = run(64, "plain", costs, jitter=Jitter(), cluster=Cluster(64), iterations=3)
    assert np.allclose(found.seconds, 0.5 + 2 * (0.25 + 0.125 + 64 * 0.001))


@pytest.mark.parametrize("policy", ["group", "barrier"])
def test_a_group_shares_one_launch(policy):
    options = {"jitter": Jitter(), "cluster": Cluster(8)}
    for size in (1, 2, 5, 10):
        found = run(8, policy, LAUNCH, iterations=2 * size, group_size=size, **options)
        assert math.isclose(found.mean_s - 0.5, 0.25 / size, rel_tol=1e-9)


def test_reducing_at_the_driver_is_linear_in_workers():
    cluster = Cluster(1000, bandwidth=1e9)
    seconds = [
        run(n, "driver", FREE, jitter=Jitter(), cluster=cluster, iterations=1)
        .phases["gradients"]
        .item()
        for n in (1, 10, 100, 400)
    ]
    assert np.allclose(seconds, np.array([1, 10, 100, 400]) * 4e6 / 1e9)


def test_a_ring_sends_a_part_of_the_vector_in_every_round():
    cluster = Cluster(4, bandwidth=1e9, latency_s=0.02)
    found = run(4, "ring", FREE, jitter=Jitter(), cluster=cluster, iterations=1)
    half = 0.5e6 / 1e9
    assert np.allclose(found.seconds, 0.5 + 6 * (half + 0.01) + half)


def test_halving_sends_as_much_in_fewer_rounds():
    cluster = Cluster(8, bandwidth=1e9, latency_s=0.02)
    found = run(8, "halving", FREE, jitter=Jitter(), cluster=cluster, iterations=1)
    assert np.allclose(found.seconds, 0.5 + 2 * 4e6 * 7 / 8 / 1e9 + 6 * 0.01)
    # with nine, two others are sent thirds, and then ninths
    cluster = replace(cluster, nodes=9)
    more = run(9, "halving", FREE, jitter=Jitter(), cluster=cluster, iterations=1)
    assert np.allclose(more.seconds, 0.5 + 2 * 4e6 * 8 / 9 / 1e9 + 8 * 0.01)


def overlapped(bandwidth, buckets=4):
    """Seconds beside half a second of computing, and those of the exchange alone."""
    workload = Workload(4, 1_000_000, 0.6, buckets=buckets)
    cluster = Cluster(4, bandwidth=bandwidth)
    one, all_of_it = (
        simulate(workload, FREE, cluster, p, iterations=1) for p in ("overlap", "ring")
    )
    return one.mean_s - 0.6, all_of_it.mean_s - 0.6


def test_a_fast_exchange_hides_but_for_its_last_bucket():
    beside, alone = overlapped(1e9)
    assert math.isclose(beside, alone / 4, rel_tol=1e-3)


def test_a_slow_exchange_hides_what_is_computed_after_the_first_bucket():
    beside, alone = overlapped(1e7)
    assert math.isclose(alone - beside, 0.4 * 3 / 4, rel_tol=1e-3)


def test_nodes_that_are_alike_are_simulated_once():
    legs = [Leg("weights", Server.NETWORK, 1.0), Leg("weights", Server.CORE, 0.5)]
    alike = run_stage(legs, [0.0] * 9, nodes=4, cores=1)
    assert alike == run_stage(legs, [0.0] * 8 + [1e-9], nodes=4, cores=1)


def test_slices_move_the_bytes_of_a_ring():
    cluster = Cluster(16, bandwidth=1e9)
    found = run(16, "plain", FREE, jitter=Jitter(), cluster=cluster, iterations=1)
    assert math.isclose(found.mean_s, 0.5 + 2 * 4e6 * 15 / 16 / 1e9)


def test_looking_up_blocks_at_the_driver_grows_with_the_square():
    costs = Costs(lookup_s=1e-5)
    for workers in (8, 64):
        found = run(workers, "plain", costs, jitter=Jitter(), cluster=Cluster(64), iterations=1)
        assert math.isclose(found.mean_s, 0.5 + 2 * workers * (workers - 1) * 1e-5)


def test_an_iteration_waits_for_the_straggler():
    jitter = Jitter(straggling=0.2, slowness=3.0)
    found = run(64, "plain", FREE, jitter=jitter, cluster=Cluster(64), iterations=20)
    assert np.allclose(found.seconds, 1.5)


def test_measured_delays_are_replayed():
    found = run(1, "plain", FREE, jitter=Jitter(delays=(0.0, 0.5)), iterations=40)
    assert set(found.seconds) == {0.5, 1.0}


# -- seeds and arguments ---------------------------------------------------------------------------


def test_equal_seeds_give_equal_runs():
    one, same, other = (run(8, "plain", iterations=5, seed=seed).seconds for seed in (3, 3, 4))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "gossip"}, "policy should be one of"),
        ({"policy": "plain", "iterations": 0}, "iterations should be at least 1, got 0"),
        ({"policy": "group", "group_size": 0}, "group_size should be at least 1, got 0"),
    ],
    ids=["policy", "iterations", "group_size"],
)
def test_what_cannot_be_simulated_is_refused(options, text):
    with pytest.raises(UsageError, match=text):
        run(2, **options)


# -- calibration -----------------------------------------------------------------------------------


def test_least_squares_finds_the_numbers():
    wanted = np.array([0.5, 20.0])
    x = np.linspace(0, 3, 9)

    def residuals(values):
        return values[0] * np.exp(x) + values[1] - (wanted[0] * np.exp(x) + wanted[1])

    assert np.allclose(fitted(residuals, [1.0, 1.0]), wanted, rtol=1e-4)


def setting(transport, workers, parameters, group_size, held_back=False):
    return Point(transport, workers, parameters, group_size, 0.02, held_back)


SETTINGS = [
    *(setting("shuffle", n, 100_000, k) for n in (1, 2, 8) for k in (1, 4)),
    *(setting("shuffle", n, 2_000_000, 2) for n in (2, 8)),
    *(setting("shuffle", n, 1_000_000, 3, True) for n in (4, 6)),
    *(setting("barrier", n, 100_000, k) for n in (2, 8) for k in (5, 20)),
    *(setting("barrier", n, 2_000_000, 5) for n in (2, 8)),
    setting("barrier", 4, 1_000_000, 10, True),
]


def made_up(error=0.0):
    """A calibration whose runs are simulated; those held back are off by `error`."""
    machine = Cluster(1, 2)
    fits = {
        "shuffle": Fit(COSTS, machine),
        "barrier": Fit(replace(COSTS, stage_s=0.0), machine),
    }
    points = []
    for point in SETTINGS:
        seconds = group_seconds(point, fits[point.transport], Jitter())
        seconds *= 1 + error * point.held_back
        points.append(replace(point, seconds=(seconds, 1.5 * seconds, seconds)))
    jobs = tuple((n, 0.01 + COSTS.dispatch_s * n) for n in (2, 8, 32))
    return Calibration({"cores": 2}, tuple(points), jobs)


@pytest.fixture(scope="module")
def fits():
    return {name: calibrated(made_up(), name) for name in ("shuffle", "barrier")}


def test_measured_runs_give_their_costs_back(fits):
    assert math.isclose(made_up().dispatch_s, COSTS.dispatch_s, rel_tol=1e-6)
    for name in ("launch_s", "stage_s", "task_s", "byte_s"):
        assert math.isclose(getattr(fits["shuffle"].costs, name), getattr(COSTS, name), rel_tol=0.1)
    assert max(abs(p.error) for p in predictions(made_up(), fits)) < 0.02
    assert all(fit.machine.others < 0.1 for fit in fits.values())


def test_costs_that_do_not_predict_are_refused(fits):
    check(predictions(made_up(0.05), fits))
    with pytest.raises(UsageError, match=r"3 of 3 held-back points are off .* calibrate"):
        check(predictions(made_up(0.3), fits))
    with pytest.raises(UsageError, match="No measured point was held back"):
        check([])


def test_too_few_points_are_refused():
    few = replace(made_up(), points=made_up().points[:2])
    with pytest.raises(UsageError, match="2 measured points of the shuffle transport are too few"):
        calibrated(few, "shuffle")


def test_a_calibration_is_kept_in_a_file(tmp_path):
    made_up().save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == made_up()
    with pytest.raises(UsageError, match="run `python -m scaling calibrate` first"):
        Calibration.load(tmp_path / "other.json")


# -- the program -----------------------------------------------------------------------------------


def test_figures_of_larger_clusters_come_after_validation_only(tmp_path, capsys):
    path = tmp_path / "calibration.json"
    made_up(0.3).save(path)
    with pytest.raises(SystemExit, match="not validated"):
        program.main(["curves", "--calibration", str(path)])
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "nodes" not in printed


def exchanges(slower=1.0):
    """Made-up ones, with those of a limited link slower than they should be."""
    settings = [Setting(rate, 0, size) for rate in ("none", "100mbit") for size in (5, 25)]
    blank = Exchanges(4, 2, 1.0, {5: 4, 25: 20}, {})
    costs = Costs(block_s=1e-4, byte_s=1e-9)
    for setting in settings:
        factor = 1.0 if setting.is_free else slower
        blank.seconds[setting] = {
            side: [factor * links.prediction(side, setting, costs, blank)]
            for side in links.POLICIES
        }
    return blank


@pytest.mark.parametrize(("slower", "missed"), [(1.05, 0), (1.3, 10)])
def test_exchanges_over_limited_links_are_predicted_or_named(slower, missed, tmp_path):
    exchanges(slower).save(tmp_path / "links.json")
    loaded = Exchanges.load(tmp_path / "links.json")
    found = links.check(loaded, links.costs_of(loaded))
    assert len(found) == missed
    assert all("the simulator is off by" in sentence for sentence in found)


def test_exchanges_that_are_not_there_are_asked_for(tmp_path):
    with pytest.raises(UsageError, match=r"limited_links\.py --quick --json"):
        Exchanges.load(tmp_path / "links.json")


@pytest.mark.slow
def test_every_simulated_line_says_so(tmp_path, capsys):
    path = tmp_path / "calibration.json"
    made_up().save(path)
    exchanges().save(tmp_path / "links.json")
    argv = ["curves", "--calibration", str(path), "--iterations", "2"]
    argv += ["--links", str(tmp_path / "links.json")]
    program.main([*argv, "--json", str(tmp_path / "curves.json")])
    lines = capsys.readouterr().out.splitlines()
    figures = [line for line in lines if "nodes" in line or "groups of" in line]
    assert len(figures) > 20
    heads = [line for line in figures if line.startswith("| images/s")]
    assert all("simulated" in line for line in figures if line not in heads)
    assert '"simulated"' in (tmp_path / "curves.json").read_text()


def test_the_published_curve_is_predicted_from_its_first_half():
    model = fit_inception(COSTS, Jitter(sigma=0.03), iterations=5)
    found = report.curves(model, {"barrier": COSTS}, tuple(INCEPTION), iterations=5)
    plain = dict(zip(found.nodes, found.throughput["two jobs per iteration"], strict=True))
    for nodes, known in INCEPTION.items():
        assert abs(plain[nodes] / known - 1) < 0.15
    efficiency = {n: plain[n] / n / (plain[16] / 16) for n in (128, 256)}
    assert efficiency[128] >= 0.75
    assert 0.45 <= efficiency[256] <= 0.65
