"""A catalogue with features and vectors, what serves it, and the same answers without serving."""

import socket
import subprocess
import time

import numpy as np
import pandas as pd

from bigdl.friesian.serving import EmbeddedStore, ItemIndex

USERS, ITEMS, DIM = 300, 400, 8
CANDIDATES, BEST = 40, 5


def users_frame(seed=0):
    """Users with odd numbers, so that even ones are unknown."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "user": 2 * rng.permutation(USERS) + 1,
            "age": rng.integers(15, 80, USERS).astype(np.int32),
            "city": rng.choice(["Oslo", "Rome", "Łódź", ""], USERS),
            "premium": rng.random(USERS) < 0.3,
            "spent": np.where(rng.random(USERS) < 0.2, np.nan, rng.random(USERS)),
            "prediction": list(rng.standard_normal((USERS, DIM)).astype(np.float32)),
            "seen": [
                (3 * rng.permutation(ITEMS)[: rng.integers(0, 30)]).tolist() for _ in range(USERS)
            ],
        }
    )


def items_frame(seed=1):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "item": 3 * rng.permutation(ITEMS),
            "price": rng.random(ITEMS).astype(np.float32),
            "kind": rng.integers(0, 9, ITEMS).astype(np.int8),
            "vector": list(rng.standard_normal((ITEMS, DIM)).astype(np.float32)),
        }
    )


class Linear:
    """A ranker whose score of a row depends on no other row."""

    columns = ("age", "price", "kind", "user", "item")

    def predict(self, inputs):
        return linear(*(np.asarray(inputs[name]) for name in self.columns))


def linear(age, price, kind, user, item):
    mixed = (np.asarray(user, np.int64) * 7919 + np.asarray(item, np.int64) * 104729) % 1000
    numbers = [np.asarray(each, np.float64) for each in (age, price, kind)]
    return (numbers[0] / 80 + numbers[1] * 2 + numbers[2] / 9 + mixed / 100).astype(np.float32)


def offline(users, items, numbers, candidates=CANDIDATES, best=BEST):
    """Items and scores of users by frames alone; None for a user that is unknown."""
    known = {row.user: row for row in users.itertuples()}
    ids, price, kind = (items[name].to_numpy() for name in ("item", "price", "kind"))
    vectors = np.stack(items["vector"]).astype(np.float64)
    answers = {}
    for number in np.unique(numbers):
        row = known.get(number)
        if row is None:
            answers[number] = None
            continue
        product = (vectors @ np.asarray(row.prediction, np.float64)).astype(np.float32)
        fresh = ~np.isin(ids, row.seen)
        order = np.lexsort((ids[fresh], -product[fresh]))[:candidates]
        at = np.flatnonzero(fresh)[order]
        scores = linear(row.age, price[at], kind[at], number, ids[at])
        ranked = np.lexsort((ids[at], -scores))[:best]
        answers[number] = ids[at][ranked].tolist(), scores[ranked].tolist()
    return answers


def random_users(count, seed=5):
    """Numbers of users: some are unknown, most are there several times."""
    return np.random.default_rng(seed).integers(-5, 2 * USERS + 20, count)


def assert_equal_offline(answers, wanted, numbers, popular):
    assert [each.user_id for each in answers] == list(numbers)
    for each in answers:
        expected = wanted[each.user_id]
        if expected is None:
            assert (each.source, each.item_ids.tolist()) == ("popular", popular[:BEST])
        else:
            assert each.source == "ranked"
            assert (each.item_ids.tolist(), each.scores.tolist()) == expected


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_redis(folder, *options, port=None):
    """Start a Redis server without persistence; returns the process and its port."""
    import redis

    port = port or free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        try:
            with redis.Redis(port=port, socket_timeout=1) as client:
                client.ping()  # is refused also while it loads what it kept
            return process, port
        except redis.ConnectionError:
            time.sleep(0.02)
    process.kill()
    raise AssertionError("Redis did not start within 20 s")


def catalogue_store(folder, catalogue):
    """The frames of users and items as a store in a folder."""
    made = EmbeddedStore(folder)
    made.replace({"user": catalogue[0], "item": catalogue[1].drop(columns="vector")})
    return made


def catalogue_index(catalogue):
    return ItemIndex(catalogue[1]["item"], np.stack(catalogue[1]["vector"]))
