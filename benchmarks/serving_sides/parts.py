"""Recommender from Faiss, Redis and OpenVINO by hand, for other environments."""

import threading
from pathlib import Path

import faiss
import numpy as np
import openvino
import redis

DIM, BEST = 64, 10
NAMES = [f"c{number}" for number in range(26)]
OF_USER, OF_ITEM = NAMES[:13], NAMES[13:]
USER = np.dtype([("c", np.int32, len(OF_USER)), ("v", np.float32, DIM)])


def load_redis(port, users, vectors, items):
    """Write a key for each user and each item: the bytes of its row."""
    client = redis.Redis(port=port)
    rows = np.zeros(len(users), USER)
    rows["c"], rows["v"] = users, vectors
    client.mset({f"u:{i}": row.tobytes() for i, row in enumerate(rows)})
    for start in range(0, len(items), 10_000):
        part = enumerate(items[start : start + 10_000], start)
        client.mset({f"i:{i}": row.tobytes() for i, row in part})


class Parts:
    """Thread-safe recommender of the manual components.

    ``folder`` has ``items.faiss`` and the network ``model/ov_saved_model.xml``.
    """

    def __init__(self, folder, port, candidates, searched):
        faiss.omp_set_num_threads(1)
        self._index = faiss.read_index(str(Path(folder, "items.faiss")))
        self._parameters = faiss.SearchParametersIVF(nprobe=searched)
        how = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 2}
        network = str(Path(folder, "model", "ov_saved_model.xml"))
        self._network = openvino.Core().compile_model(network, "CPU", how)
        self._redis = redis.Redis(port=port)
        self._candidates = candidates
        self._own = threading.local()

    def search(self, vectors):
        faiss.omp_set_num_threads(1)  # it is a setting of each thread
        return self._index.search(vectors, self._candidates, params=self._parameters)[1]

    def score(self, columns):
        if not hasattr(self._own, "request"):
            self._own.request = self._network.create_infer_request()
        return self._own.request.infer(columns, share_inputs=True)[0]

    def recommend(self, users):
        """Return the best items of each user and their scores, as int32 rows and float32 bits."""
        rows = np.frombuffer(b"".join(self._redis.mget([f"u:{u}" for u in users])), USER)
        neighbors = self.search(np.ascontiguousarray(rows["v"]))
        counts = (neighbors >= 0).sum(1)
        ids = neighbors[neighbors >= 0]
        items = b"".join(self._redis.mget([f"i:{i}" for i in ids.tolist()]))
        of_items = np.frombuffer(items, np.int32).reshape(-1, len(OF_ITEM))
        of_users = np.repeat(rows["c"], counts, axis=0)
        columns = [*np.ascontiguousarray(of_users.T), *np.ascontiguousarray(of_items.T)]
        scores, answers, start = self.score(columns), [], 0
        for count in counts.tolist():
            own, those = scores[start : start + count], ids[start : start + count]
            start += count
            best = np.argpartition(-own, BEST)[:BEST]
            best = best[np.argsort(-own[best])]
            answers.append(np.concatenate([those[best].astype(np.int32), own[best].view(np.int32)]))
        return np.stack(answers)
