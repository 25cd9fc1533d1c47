"""Every cluster class has the attributes and methods of the protocol."""

import inspect

import pytest

from bigdl.orca.cluster.connect import ConnectCluster
from bigdl.orca.cluster.ray import RayCluster
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.local import LocalMachine

CONTRACT = [name for name in vars(Cluster) if not name.startswith("_")]


@pytest.mark.parametrize("cluster", [SparkCluster, ConnectCluster, RayCluster, LocalMachine])
def test_a_cluster_keeps_the_contract(cluster):
    assert {"nodes", "slots", "map_shards"} <= set(CONTRACT)
    assert [name for name in CONTRACT if not hasattr(cluster, name)] == []
    parameters = inspect.signature(cluster.map_shards).parameters
    assert list(parameters) == list(inspect.signature(Cluster.map_shards).parameters)


def test_the_documented_attributes_are_those_of_the_contract():
    documented = inspect.getdoc(Cluster)
    assert [name for name in CONTRACT if inspect.isfunction(vars(Cluster)[name])] == [
        "slots",
        "map_shards",
    ]
    properties = [name for name in CONTRACT if isinstance(vars(Cluster)[name], property)]
    assert [name for name in properties if f"\n{name} : " not in documented] == []
