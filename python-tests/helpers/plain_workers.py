"""Plain processes that stand in for an engine's workers, any number of them without Spark's slots.

They run the same programs over the same channel with the same ``Worker``; only how they start and
what gives them their rows is different.
"""

import itertools
import tempfile
import threading
import time

import cloudpickle
import numpy as np

from bigdl.runtime.channel import Channel, QueueReader
from bigdl.runtime.engine import PeerLost
from bigdl.runtime.launch import launch
from bigdl.runtime.shards.columns import ArraySpec, ColumnSpec
from bigdl.runtime.shards.shard import Shard, SpoolWriter
from bigdl.runtime.worker import ChannelConnection, Worker


class Crew:
    """`size` processes that wait for programs; a context that none of them leaves."""

    def __init__(self, size: int):
        self.size = size
        self._channel = Channel("127.0.0.1")
        self._runs = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._launch)

    def _launch(self):
        try:
            launch(serve, self.size, (self._channel.address,))
        except BaseException as error:
            self._failure = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._task(None)
        self._thread.join()
        self._channel.close()

    def run(self, program, shards, state=None, options=None, on_event=None):
        """Run ``program(worker)`` on as many workers as there are `shards`.

        Parameters
        ----------
        program : callable
        shards : list of dict of str to dict of str to ndarray
            The columns of every feed, for each rank.

        Returns
        -------
        results : list
            In rank order; any picklable object.
        messages : list of (dict, bytes)
            What the workers have sent.
        """
        line = self._task((program, shards), state, options)
        outcomes = [self._outcome(line, rank) for rank in range(len(shards))]
        messages = list(QueueReader(line, "messages", data=True).take())
        for message in messages if on_event else ():
            on_event("message", message)
        causes = [o for o in outcomes if isinstance(o, Exception)]
        for error in sorted(causes, key=lambda e: isinstance(e, PeerLost)):
            raise error
        return outcomes, messages

    def _outcome(self, line, rank):
        give_up = time.monotonic() + 100
        while not line.has(f"outcome/{rank}"):
            if self._failure is not None:
                raise self._failure
            assert time.monotonic() < give_up, f"no outcome of rank {rank}"
            time.sleep(0.002)
        return cloudpickle.loads(line.take_bytes(f"outcome/{rank}"))

    def _task(self, task, state=None, options=None):
        self._runs += 1
        line = self._channel.attempt(self._runs)
        line.set_json("options", options or {})
        if state is not None:
            line.put_bytes("state", state)
        line.put_bytes("task", cloudpickle.dumps(task))
        return line


def serve(rank, address):
    """Run the programs of a crew until there are no more; runs in every process of it."""
    for run in itertools.count(1):
        line = address.connect(run)
        task = cloudpickle.loads(line.take_bytes("task", delete=False))
        if task is None:
            return
        program, shards = task
        if rank >= len(shards):
            continue
        with tempfile.TemporaryDirectory() as directory:
            worker = Worker(
                rank,
                len(shards),
                threads=1,
                shards={k: spooled(directory, k, v) for k, v in shards[rank].items()},
                channel=line,
                driver=ChannelConnection(line),
                host="127.0.0.1",
                local_dir=directory,
                timeout=60.0,
            )
            try:
                outcome = program(worker)
            except Exception as error:
                line.count("failed", 1)
                outcome = error
            worker.clean_up()
        line.put_bytes(f"outcome/{rank}", cloudpickle.dumps(outcome))


def spooled(directory, name, columns) -> Shard:
    """The rows of one worker, as a Feed leaves them."""
    arrays = {key: np.ascontiguousarray(value) for key, value in columns.items()}
    specs = [ColumnSpec(k, "plain", a.dtype.name, a.ndim - 1, "") for k, a in arrays.items()]
    leaves = [ArraySpec(key, None, a.dtype.name, a.shape[1:]) for key, a in arrays.items()]
    writer = SpoolWriter(directory, 0, name, specs)
    rows = len(next(iter(arrays.values())))
    writer.append(0, 0, rows, leaves, list(arrays.values()))
    return Shard(writer.finish())


_shared: dict[int, Crew] = {}


def shared_crew(size: int) -> Crew:
    """Return the crew of this size of all test files that one process runs."""
    if size not in _shared:
        _shared[size] = Crew(size).__enter__()
    return _shared[size]


def stop_shared_crews() -> None:
    """End the processes of the shared crews."""
    while _shared:
        _shared.popitem()[1].__exit__()


class CrewJob:
    """A program on a crew, with the interface of an engine's Job."""

    def __init__(self, crew, shards, program):
        self._crew, self._shards, self._program = crew, shards, program

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def attempt(self, options=None, state=None, on_event=None):
        return self._crew.run(self._program, self._shards, state, options, on_event)[0]
