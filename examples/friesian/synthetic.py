"""Generated data with four schemas and a signal of known strength.

Each function also returns the true probability of every row, or of every pair: the prediction of an
ideal model. So every program knows the best possible metric.
"""

import numpy as np
import pandas as pd


def movielens(users=300, items=200, per_user=20, genres=8, seed=0):
    """Generate MovieLens-like ratings: users prefer two genres and popular films.

    Returns
    -------
    ratings : pandas.DataFrame
        ``user`` and ``item`` from 1 on, ``rating``, ``time``.
    user_facts, item_facts : pandas.DataFrame
        ``user``, ``age``, ``occupation``, and ``item``, ``genre``.
    chance : ndarray of shape (users + 1, items + 1)
        How likely a user chooses an item.
    """
    rng = np.random.default_rng(seed)
    genre = rng.integers(0, genres, items + 1)
    likes = rng.integers(0, genres, (users + 1, 2))
    popularity = 1 / rng.permutation(np.arange(1, items + 2)) ** 0.5
    fits = (genre[None] == likes[:, :1]) * 1.0 + (genre[None] == likes[:, 1:]) * 0.5
    chance = popularity * np.where(fits > 0, fits, 0.02)
    chance[:, 0] = 0
    chance /= chance.sum(1, keepdims=True)
    chosen = [
        (user, item, 3 + rng.integers(0, 3), 1000 * user + time)
        for user in range(1, users + 1)
        for time, item in enumerate(rng.choice(items + 1, per_user, False, chance[user]))
    ]
    ratings = pd.DataFrame(chosen, columns=["user", "item", "rating", "time"])
    people = np.arange(1, users + 1)
    user_facts = pd.DataFrame({"user": people, "age": rng.integers(15, 80, users)})
    # most people of an occupation like the same genre
    occupation = np.where(rng.random(users) < 0.8, likes[1:, 0], rng.integers(0, genres, users))
    user_facts["occupation"] = np.char.add("job", occupation.astype(str))
    names = np.char.add("genre", genre[1:].astype(str))
    item_facts = pd.DataFrame({"item": np.arange(1, items + 1), "genre": names})
    return ratings, user_facts, item_facts, chance


def opinions(users=300, items=200, per_user=40, genres=8, seed=0):
    """Generate MovieLens-like ratings that depend on film quality and preferred genres.

    Returns
    -------
    ratings, user_facts, item_facts : pandas.DataFrame
        As those of :func:`movielens`.
    value : ndarray of shape (users + 1, items + 1)
        The rating of an item by a user, without what is chance.
    """
    ratings, user_facts, item_facts, _ = movielens(users, items, per_user, genres, seed)
    rng = np.random.default_rng([seed, 1])
    genre = item_facts["genre"].str.removeprefix("genre").astype(int).to_numpy()
    value = 3.2 + 0.4 * rng.normal(size=items + 1) + 0.3 * rng.normal(size=(users + 1, 1))
    value[:, 1:] += 0.8 * rng.normal(size=(users + 1, genres))[:, genre]
    rating = value[ratings["user"], ratings["item"]] + rng.normal(0, 0.5, len(ratings))
    ratings["rating"] = rating.round().clip(1, 5).astype(int)
    return ratings, user_facts, item_facts, value


def criteo(rows=4000, numbers=13, categories=26, seed=0):
    """Generate Criteo-like ad clicks: I1 … counts, C1 … hashed categories.

    Returns
    -------
    clicks : pandas.DataFrame
        ``id`` in the order of time, ``label``, I1 …, C1 …, with missing values.
    chance : ndarray of shape (rows,)
    """
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"id": np.arange(rows)})
    score = np.full(rows, -0.5)
    for i in range(1, numbers + 1):
        counts = rng.lognormal(1.0, 1.2, rows).astype(int)
        score += (0.8 if i <= 2 else 0.0) * (np.log1p(counts) - 1.3)
        missing = rng.random(rows) < 0.1
        frame[f"I{i}"] = pd.array(np.where(missing, 0, counts), "Int32")
        frame.loc[missing, f"I{i}"] = pd.NA
    codes = []
    for i in range(1, categories + 1):
        size = (12, 20, 50, 300)[i % 4]
        code = np.minimum(rng.zipf(1.3, rows), size)
        codes.append(code)
        words = np.array([f"{(7919 * i + 31 * k) % 2**32:08x}" for k in range(size + 1)])
        frame[f"C{i}"] = np.where(rng.random(rows) < 0.05, None, words[code])
        if i <= 4:
            score += rng.normal(0, 0.8, size + 1)[code]
    if categories > 1:  # a signal that only a cross can learn
        score += rng.normal(0, 1.2, (400, 400))[codes[0] % 400, codes[1] % 400]
    chance = 1 / (1 + np.exp(-score))
    frame.insert(1, "label", (rng.random(rows) < chance).astype(np.int32))
    return frame, chance


def recsys(rows=4000, users=300, authors=150, seed=0):
    """Generate engagements like those of the RecSys Challenge 2021, with two targets.

    Returns
    -------
    engagements : pandas.DataFrame
        ``engaging_user``, ``author``, ``language``, ``media`` (missing for none), ``hashtags``
        (several in a cell), ``followers``, ``timestamp``, ``like``, ``retweet``.
    chance : ndarray of shape (rows, 2)
        Of like and retweet.
    """
    rng = np.random.default_rng(seed)
    user = np.minimum(rng.zipf(1.2, rows), users) - 1
    author = np.minimum(rng.zipf(1.2, rows), authors) - 1
    taste, topic = rng.normal(size=(users, 3)), rng.normal(size=(authors, 3))
    media = rng.integers(0, 4, rows)
    tags = rng.integers(0, 30, (rows, 2))
    follow = rng.lognormal(6, 2, rows).astype(np.int64)
    base = 0.9 * (taste[user] * topic[author]).sum(1) + np.array([0, 0.7, -0.7, 0.2])[media]
    like = base + 0.2 * (np.log1p(follow) - 6) + rng.normal(0, 0.5, 30)[tags].sum(1)
    retweet = 0.8 * base - 1.0 + rng.normal(0, 0.8, authors)[author]
    chance = 1 / (1 + np.exp(-np.stack([like, retweet], 1)))
    hits = (rng.random((rows, 2)) < chance).astype(np.int32)
    frame = pd.DataFrame(
        {
            "engaging_user": np.char.add("u", user.astype(str)),
            "author": np.char.add("a", author.astype(str)),
            "language": rng.choice(["en", "ja", "es", "pt"], rows),
            "media": np.array([None, "Photo", "Video", "GIF"], object)[media],
            "hashtags": [f"h{a},h{b}" for a, b in tags],
            "followers": follow,
            "timestamp": 1_612_000_000 + np.sort(rng.integers(0, 7 * 86400, rows)),
            "like": hits[:, 0],
            "retweet": hits[:, 1],
        }
    )
    return frame, chance


def sessions(users=300, items=120, categories=10, length=12, seed=0):
    """Generate Amazon-like purchases: most users stay in their category.

    Returns
    -------
    reviews : pandas.DataFrame
        ``user``, ``item``, ``time``.
    meta : pandas.DataFrame
        ``item``, ``category``.
    """
    rng = np.random.default_rng(seed)
    category = rng.integers(0, categories, items)
    shelves = [np.flatnonzero(category == c) for c in range(categories)]
    shelves = [shelf if len(shelf) else np.arange(items) for shelf in shelves]
    rows = []
    for user in range(users):
        now = int(rng.integers(0, categories))
        for time in range(int(rng.integers(4, length + 1))):
            if rng.random() < 0.1:  # interests evolve
                now = int(rng.integers(0, categories))
            item = rng.choice(shelves[now] if rng.random() < 0.95 else items)
            rows.append((f"A{user}", f"B{item}", time))
    reviews = pd.DataFrame(rows, columns=["user", "item", "time"])
    names = np.char.add("B", np.arange(items).astype(str))
    meta = pd.DataFrame({"item": names, "category": np.char.add("c", category.astype(str))})
    return reviews, meta


def auc(label, score):
    """Return the area under the ROC curve; ties count half.

    Parameters
    ----------
    label, score : array_like of shape (n,)
    """
    label, score = np.asarray(label) > 0, np.asarray(score)
    rank = pd.Series(score).rank().to_numpy()
    positive, negative = label.sum(), (~label).sum()
    return (rank[label].sum() - positive * (positive + 1) / 2) / (positive * negative)


def hit_rate(user, label, score, best=10):
    """Return the share of users whose row with label 1 is among their `best` scores.

    Parameters
    ----------
    user, label, score : array_like of shape (n,)
    """
    frame = pd.DataFrame({"user": user, "label": label, "score": score})
    frame["rank"] = frame.groupby("user")["score"].rank(ascending=False, method="max")
    return float((frame[frame["label"] == 1]["rank"] <= best).mean())


def ndcg(user, label, score, best=10):
    """Return the mean NDCG of the `best` scores of each user.

    The gain of a label is ``2 ** label - 1``; equal scores stand in random order.

    Parameters
    ----------
    user, label, score : array_like of shape (n,)
    """
    frame = pd.DataFrame({"user": user, "gain": 2.0 ** np.asarray(label) - 1, "score": score})
    frame = frame.sample(frac=1, random_state=0)

    def gains(by):
        rank = frame.groupby("user")[by].rank(ascending=False, method="first")
        gain = (frame["gain"] / np.log2(rank + 1)).where(rank <= best, 0.0)
        return gain.groupby(frame["user"]).sum()

    return float((gains("score") / gains("gain")).mean())
