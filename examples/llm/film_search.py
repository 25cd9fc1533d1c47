"""Find films by words, and films like those that a user liked: recall by a sentence encoder.

    python examples/llm/film_search.py --data-dir ml-100k --query "spaceships and aliens"

Titles and genres of the films are embedded on Spark and become an index of Friesian. A query is
embedded by the same model. A user is the mean of the films that he or she liked; films that the
user has rated are filtered inside the search. Without a folder some films are generated.
"""

import argparse
import random

import numpy as np
import packaged_models
import pandas as pd

from bigdl.friesian.serving import ItemIndex
from bigdl.llm import TextModel, embed
from bigdl.orca import init_orca_context, stop_orca_context

GENRES = [
    *["unknown", "action", "adventure", "animation", "children", "comedy", "crime"],
    *["documentary", "drama", "fantasy", "film noir", "horror", "musical", "mystery", "romance"],
    *["science fiction", "thriller", "war", "western"],
]


def read(folder):
    """Return films and ratings of MovieLens 100K."""
    names = ["item", "title", "date", "video", "url", *GENRES]
    films = pd.read_csv(f"{folder}/u.item", sep="|", names=names, encoding="latin-1")
    kinds = films[GENRES].to_numpy() > 0
    films["text"] = [
        f"{title}: {', '.join(np.array(GENRES)[row])}"
        for title, row in zip(films["title"], kinds, strict=True)
    ]
    ratings = pd.read_csv(f"{folder}/u.data", sep="\t", names=["user", "item", "rating", "time"])
    return films[["item", "text"]], ratings


def generate(items=60, users=20):
    """Return films of three genres, and ratings of users who each like one of them."""
    draw = random.Random(0)
    things = {
        "western": ["sheriff", "cowboys", "saloon", "gold rush"],
        "science fiction": ["spaceship", "aliens", "robots", "distant planets"],
        "romance": ["wedding", "love letters", "first kiss", "heartbreak"],
    }
    kinds = [list(things)[n % 3] for n in range(items)]
    texts = [f"Film {n} about {draw.choice(things[kind])}: {kind}" for n, kind in enumerate(kinds)]
    rows = [
        (user, item, 5 if item % 3 == user % 3 else 1, time)
        for user in range(users)
        for time, item in enumerate(draw.sample(range(items), 12))
    ]
    ratings = pd.DataFrame(rows, columns=["user", "item", "rating", "time"])
    return pd.DataFrame({"item": range(items), "text": texts}), ratings


def recall_of_liked(index, films, ratings, k):
    """Return how often the last film that a user liked is among `k` films for the user.

    Returns
    -------
    hit_rate, chance : float
        With the vectors of the films that the user liked before, and with random films.
    """
    vectors = dict(zip(films["item"], films["embedding"], strict=True))
    hits, chances = [], []
    for _, rows in ratings.sort_values(["user", "time"], kind="stable").groupby("user"):
        liked = rows.loc[rows["rating"] >= 4, "item"].tolist()
        if len(liked) < 2:
            continue
        *before, last = liked
        seen = [item for item in rows["item"] if item != last]
        user = np.mean([vectors[item] for item in before], axis=0)
        hits.append(last in index.search([user], k, exclude=[seen]).ids)
        chances.append(k / (len(films) - len(seen)))
    return float(np.mean(hits)), float(np.mean(chances))


def main(argv=None):
    """Build the index, search it, and return the best texts and the hit rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="folder of MovieLens 100K")
    parser.add_argument("--query", default="spaceships and aliens")
    parser.add_argument("--encoder", help="folder of an embedding model")
    parser.add_argument("-k", type=int, default=10)
    options = parser.parse_args(argv)

    films, ratings = read(options.data_dir) if options.data_dir else generate()
    model = TextModel(packaged_models.encoder(options.encoder))
    sc = init_orca_context("local", cores=2)
    try:
        from pyspark.sql import SparkSession

        frame = SparkSession(sc).createDataFrame(films)
        films = embed(frame, "text", model=model).toPandas()
    finally:
        stop_orca_context()
    index = ItemIndex(films["item"], np.stack(films["embedding"]), metric="cosine")

    query = embed(pd.DataFrame({"text": [options.query]}), "text", model=model)["embedding"][0]
    best = index.search([query], options.k).ids.tolist()
    texts = films.set_index("item")["text"]
    print("\n".join([f"Films for {options.query!r}:", *texts[best[:5]]]))
    hit_rate, chance = recall_of_liked(index, films, ratings, options.k)
    print(f"Last liked film among {options.k} films: {hit_rate:.3f}; of random films: {chance:.3f}")
    return texts[best].tolist(), hit_rate, chance


if __name__ == "__main__":
    main()
