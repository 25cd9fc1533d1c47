"""Tables and a chart, with simulated results marked as such."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .model import Cluster, Costs, Workload
from .published import FITTED_TO, INCEPTION, Inception
from .simulator import PHASES, simulate
from .validate import LIMIT, Fit, Prediction

__all__ = ["Curves", "chart", "curves", "fits_table", "predictions_table", "print_curves"]

#: label, policy, iterations in a group
_LINES = (
    ("two jobs per iteration", "plain", 1),
    ("groups of 10, by shuffle", "group", 10),
    ("groups of 100, in a barrier stage", "barrier", 100),
    ("all-reduce in a ring, during the backward pass", "overlap", 1),
    ("by halving and doubling, during the backward pass", "overlap-halving", 1),
    ("reduce at the driver", "driver", 1),
    ("treeReduce", "tree", 1),
)
_ITERATIONS = 200
_NODES = (*INCEPTION, 512, 1024)


@dataclass(frozen=True)
class Curves:
    """Simulated results of Inception-v1.

    Attributes
    ----------
    nodes : tuple of int
    throughput : dict of str to list of float
        Images per second by label.
    phases : dict of int to dict of str to float
        Of two jobs per iteration: the part of the time of each phase, by nodes.
    tasks : tuple of int
    overhead : dict of int to list of float
        By size of the group: what scheduling and exchange of a barrier stage add to the gradient's
        time, for each number of `tasks`.
    """

    nodes: tuple[int, ...]
    throughput: dict[str, list[float]]
    phases: dict[int, dict[str, float]]
    tasks: tuple[int, ...]
    overhead: dict[int, list[float]]


def curves(
    model: Inception,
    costs: dict[str, Costs],
    nodes: Sequence[int] = _NODES,
    iterations: int = _ITERATIONS,
    seed: int = 0,
) -> Curves:
    """Simulate all policies.

    Parameters
    ----------
    model : Inception
    costs : dict of str to Costs
        By policy: "barrier", and others that do not have the costs of `model`.
    """
    throughput, phases = {}, {}
    for label, policy, size in _LINES:
        chosen = replace(model, costs=costs.get(policy, model.costs))
        values = []
        for number in nodes:
            run = chosen.run(number, policy, iterations=iterations, group_size=size, seed=seed)
            values.append(model.throughput(run, number))
            if policy == "plain":
                phases[number] = {phase: run.share(phase) for phase in PHASES}
        throughput[label] = values
    tasks, sizes = (16, 64, 240, 448), (1, 2, 5, 10, 20)
    by_barrier = replace(model, costs=costs["barrier"])
    overhead = {size: [_overhead(by_barrier, number, size) for number in tasks] for size in sizes}
    return Curves(tuple(nodes), throughput, phases, tasks, overhead)


def _overhead(model: Inception, tasks: int, group_size: int) -> float:
    given = model.assumptions
    workload = Workload(tasks, given.parameters, model.compute_s, given.element_bytes)
    cluster = Cluster(tasks, given.cores, given.bandwidth, given.latency_s)
    run = simulate(
        workload,
        model.costs,
        cluster,
        "barrier",
        iterations=group_size,
        group_size=group_size,
    )
    return run.mean_s / model.compute_s - 1


# -- tables ----------------------------------------------------------------------------------------


def fits_table(fits: dict[str, Fit]) -> list[str]:
    """Return a table of the fitted costs."""
    rows = [
        [name, *(f"{getattr(fit.costs, name):.3g}" for fit in fits.values())]
        for name in ("launch_s", "stage_s", "dispatch_s", "task_s", "block_s", "byte_s")
    ]
    rows.append(["others", *(f"{fit.machine.others:.2g} processes" for fit in fits.values())])
    return _table(["fitted to measured runs", *fits], rows)


def predictions_table(predictions: Sequence[Prediction]) -> list[str]:
    """Return a table of held-out points and their predictions."""
    rows = [
        [
            str(p.point),
            f"{p.point.typical_s * 1e3:.0f} ±{p.point.spread / 2:.0%}",
            f"{p.simulated_s * 1e3:.0f} (simulated)",
            f"{p.error:+.0%}{'' if abs(p.error) <= LIMIT else ' MISSED'}",
        ]
        for p in predictions
    ]
    return _table(["held-back point", "measured ms, quartiles", "ms", "error"], rows)


def throughput_table(curves: Curves) -> list[str]:
    labels = list(curves.throughput)
    rows = []
    for index, nodes in enumerate(curves.nodes):
        values = [curves.throughput[label][index] for label in labels]
        known = INCEPTION.get(nodes)
        error = f"{values[0] / known - 1:+.1%}" if known else ""
        use = "fitted" if nodes <= FITTED_TO else "predicted"
        rows.append(
            [
                f"simulated, {nodes} nodes ({use})",
                f"{known}" if known else "",
                *(f"{value:.0f}" for value in values),
                error,
            ]
        )
    return _table(["images/s", "published (0.3)", *labels, "two jobs / published"], rows)


def efficiency_table(curves: Curves) -> list[str]:
    """Return a table of the throughput per node relative to the smallest cluster."""
    first = curves.nodes[0]
    rows = []
    for label, values in curves.throughput.items():
        parts = [v / n / (values[0] / first) for n, v in zip(curves.nodes, values, strict=True)]
        rows.append([f"simulated, {label}", *(f"{part:.1%}" for part in parts)])
    return _table([f"of a node's images/s among {first}", *map(str, curves.nodes)], rows)


def phases_table(curves: Curves) -> list[str]:
    rows = [
        [f"simulated, {nodes} nodes", *(f"{share:.1%}" for share in shares.values())]
        for nodes, shares in curves.phases.items()
    ]
    return _table(["part of an iteration of two jobs", *PHASES], rows)


def overhead_table(curves: Curves) -> list[str]:
    rows = [
        [f"simulated, groups of {size}", *(f"{value:.1%}" for value in values)]
        for size, values in curves.overhead.items()
    ]
    return _table(
        ["over the gradient's time, barrier", *(f"{n} tasks" for n in curves.tasks)], rows
    )


def print_curves(curves: Curves, model: Inception) -> None:
    given = model.assumptions
    print(
        f"\nsimulated: Inception-v1, {given.parameters / 1e6:g} M parameters of "
        f"{given.element_bytes} bytes, {given.bandwidth * 8e-9:g} Gbit/s and {given.images} images "
        f"per node (assumed); fitted to the published points up to {FITTED_TO} nodes: a gradient "
        f"{model.compute_s:.2f} s, a look-up of a block {model.costs.lookup_s * 1e6:.1f} µs; "
        "all other costs from the measured runs\n"
    )
    tables = throughput_table, efficiency_table, phases_table, overhead_table
    for table in (make(curves) for make in tables):
        print("\n".join(table), end="\n\n")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = [list(head), *map(list, rows)]
    made = [f"| {' | '.join(line)} |" for line in lines]
    return [made[0], "|" + "---|" * len(lines[0]), *made[1:]]


# -- chart -----------------------------------------------------------------------------------------


def chart(curves: Curves, path: Path) -> None:
    """Draw the throughput; needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for label, values in curves.throughput.items():
        axes.plot(curves.nodes, values, label=f"simulated: {label}")
    axes.plot(list(INCEPTION), list(INCEPTION.values()), "ko", label="published: BigDL 0.3")
    axes.set(xlabel="nodes", ylabel="images/s", title="Inception-v1, simulated", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)
