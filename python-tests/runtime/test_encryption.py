"""Encrypted clusters: encrypted connections, and refused ones."""

import contextlib
import os
import signal
import socket
import ssl

import pytest
from refusals import refused

from bigdl.common.errors import WorkerLost
from bigdl.orca.engine import LocalEngine
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.collectives.horovod import HorovodSync
from bigdl.runtime.collectives.tunnel import Tunnels
from bigdl.runtime.worker import Worker


def total(worker):
    """Sum over the workers by gloo; return whether channel and collectives are encrypted."""
    import threading

    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

    sync = TorchDistributedSync(worker)
    sync.start()
    numbers = sync.all_gather([worker.rank + 1.0])
    blobs = sync.gather(bytes([worker.rank]) * 3_000_000)
    if blobs is not None:
        assert blobs == [bytes([rank]) * 3_000_000 for rank in range(worker.world_size)]
    is_tunneled = "bigdl-tunnels" in {thread.name for thread in threading.enumerate()}
    return [
        sum(each for (each,) in numbers),
        worker.channel.store.address.certificate is not None,
        is_tunneled,
    ]


@pytest.fixture
def engine():
    engine = LocalEngine()
    engine.cluster.asks_encryption = "spark.network.crypto.enabled=true"
    return engine


@pytest.mark.slow
def test_channel_and_collectives_are_encrypted(engine):
    assert engine.run(total, num_workers=3) == [[6.0, True, True]] * 3


@pytest.mark.slow
def test_collectives_are_clear_where_the_driver_says_so(engine, monkeypatch):
    monkeypatch.setenv("BIGDL_CLEAR_COLLECTIVES", "1")
    assert engine.run(total, num_workers=2) == [[3.0, True, False]] * 2


@pytest.mark.slow
def test_a_single_worker_says_nothing_to_others(engine):
    assert engine.run(total, num_workers=1) == [[1.0, True, False]]


def test_nothing_is_encrypted_that_is_not_asked_for():
    assert LocalEngine().run(total, num_workers=2) == [[3.0, False, False]] * 2


@pytest.mark.fault
def test_a_lost_worker_is_noticed_through_a_tunnel(engine):
    def program(worker):
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        sync = TorchDistributedSync(worker)
        sync.start()
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            sync.all_gather([1.0])

    with pytest.raises(WorkerLost, match=r"^Worker 1 .* ended unexpectedly$"):
        engine.run(program, num_workers=2)


def test_groups_of_a_program_go_through_tunnels(engine):
    def program(worker):
        import torch
        import torch.distributed as dist

        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        TorchDistributedSync(worker).start()
        group, ones = dist.new_group([0, 1]), torch.ones(2)
        dist.all_reduce(ones, group=group)
        return ones.tolist()

    assert engine.run(program, num_workers=2) == [[2.0, 2.0]] * 2


def test_a_tunnel_takes_the_certificate_of_its_run_only_and_leads_to_gloo_only():
    local = Certificate.make()
    tunnels = Tunnels(local, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1].to_bytes(2, "big")
        for certificate in (local, Certificate.make()):
            client = certificate.context(server=False)
            client.verify_mode = ssl.CERT_NONE
            plain = socket.create_connection(tunnels.end, 30)
            with client.wrap_socket(plain) as connection, contextlib.suppress(OSError):
                connection.sendall(port)
                assert connection.recv(1) == b""
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.accept()
    tunnels.close()


def test_horovod_is_refused():
    worker = Worker(0, 2, certificate=Certificate.make())
    with refused("unsupported", "CLEAR_COLLECTIVES"):
        HorovodSync(worker).start()
