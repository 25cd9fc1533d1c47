"""Timed reads of Feast's online store: ``feast_store.py FOLDER REDIS_PORT ROWS``.

Reads commands from its input, such as ``redis 50 100``: of the store, 50 rows, 100 times; answers
with the milliseconds of each call as JSON.
"""

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, RepoConfig, ValueType
from feast.types import Int32

OF_ITEM = [f"c{number}" for number in range(13, 26)]


def made(folder, name, online, frame):
    file = folder / f"{name}.parquet"
    frame.to_parquet(file)
    store = FeatureStore(
        config=RepoConfig(
            project="films",
            registry=str(folder / f"{name}.db"),
            provider="local",
            online_store=online,
            entity_key_serialization_version=3,
        )
    )
    entity = Entity(name="item", join_keys=["item"], value_type=ValueType.INT64)
    view = FeatureView(
        name="items",
        entities=[entity],
        schema=[Field(name=each, dtype=Int32) for each in OF_ITEM],
        source=FileSource(path=str(file), timestamp_field="event_timestamp"),
    )
    store.apply([entity, view])
    for start in range(0, len(frame), 2000):
        store.write_to_online_store("items", frame[start : start + 2000])
    return store


def main(folder, port, rows):
    folder = Path(folder)
    rng = np.random.default_rng(1)
    columns = {name: rng.integers(0, 100, rows).astype(np.int32) for name in OF_ITEM}
    frame = pd.DataFrame({"item": np.arange(rows), **columns})
    frame = frame.assign(event_timestamp=datetime.now(UTC))
    online = {
        "sqlite": {"type": "sqlite", "path": str(folder / "f.sqlite")},
        "redis": {"type": "redis", "connection_string": f"127.0.0.1:{port}"},
    }
    stores = {name: made(folder, name, where, frame) for name, where in online.items()}
    features = [f"items:{name}" for name in OF_ITEM]
    print("ready", flush=True)
    for line in sys.stdin:
        name, count, times = line.split()
        took = []
        for _ in range(int(times)):
            ids = rng.integers(0, rows, int(count)).tolist()
            begin = time.perf_counter()
            asked = [{"item": each} for each in ids]
            features_read = (
                stores[name].get_online_features(features=features, entity_rows=asked).to_dict()
            )
            took.append(1000 * (time.perf_counter() - begin))
        assert len(features_read[OF_ITEM[0]]) == int(count)
        assert features_read[OF_ITEM[0]] == frame[OF_ITEM[0]].to_numpy()[ids].tolist()
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
