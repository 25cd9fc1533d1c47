"""Latency of channel requests of workers, compared with torch's ``TCPStore``.

* ``join``: a connection is opened, and proved;
* ``question``: one short question and its answer;
* ``100 MB``: a value in chunks of 8 MB from a worker, taken by the driver;
* ``128 meet``: as many connections of one process say where they are and wait for all others, each
  asking for one after another;
* ``128 group``: the same, each asking for all at once, as gloo does in BigDL's workers.

Each worker is a separate process, except for the last.  Run it with no arguments; it prints
medians and ranges of interleaved repeats.
"""

import multiprocessing
import os
import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

from torch.distributed import TCPStore

from bigdl.runtime.group_store import GroupStore

REPEATS, QUESTIONS, SIZE, CHUNK, MANY = 5, 500, 100 << 20, 8 << 20, 128
CASES = ("join", "question", "100 MB", "128 meet", "128 group")


class Torch:
    """Store of torch without authentication."""

    def __init__(self):
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.address = self.store.port

    @staticmethod
    def connect(address):
        return TCPStore("127.0.0.1", address, None, False, timeout=timedelta(seconds=60))

    def close(self):
        del self.store


class Ours:
    """BigDL's channel, encrypted with `certificate`."""

    def __init__(self, certificate=None):
        from bigdl.runtime.channel import Channel

        self._channel = Channel("127.0.0.1", certificate=certificate)
        self.store = self._channel.attempt(1).store
        self.address = self._channel.address

    @staticmethod
    def connect(address):
        from bigdl.runtime.channel import Connection

        return Connection(address)

    def close(self):
        self._channel.close()


def encrypted():
    from bigdl.runtime.certificate import Certificate

    return Ours(Certificate.make())


SIDES = {"TCPStore": Torch, "channel": Ours, "channel, TLS": encrypted}


def worker(kind, address, pipe):
    """Run the requested operations and report their times."""
    data = os.urandom(SIZE)
    begin = time.perf_counter()
    store = kind.connect(address)
    pipe.send(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(QUESTIONS):
        store.add("count", 1)
    pipe.send((time.perf_counter() - begin) / QUESTIONS)
    pipe.recv()
    post = getattr(store, "post", store.set)
    for start in range(0, SIZE, CHUNK):
        post(f"data/{start}", data[start : start + CHUNK])
    store.set("data", b"")
    pipe.recv()


def meet(kind, address, at_once):
    """Let many connections wait for each other."""
    stores = [kind.connect(address) for _ in range(MANY)]
    keys = [f"here-{at_once}/{each}" for each in range(MANY)]

    def come(store, rank):
        store.set(keys[rank], b"x")
        if not at_once:
            for key in keys:
                store.get(key)
        elif isinstance(store, TCPStore):
            store.multi_get(keys)
        else:
            GroupStore(store, "").multi_get(keys)

    threads = [
        threading.Thread(target=come, args=each) for each in zip(stores, range(MANY), strict=True)
    ]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def measure(name):
    """Return the seconds of every case."""
    side = SIDES[name]()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    kind = Torch if isinstance(side, Torch) else Ours
    process = multiprocessing.get_context("spawn").Process(
        target=worker, args=(kind, side.address, theirs)
    )
    process.start()
    messages = [ours.recv(), ours.recv()]
    begin = time.perf_counter()
    ours.send("go")
    side.store.get("data")
    taken = 0
    for start in range(0, SIZE, CHUNK):
        taken += len(side.store.get(f"data/{start}"))
    messages.append(time.perf_counter() - begin)
    assert taken == SIZE
    ours.send("end")
    process.join()
    messages += [meet(kind, side.address, at_once) for at_once in (False, True)]
    side.close()
    return messages


def main():
    seconds = {name: [] for name in SIDES}
    fresh = {"max_workers": 1, "mp_context": multiprocessing.get_context("spawn")}
    for _ in range(REPEATS):
        for name in SIDES:  # a second TCPStore in the same process may hang
            with ProcessPoolExecutor(**fresh) as process:
                seconds[name].append(process.submit(measure, name).result())
    print("| Implementation | " + " | ".join(f"{case}, ms" for case in CASES) + " |")
    print("|---|" + "---|" * len(CASES))
    for name, runs in seconds.items():
        cells = []
        for times in zip(*runs, strict=True):
            low, middle, high = (f(times) * 1e3 for f in (min, statistics.median, max))
            cells.append(f"{middle:.3g} ({low:.3g}–{high:.3g})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
