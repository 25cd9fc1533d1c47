"""Programs on four hosts, of which some know themselves by other addresses, and their faults."""

import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_programs import SEARCH
from real_clusters import (
    FIT,
    InAStep,
    await_none,
    control,
    error_line,
    fitted_weights,
    last_line,
    run,
    run_whole,
    undisturbed,
)

from bigdl.data import TableLoader

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]


def on_hosts(**more) -> dict:
    """Arguments of init_orca_context."""
    return {
        "cluster_mode": "standalone",
        "master": "spark://10.76.1.10:7077",
        "num_nodes": 2,
        "cores": 1,
        "memory": "1g",
        "python_location": sys.executable,
        **more,
    }


# seconds after which Spark takes a silent host for lost: 120 and 60 unless a program says so
SOON = {
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "2s",
}


def driver(hosts: Path) -> str:
    """The Python of the driver's host."""
    return str(hosts / "python-on-driver")


def do(hosts: Path, verb: str, *arguments: str) -> None:
    control("hosts.py", verb, hosts, *arguments)


def host_of(pid: int) -> str:
    """The host that a process runs on."""
    command = ["ip", "netns", "identify", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip().removeprefix("bigdl-")


def of_programs(hosts: Path) -> list[psutil.Process]:
    """What runs on the hosts, but for their own daemons."""
    daemons = {int(path.read_text().split()[0]) for path in (hosts / "pids").iterdir()}
    found = []
    for host in json.loads((hosts / "hosts.json").read_text()):
        command = ["ip", "netns", "pids", f"bigdl-{host}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found += [
            psutil.Process(int(pid)) for pid in done.stdout.split() if int(pid) not in daemons
        ]
    return found


def await_no_program(hosts: Path, seconds: float = 30) -> float:
    """Wait until no program runs on any host; returns after how many seconds."""

    def left() -> list:
        try:
            return [(host_of(each.pid), each.cmdline()[:4]) for each in of_programs(hosts)]
        except (psutil.NoSuchProcess, subprocess.CalledProcessError):
            return ["one that has just ended"]

    return await_none(left, seconds)


@pytest.mark.slow
def test_a_fit_on_hosts_is_exact(hosts, tmp_path):
    there = last_line(run(tmp_path / "there", FIT, on_hosts(), python=driver(hosts)))
    assert len(there["hosts"]) == 2
    np.testing.assert_allclose(there["weights"], fitted_weights(), rtol=1e-5)


TABLE = """
    import json, os
    import torch
    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator
    from bigdl.orca.learn.pytorch.callbacks import Callback
    from bigdl.orca.learn.trigger import SeveralIteration

    class Steps(Callback):
        def after_train_iter(self, runner):
            with open(f"{FOLDER}/{runner.global_step}-{runner.rank}", "w") as file:
                rows = [] if runner.batch is None else runner.batch[0].int().tolist()
                json.dump({"host": os.uname().nodename, "rows": rows}, file)

    def fit(**options):
        estimator = Estimator.from_torch(
            model=lambda config: torch.nn.Sequential(
                torch.nn.Unflatten(0, (-1, 1)), torch.nn.Linear(1, 1)
            ),
            optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 1e-9),
            loss=lambda output, target: output.mean(),
            model_dir=FOLDER + "/models",
            workers_per_node=WORKERS,
        )
        estimator.fit(
            FOLDER + "/rows.parquet", feature_cols=["x"], label_cols=["x"], seed=3,
            batch_size=BATCH, callbacks=[Steps()], **options
        )

    init_orca_context(**ARGUMENTS)
    fit(max_steps=3, checkpoint_trigger=SeveralIteration(1))
    WORKERS = 1
    fit(epochs=1, resume="auto")
    stop_orca_context()
"""


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [500, 50])
def test_hosts_read_a_table_in_one_order(hosts, tmp_path, batch_size):
    rows = pa.table({"x": np.arange(5003 if batch_size == 500 else 303, dtype="float32")})
    pq.write_table(rows, tmp_path / "rows.parquet")
    head = f"FOLDER, BATCH, WORKERS = {str(tmp_path)!r}, {batch_size}, 2\n"
    arguments = on_hosts(cores=2)
    program = head + textwrap.dedent(TABLE)
    done = run(tmp_path / "there", program, arguments, python=driver(hosts))
    assert done.returncode == 0, done.stderr
    loader = TableLoader(str(tmp_path / "rows.parquet"), batch_size=batch_size, seed=3)
    for step, batch in enumerate(loader, 1):
        ranks = [json.loads(each.read_text()) for each in tmp_path.glob(f"{step}-*")]
        assert len({each["host"] for each in ranks}) == 2
        seen = [int(row) for each in ranks for row in each["rows"]]
        assert sorted(seen) == sorted(batch["x"].int().tolist())
        if batch_size == 500 and step < len(loader):  # each host reads its part of the table
            by_host = {each["host"]: set() for each in ranks}
            for each in ranks:
                by_host[each["host"]] |= {row >= 2501 for row in each["rows"]}
            assert sorted(map(len, by_host.values())) == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_results_equal_those_of_this_machine(hosts, tmp_path, workers):
    there = run_whole(tmp_path / "there", on_hosts(num_nodes=workers), python=driver(hosts))
    here = run_whole(tmp_path / "here", {"cores": workers}, workers_per_node=workers)
    assert there == here


@pytest.mark.slow
def test_a_driver_beside_the_hosts(hosts, tmp_path):
    """This machine, whose first network is not that of the hosts."""
    there = last_line(run(tmp_path / "there", FIT, on_hosts()))
    np.testing.assert_allclose(there["weights"], fitted_weights(), rtol=1e-5)


# A program with WORKERS_PER_NODE that trains by the backends of NAMES.
BACKENDS = """
    import json
    import torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator
    from bigdl.orca.learn.tf2 import Estimator as KerasEstimator

    init_orca_context(**ARGUMENTS)
    rows = OrcaContext.get_spark_session().range(240, numPartitions=4).selectExpr(
        "id",
        "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
        "array(float(sin(id) + 2 * cos(id))) AS y",
    )
    data = {"feature_cols": ["x"], "label_cols": ["y"], "seed": 7}

    def network():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def keras_model(config):
        import keras

        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def by_torch(backend):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        is_layer = backend in ("shuffle", "barrier")
        fit = {"transport": backend, "group_size": 5} if is_layer else {}
        estimator = Estimator.from_torch(
            model=model if is_layer else lambda config: network(),
            optimizer=optimizer
            if is_layer
            else lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
            loss=torch.nn.MSELoss(),
            workers_per_node=WORKERS_PER_NODE,
            backend="bigdl" if is_layer else backend,
        )
        estimator.fit(rows, epochs=2, batch_size=24, **data, **fit)
        predicted = estimator.predict(rows, feature_cols=["x"]).select("id").toPandas()
        assert sorted(predicted["id"]) == list(range(240))
        return [tensor.tolist() for tensor in estimator.get_model().state_dict().values()]

    def by_keras(backend):
        estimator = KerasEstimator.from_keras(
            model_creator=keras_model, workers_per_node=WORKERS_PER_NODE, backend=backend
        )
        estimator.fit(rows, epochs=2, batch_size=24, **data)
        return [array.tolist() for array in estimator.get_model().get_weights()]

    train = by_keras if KERAS else by_torch
    result = [train(name) for name in NAMES]
    stop_orca_context()
    print(json.dumps(result))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "keras"),
    [(("spark", "ray"), False), (("shuffle", "barrier"), False), (("spark", "ray"), True)],
    ids=["torch", "layer", "keras"],
)
def test_backends_learn_the_same_as_here(hosts, tmp_path, names, keras):
    def backends(folder, workers_per_node, arguments, **options):
        head = f"WORKERS_PER_NODE, NAMES, KERAS = {workers_per_node}, {names!r}, {keras}\n"
        program = head + textwrap.dedent(BACKENDS)
        arguments = {**arguments, "object_store_memory": "100m"}
        return last_line(run(tmp_path / folder, program, arguments, **options))

    there = backends("there", 1, on_hosts(num_nodes=4), python=driver(hosts))
    here = backends("here", 4, {"cores": 4})
    assert there == here
    assert there[0] == there[1]


@pytest.mark.slow
def test_ray_has_the_addresses_of_the_hosts_and_is_gone(hosts, tmp_path):
    program = """
        import json
        import ray
        from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        sc = init_orca_context(**ARGUMENTS)
        OrcaContext.get_ray_context()

        @ray.remote(num_cpus=1)
        def node():
            return ray.get_runtime_context().get_node_id()

        nodes = [each for each in ray.nodes() if each["Resources"].get("CPU")]
        places = [NodeAffinitySchedulingStrategy(each["NodeID"], soft=False) for each in nodes]
        worked = set(ray.get([node.options(scheduling_strategy=p).remote() for p in places]))
        addresses = {each["NodeManagerHostname"]: each["NodeManagerAddress"] for each in nodes}
        stop_orca_context()
        print(json.dumps({"addresses": addresses, "worked": len(worked)}))
    """
    arguments = on_hosts(num_nodes=4, init_ray_on_spark=True, object_store_memory="100m")
    found = last_line(run(tmp_path / "there", program, arguments, python=driver(hosts)))
    addresses = json.loads((hosts / "hosts.json").read_text())
    del addresses["driver"]
    assert found == {"addresses": addresses, "worked": 4}
    await_no_program(hosts)


@pytest.mark.slow
def test_a_search_of_hyperparameters(hosts, tmp_path):
    arguments = on_hosts(init_ray_on_spark=True, object_store_memory="100m")
    found = last_line(run(tmp_path / "there", SEARCH, arguments, python=driver(hosts)))
    assert found["lr"] == 0.1


# A program with BUSY_S, for which an executor is busy with something else at the start, so that the
# other one has all rows; and with steps that are longer than Spark's own patience.
CROWDED = """
    import json, threading, time
    import torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    class Slow(torch.nn.Linear):
        def forward(self, x):
            time.sleep(4)
            return super().forward(x)

    sc = init_orca_context(**ARGUMENTS)
    sc.range(2, numSlices=2).barrier().mapPartitions(lambda _: [0]).collect()  # both are there
    busy = threading.Thread(
        target=lambda: sc.parallelize([0], 1).foreach(lambda _: time.sleep(BUSY_S))
    )
    busy.start()
    time.sleep(2)
    rows = OrcaContext.get_spark_session().range(64, numPartitions=2).selectExpr(
        "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
        "array(float(sin(id) + 2 * cos(id))) AS y",
    )
    model = Slow(3, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    estimator = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=torch.nn.MSELoss(),
        backend="bigdl",
    )
    estimator.fit(
        rows, epochs=3, batch_size=64, feature_cols=["x"], label_cols=["y"], max_failures=0
    )
    weight, bias = estimator.get_model().parameters()
    busy.join()
    stop_orca_context()
    print(json.dumps([*weight.detach().reshape(-1).tolist(), bias.item()]))
"""


@pytest.mark.slow
def test_a_host_may_have_the_rows_of_several_workers(hosts, tmp_path):
    program = "BUSY_S = 40\n" + textwrap.dedent(CROWDED)
    found = last_line(run(tmp_path / "there", program, on_hosts(), python=driver(hosts)))
    np.testing.assert_allclose(found, fitted_weights(), rtol=1e-5)


@pytest.mark.slow
def test_workers_of_one_host_add_up_first(hosts, tmp_path):
    program = """
        import json
        from bigdl.orca import init_orca_context, stop_orca_context
        from bigdl.orca.engine import SparkEngine

        def program(worker):
            import torch
            from bigdl.runtime.collectives.halving import tree_sum
            from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

            given = [
                torch.randn(300_000, generator=torch.Generator().manual_seed(rank))
                for rank in range(8)
            ]
            sync = TorchDistributedSync(worker)
            sync.start()
            parameter = torch.nn.Parameter(torch.zeros(300_000))
            parameter.grad = given[worker.rank].clone()
            sync.all_reduce_gradients([parameter], 1.0)
            kind = type(sync.groups.dense[0].buffer).__name__
            return worker.host, kind, torch.equal(parameter.grad, tree_sum(given))

        init_orca_context(**ARGUMENTS)
        found = SparkEngine().run(program, num_workers=8, threads=1)
        stop_orca_context()
        print(json.dumps(found))
    """
    arguments = on_hosts(num_nodes=4, cores=2)
    found = last_line(run(tmp_path / "there", program, arguments, python=driver(hosts)))
    names, kinds, are_exact = zip(*found, strict=True)
    assert names[::2] == names[1::2]
    assert len(set(names)) == 4
    assert set(kinds) == {"BlockBuffer"}
    assert all(are_exact)


# -- faults --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> list:
    """What the program ends with when nothing happens, on this machine."""
    return undisturbed(tmp_path_factory.mktemp("here") / "program")


def in_a_step(hosts: Path, tmp_path: Path, **options) -> InAStep:
    """The program on two hosts, which waits in the middle of a step."""
    arguments = on_hosts(conf=SOON, **options.pop("arguments", {}))
    return InAStep(tmp_path / "there", arguments, python=driver(hosts), **options)


OPTIONS = {
    "spark": {},
    "ray": {"options": {"backend": "ray"}, "arguments": {"object_store_memory": "100m"}},
}


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("who", ["host", "driver"])
def test_a_host_is_cut_off_for_some_seconds(hosts, tmp_path, weights, who, trial):
    program = in_a_step(hosts, tmp_path, rank=trial % 2)
    host = who if who == "driver" else host_of(program.waiting())
    program.waiting()
    do(hosts, "cut", host)
    assert program.end_after(5, functools.partial(do, hosts, "mend", host)) == weights


LOSSES = {"cut": "mend", "kill": "worker"}  # and what makes up for them


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_host_is_replaced_by_another(hosts, tmp_path, weights, loss, trial):
    program = in_a_step(hosts, tmp_path, rank=trial % 2)
    host = host_of(program.waiting())
    do(hosts, loss, host)
    began = time.monotonic()
    program.go_on()
    try:
        assert last_line(program.end()) == weights
        print(f"it ended {time.monotonic() - began:.1f} s after {host} was lost")
    finally:
        do(hosts, LOSSES[loss], host)
    print(f"nothing was left {await_no_program(hosts):.1f} s after {host} was back")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("loss", LOSSES)
def test_ray_goes_on_without_a_lost_host(hosts, tmp_path, weights, loss, trial):
    """If that is allowed; else it says what is missing."""
    may_shrink = trial % 2 == 0
    # without room each loss waits two minutes for a node to come back
    fit = {"min_workers": 1} if may_shrink else {"max_failures": 1}
    program = in_a_step(hosts, tmp_path, fit=fit, **OPTIONS["ray"])
    host = host_of(program.waiting())
    do(hosts, loss, host)
    began = time.monotonic()
    program.go_on()
    try:
        done = program.end(300)
        print(f"it ended {time.monotonic() - began:.1f} s after {host} was lost")
        if may_shrink:  # one worker has the rows of both, and draws them in another order
            assert "Nodes were lost: 1 of 2 workers continue" in done.stderr
            for one, other in zip(last_line(done), weights, strict=True):
                np.testing.assert_allclose(one, other, atol=0.1)
        else:
            last = error_line(done)
            assert "2 workers are needed but the cluster can only run 1" in last, done.stderr
    finally:
        do(hosts, LOSSES[loss], host)
    print(f"nothing was left {await_no_program(hosts):.1f} s after {host} was back")


@pytest.mark.slow
@pytest.mark.fault
def test_a_host_stands_still_for_some_seconds(hosts, tmp_path, weights, trial):
    program = in_a_step(hosts, tmp_path, rank=trial % 2)
    host = host_of(program.waiting())
    do(hosts, "pause", host)
    assert program.end_after(8, functools.partial(do, hosts, "resume", host)) == weights


@pytest.mark.slow
@pytest.mark.fault
def test_a_host_with_a_slow_link(hosts, tmp_path, weights):
    do(hosts, "limit", "host1", "2mbit")
    do(hosts, "delay", "host1", "20")
    try:
        program = in_a_step(hosts, tmp_path)
        program.go_on()
        assert last_line(program.end()) == weights
    finally:
        do(hosts, "delay", "host1", "0")
        do(hosts, "limit", "host1", "none")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("backend", OPTIONS)
def test_a_driver_that_is_killed_leaves_nothing(hosts, tmp_path, backend, trial):
    program = in_a_step(hosts, tmp_path, rank=trial % 2, **OPTIONS[backend])
    program.waiting()
    os.kill(program.process.pid, signal.SIGKILL)
    program.process.communicate()
    print(f"nothing was left after {await_no_program(hosts):.1f} s")
