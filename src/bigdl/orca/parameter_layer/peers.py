"""Messages from peer to peer, by gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from bigdl.orca.parameter_layer.messages import Message
from bigdl.runtime.engine import PeerLost

__all__ = ["exchanged"]


def exchanged(sync, messages: Sequence[Message]) -> list:
    """Give a message to every rank. A collective.

    Parameters
    ----------
    sync : TorchDistributedSync
    messages : sequence of Message
        One for each rank; the same one may go to several.

    Returns
    -------
    list of bytes-like or Message
        What the ranks gave, in their order: each in memory of its own, the own one as it was.

    Raises
    ------
    PeerLost
    """
    own, ranks = sync.rank, sync.world_size
    found: list = list(messages)
    if ranks == 1:
        return found
    import torch
    import torch.distributed as dist

    sent = torch.tensor([len(message) for message in messages])
    received = torch.empty_like(sent)
    with _peers():
        dist.all_to_all_single(received, sent)
    written, works = {}, []
    for distance in range(1, ranks):
        source, target = (own - distance) % ranks, (own + distance) % ranks
        message = messages[target]
        if id(message) not in written:
            written[id(message)] = torch.from_numpy(message.written())
        incoming = torch.empty(int(received[source]), dtype=torch.uint8)
        found[source] = incoming.numpy()
        with _peers():
            works.append(dist.irecv(incoming, source))
            works.append(dist.isend(written[id(message)], target))
    with _peers():
        for work in works:
            work.wait()
    return found


@contextlib.contextmanager
def _peers():
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).split("\n")[0]) from error
