"""NDCG of fresh and of stale histories on MovieLens 100k by time, with the same weights.

    BIGDL_DATA=/path/to/data python benchmarks/fresh_histories.py [--epochs 20]

A SASRec model is trained on the older half of the events. Each event of the newer half is then
predicted from the user's events until then, from those of earlier seconds, and from those that a
refresh after every 100 or 1,000 events of all users had seen. Events of a user in one second are
ordered by item, so the last one says much about the next: the row of earlier seconds is free of
that. The weights stay those of the older half, so the difference is that of the histories. The
item is ranked among all items of the older half that the user has not rated yet; an event of
another item, or of an item that the user has rated, is left out. A user without known events gets
the popular items. Events are ordered by time, user and item.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from bigdl.friesian.sequential import SequenceRecommender

ROWS = 512
EARLIER = "earlier seconds"


def events_of(folder):
    names = ["user", "item", "rating", "time"]
    frame = pd.read_csv(Path(folder) / "ml-100k" / "u.data", sep="\t", names=names)
    return frame.sort_values(["time", "user", "item"], ignore_index=True).drop(columns="rating")


def ranks_of(scores, targets, seen):
    """Return mean ranks of targets among the items that are not seen."""
    result = np.zeros(len(targets))
    for row, (target, known) in enumerate(zip(targets, seen, strict=True)):
        of_row = scores[row].copy()
        wanted = of_row[target]
        of_row[known] = -np.inf
        of_row[target] = -np.inf
        result[row] = 1 + (of_row > wanted).sum() + (of_row == wanted).sum() / 2
    return result


class Histories:
    """Item ids of each user's events, with their positions in the stream."""

    def __init__(self, users, ids, times):
        self.ids, self.times = ids, times
        self.of_user = {user: np.flatnonzero(users == user) for user in np.unique(users)}

    def before(self, user, event):
        at = self.of_user[user]
        known = self.ids[at[: np.searchsorted(at, event)]]
        return known[known >= 0]

    def ended(self, user, event, refresh):
        """Return the events that a recommender with a refresh has seen before an event."""
        if refresh == EARLIER:
            first = np.searchsorted(self.times, self.times[event])  # all users' first of the second
            return self.before(user, first)
        return self.before(user, event // refresh * refresh)


def sasrec_scores(network, histories, popular, max_len):
    seq = np.zeros((len(histories), max_len), np.int64)
    for row, ids in enumerate(histories):
        newest = ids[-max_len:]
        seq[row, : len(newest)] = newest + 1
    with torch.inference_mode():
        scores = network(torch.from_numpy(seq)) @ network.items.matrix()[1:].T
    scores = scores.numpy()
    scores[[not len(each) for each in histories]] = popular
    return scores


def markov_scores(transitions, histories, popular):
    scale = popular / (popular.max() + 1)  # popularity decides between equal counts
    return np.stack([(transitions[each[-1]] if len(each) else 0) + scale for each in histories])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--max-len", type=int, default=50)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    frame = events_of(os.environ["BIGDL_DATA"])
    half = len(frame) // 2
    model = SequenceRecommender(
        "sasrec", max_len=options.max_len, windows="all", batch_size=32, epochs=options.epochs
    )
    model.fit(frame[:half])
    items = np.sort(frame["item"][:half].unique())
    at = np.searchsorted(items, frame["item"]).clip(max=len(items) - 1)
    ids = np.where(items[at] == frame["item"], at, -1)
    popular = np.bincount(ids[:half], minlength=len(items)).astype(float)
    transitions = np.zeros((len(items), len(items)))
    for _, rows in frame[:half].assign(id=ids[:half]).groupby("user"):
        np.add.at(transitions, (rows["id"].to_numpy()[:-1], rows["id"].to_numpy()[1:]), 1)
    users = frame["user"].to_numpy()
    known = Histories(users, ids, frame["time"].to_numpy())
    tested = []
    for event in range(half, len(frame)):
        seen = known.before(users[event], event)
        if ids[event] >= 0 and ids[event] not in seen:
            tested.append(event)
    rows = []
    for refresh in (1, EARLIER, 100, 1000):
        ranks = {"SASRec": [], "Markov": []}
        for first in range(0, len(tested), ROWS):
            part = tested[first : first + ROWS]
            targets = ids[part]
            seen = [known.before(users[each], each) for each in part]
            stale = [known.ended(users[each], each, refresh) for each in part]
            for name, scores in (
                ("SASRec", sasrec_scores(model.network, stale, popular, options.max_len)),
                ("Markov", markov_scores(transitions, stale, popular)),
            ):
                ranks[name].append(ranks_of(scores, targets, seen))
        for name, parts in ranks.items():
            rank = np.concatenate(parts)
            hits = rank <= 10
            ndcg = float((hits / np.log2(1 + rank)).mean())
            row = {"model": name, "refresh": refresh, "ndcg@10": ndcg, "hit_rate@10": hits.mean()}
            rows.append({**row, "events": len(rank)})
            print(
                json.dumps(
                    {
                        key: round(float(each), 4) if isinstance(each, float) else each
                        for key, each in rows[-1].items()
                    }
                ),
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, default=float, indent=1))


if __name__ == "__main__":
    main()
