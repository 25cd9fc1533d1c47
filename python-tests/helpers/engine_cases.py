"""The ways in which workers run and their gradients meet, for tests that all of them must pass."""

import importlib.util
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import ray_models as rays
from connect_server import over_connect

HAS_HOROVOD = importlib.util.find_spec("horovod") is not None


def with_horovod(*cases):
    """Cases that need Horovod; none where it is not installed, which ``test_horovod`` says once."""
    marked = [pytest.param(case, id=name, marks=pytest.mark.horovod) for name, case in cases]
    return marked if HAS_HOROVOD else []


@dataclass(frozen=True)
class Way:
    """A backend of an Estimator, and what its engine can do.

    Attributes
    ----------
    backend : str
    on_ray : bool
        Whether its workers are Ray's.
    reads_spark : bool
        Whether they can read Spark DataFrames.
    has_slots : bool
        Whether the number of workers is limited.
    """

    backend: str
    on_ray: bool
    reads_spark: bool = True
    has_slots: bool = True

    def engine(self, **options):
        """The engine; of two workers unless told otherwise."""
        from bigdl.orca.engine import LocalEngine, RayEngine, SparkEngine

        options = {"workers_per_node": 2, **options}
        if self.backend == "local":
            return LocalEngine(**options)
        return (RayEngine if self.on_ray else SparkEngine)(**options)

    def data(self, frame):
        """A Spark DataFrame of columns ``x`` and ``y``, or arrays of which each of two workers gets
        the rows, in the order, that it would have of the frame."""
        if self.reads_spark:
            return frame
        sources = frame.rdd.glom().collect()
        rows = [
            [
                row
                for number, source in enumerate(sources)
                for i, row in enumerate(source)
                if (i + number) % 2 == rank
            ]
            for rank in (0, 1)
        ]
        mixed = [row for pair in itertools.zip_longest(*rows) for row in pair if row is not None]
        return {name: np.array([row[name] for row in mixed]) for name in "xy"}

    def prepare(self):
        """Have a Ray beside Spark, or none where the backend would take it."""
        if self.on_ray:
            rays.active_ray()
        elif self.backend == "horovod":
            rays.stop_ray()


LOCAL = Way("local", False, reads_spark=False, has_slots=False)
# A process has a SparkContext or a session of Spark Connect: there the same suites run by
# test_connect_suites.py, in a process of their own.
ENGINES = (
    [pytest.param(Way("spark", False), id="connect")]
    if over_connect()
    else [
        pytest.param(Way("spark", False), id="spark"),
        pytest.param(Way("ray", True), id="ray"),
        pytest.param(LOCAL, id="local"),
    ]
)
WAYS = (
    ENGINES
    if over_connect()
    else [
        ENGINES[0],
        ENGINES[2],
        *with_horovod(("horovod-on-spark", Way("horovod", False))),
        ENGINES[1],
        *with_horovod(("horovod-on-ray", Way("horovod", True))),
    ]
)


slow_on_ray = pytest.mark.parametrize(
    "way",
    [
        pytest.param(*way.values, id=way.id, marks=[*way.marks, pytest.mark.slow])
        if way.values[0].on_ray
        else way
        for way in WAYS
    ],
    indirect=True,
)
"""Mark of a test of every way whose cases on Ray are slow."""


def crossed(*cases, fast_on_ray=()):
    """Every engine with every case, for ``engine_way`` and an argument that follows it.

    On Ray a lost worker costs the start of a process that imports torch, so only the cases that are
    named by their ids are fast there.
    """
    made = []
    for engine in ENGINES:
        for case in cases:
            is_slow = engine.values[0].on_ray and case.__name__ not in fast_on_ray
            marks = pytest.mark.slow if is_slow else ()
            name = f"{engine.id}-{case.__name__}"
            made.append(pytest.param(*engine.values, case, id=name, marks=marks))
    return made


def syncs():
    """The classes of GradientSync."""
    from bigdl.runtime.collectives.horovod import HorovodSync
    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

    return [pytest.param(TorchDistributedSync, id="torch"), *with_horovod(("horovod", HorovodSync))]
