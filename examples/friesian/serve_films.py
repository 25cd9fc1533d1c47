"""Train and serve a film recommender: two-tower retrieval and DeepFM ranking.

    python examples/friesian/serve_films.py --data-dir ml-100k --batch-size 1024 --lr 0.002

A two-tower model computes vectors of users and films, and DeepFM predicts the probability of a
choice. Features and vectors are written to a store, and film vectors to an index. A recommender
uses them by function calls in this process, and over gRPC with each stage in a separate service.
Its answers are compared with an offline computation, and with the held-out film of each user.
Without a folder the ratings are generated.
"""

import os
import tempfile
import time

import films
import numpy as np
import programs
import torch
from pyspark.sql import functions as F

from bigdl.friesian.feature import FeaturePipeline
from bigdl.friesian.models import DeepFM, InBatchSoftmax, TwoTower
from bigdl.friesian.serving import (
    EmbeddedStore,
    FeatureService,
    GrpcServer,
    IndexRecall,
    ItemIndex,
    ModuleRanker,
    RankingService,
    RecallService,
    Recommender,
    RecommenderClient,
    RecommenderService,
    RemoteFeatures,
    RemoteRanker,
    RemoteRecall,
)
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.pytorch import Estimator

TEMPERATURE = 0.15
CANDIDATES, BEST = 100, 10
REQUESTS = 100


def pipeline_of(table):
    """Return the feature pipeline of the models, fitted on a table."""
    pipeline = (
        FeaturePipeline()
        .cut_bins("age", [18, 25, 35, 45, 50, 56], out_cols="age_bin")
        .category_encode(["occupation", "genre"])
        .fillna(0, ["occupation", "genre"])
    )
    return pipeline.fit(table)


def trained(model, table, label, loss, options, epochs):
    """Train a model with an Estimator on a table and return it."""
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=loss,
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "label_cols": label, "seed": options.seed}
    est.fit(table.df, epochs=epochs, batch_size=options.batch_size, **columns)
    return est.get_model()


def embedded(tower, table, name):
    """Return the vectors of a tower as a frame of ids and vectors."""
    est = Estimator.from_torch(model=tower)
    predicted = est.predict(table.df, feature_cols=tower.feature_cols, batch_size=1024)
    predicted = predicted.select(name, "prediction").toPandas()
    return predicted.assign(prediction=[each.toArray() for each in predicted["prediction"]])


def prepare(options):
    """Train both models; return features with vectors, pipeline, ranker and held-out films."""
    ratings, users, items = films.facts(options)
    _, train, last = films.split(ratings)
    size = items.feature_schema(["item"]).cardinality("item")
    pairs = train.add_negative_samples(
        item_size=size, neg_num=4, exclude_history_col="seen", seed=options.seed
    )
    pairs = pairs.join(users, on="user").join(items, on="item")
    pairs = pairs.select("label", "user", "age", "occupation", "item", "genre").cache()
    pipeline = pipeline_of(pairs)
    pairs = pipeline.transform(pairs).cache()

    # all users and films as the pipeline sees them, each with irrelevant features
    age = F.lit(0).cast(users.schema["age"].dataType)
    people = users.append_column("genre", F.lit(""))
    titles = items.append_column("age", age).append_column("occupation", F.lit(""))
    people = pipeline.transform(people).select(*films.USER).cache()
    titles = pipeline.transform(titles).select(*films.ITEM).cache()
    schema = people.feature_schema().union(titles.feature_schema())
    counts = np.bincount(train.to_list("item"), minlength=size)
    towers = TwoTower.from_schema(schema, films.USER, films.ITEM, dim=32, hidden=(64,))
    loss = InBatchSoftmax(TEMPERATURE, counts)
    chosen = pairs.filter("label = 1").cache()
    towers = trained(towers, chosen, "item", loss, options, options.epochs)

    ranker = DeepFM.from_schema(schema, categories=[*films.USER, *films.ITEM], dim=16)
    ranker = trained(ranker, pairs, "label", torch.nn.BCELoss(), options, options.epochs // 2 or 1)

    seen = train.group_by("user", {"item": "collect_set"}).rename({"collect_set(item)": "seen"})
    users = users.to_pandas().merge(seen.to_pandas(), on="user")
    users = users.merge(embedded(towers.user, people, "user"), on="user")
    items = items.to_pandas().merge(embedded(towers.item, titles, "item"), on="item")
    # training removed the popularity of films, which affects choices
    popular = TEMPERATURE * np.log(np.maximum(counts, 1))
    users["prediction"] = [np.append(each, 1) for each in users["prediction"]]
    items["prediction"] = [
        np.append(vector, popular[number])
        for number, vector in zip(items["item"], items["prediction"], strict=True)
    ]
    best_known = np.argsort(-counts)[:BEST]
    return users, items, pipeline, ranker, best_known, last.to_pandas()


def offline(users, items, pipeline, ranker):
    """Compute the best films of each user with frames only, without the serving code."""
    vectors = np.stack(items["prediction"]).astype(np.float32).astype(np.float64)
    facts = items.drop(columns="prediction")
    answers = {}
    for user in users.itertuples():
        query = np.asarray(user.prediction, np.float32).astype(np.float64)
        product = (vectors @ query).astype(np.float32)
        product[items["item"].isin(user.seen)] = -np.inf
        nearest = np.lexsort((items["item"], -product))[:CANDIDATES]
        rows = facts.iloc[nearest].assign(user=user.user, age=user.age, occupation=user.occupation)
        columns = [pipeline.transform_row(row) for row in rows.to_dict("records")]
        inputs = [torch.tensor([row[name] for row in columns]) for name in ranker.feature_cols]
        with torch.inference_mode():
            scores = ranker.eval()(*inputs).numpy()
        order = np.lexsort((rows["item"], -scores))[:BEST]
        answers[user.user] = rows["item"].to_numpy()[order]
    return answers


def hit_rate(answers, last):
    """Return the share of answers that contain the held-out film."""
    pairs = zip(last["user"], last["item"], strict=True)
    return float(np.mean([item in answers[user] for user, item in pairs]))


def ask(recommend, users):
    """Send many requests, some for several users; return the answers and their milliseconds."""
    answers, times = {}, []
    for part in np.array_split(users, REQUESTS):
        begin = time.perf_counter()
        recommendations = recommend(part.tolist(), BEST)
        times.append(1000 * (time.perf_counter() - begin))
        answers |= {
            each.user_id: each.item_ids for each in recommendations if each.source == "ranked"
        }
    return answers, times


def main(argv=None):
    size, data = {"users": 300, "items": 200}, "MovieLens 100K"
    options = programs.parse(argv, __doc__, size=size, epochs=4, lr=0.005, data=data, output=True)
    programs.start(options)
    users, items, pipeline, ranker, popular, last = prepare(options)
    wanted = offline(users, items, pipeline, ranker)
    metrics = {"hr@10 offline": hit_rate(wanted, last)}

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output or scratch
        store = EmbeddedStore(os.path.join(folder, "features"))
        store.replace({"user": users, "item": items.drop(columns="prediction")})
        index = ItemIndex(items["item"], np.stack(items["prediction"]))
        index.save(os.path.join(folder, "index"))
        recall = IndexRecall(store, index, seen_col="seen")
        model = ModuleRanker(ranker)
        how = {"pipeline": pipeline, "candidates": CANDIDATES, "popular": popular}
        numbers = users["user"].to_numpy()
        with Recommender(store, recall, model, **how) as recommender:
            here, times = ask(recommender.recommend, numbers)
            metrics["hr@10 in one process"] = hit_rate(here, last)
            metrics["ms of a request in one process"] = float(np.median(times))
        with (
            GrpcServer([FeatureService(store)]) as features_at,
            GrpcServer([RankingService(model)]) as ranking_at,
            RemoteFeatures(f"127.0.0.1:{features_at.port}") as features,
            RemoteRanker(f"127.0.0.1:{ranking_at.port}") as scores,
            GrpcServer([RecallService(IndexRecall(features, index, seen_col="seen"))]) as recall_at,
            RemoteRecall(f"127.0.0.1:{recall_at.port}") as candidates,
            Recommender(features, candidates, scores, model.columns, **how) as recommender,
            GrpcServer([RecommenderService(recommender)]) as server,
            RecommenderClient(f"127.0.0.1:{server.port}") as client,
        ):
            remote, times = ask(client.recommend, numbers)
            metrics["hr@10 by four services"] = hit_rate(remote, last)
            metrics["ms of a request by four services"] = float(np.median(times))
    metrics["users with the same answer"] = sum(
        np.array_equal(here[user], each) and np.array_equal(remote[user], each)
        for user, each in wanted.items()
    )
    metrics["users"] = len(users)
    metrics["requests"] = 2 * REQUESTS
    return programs.report(metrics)


if __name__ == "__main__":
    main()
    stop_orca_context()
