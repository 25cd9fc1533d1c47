"""A cluster that asks for encryption: what is encrypted, and what is refused."""

import pytest

from bigdl.common.errors import UsageError
from bigdl.orca.engine import LocalEngine


def total(worker):
    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

    sync = TorchDistributedSync(worker)
    sync.start()
    certificate = worker.line.store._address.certificate
    return [sum(each for (each,) in sync.all_gather([worker.rank + 1.0])), certificate is not None]


@pytest.fixture
def engine():
    engine = LocalEngine()
    engine.cluster.asks_encryption = "spark.network.crypto.enabled=true"
    return engine


def test_collectives_in_the_clear_are_refused(engine):
    with pytest.raises(UsageError, match=r"gloo of the installed torch .*gradients.*CLEAR_COLLE"):
        engine.run(total, num_workers=2)


def test_collectives_in_the_clear_are_allowed_where_the_driver_says_so(engine, monkeypatch):
    monkeypatch.setenv("BIGDL_CLEAR_COLLECTIVES", "1")
    assert engine.run(total, num_workers=2) == [[3.0, True], [3.0, True]]


def test_a_single_worker_says_nothing_to_others(engine):
    assert engine.run(total, num_workers=1) == [[1.0, True]]


def test_nothing_is_encrypted_that_is_not_asked_for():
    assert LocalEngine().run(total, num_workers=2) == [[3.0, False], [3.0, False]]
