"""Validation data whose numbers were saved in other types than those of the training data."""

import sys

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, Dataset

from bigdl.orca.data import XShards
from bigdl.orca.learn.pytorch import Estimator
from bigdl.training.batches import casts, form_of, in_form

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS = 6
WHOLE = np.arange(2 * ROWS).reshape(ROWS, 2)
COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"]}


class Samples(Dataset):
    def __init__(self, x, y):
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def parquet(x, y, folder):
    path = folder / f"{x.dtype}.parquet"
    pd.DataFrame({"x": list(x), "y": y}).to_parquet(path)
    return str(path)


FORMS = {
    "arrays": lambda x, y, folder: ((x, y), {}),
    "several arrays": lambda x, y, folder: ({"x": x, "y": y}, COLUMNS),
    "pandas": lambda x, y, folder: (pd.DataFrame({"x": list(x), "y": y}), COLUMNS),
    "XShards": lambda x, y, folder: (XShards.partition({"x": x, "y": y}, 2), {}),
    "a loader": lambda x, y, folder: (DataLoader(Samples(x, y), 2), {}),
    "Parquet": lambda x, y, folder: (parquet(x, y, folder), COLUMNS),
}


class Floating(nn.Linear):
    """Takes numbers of any type."""

    def forward(self, x):
        return super().forward(x.float())


def estimator(kind=nn.Linear):
    def model(config):
        torch.manual_seed(0)
        return kind(2, 1)

    return Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=1e-3),
        loss=nn.MSELoss(),
        workers_per_node=2,
        log_to_driver=False,
    )


@pytest.mark.parametrize("form", FORMS)
def test_whole_numbers_are_validated_as_the_floats_of_training(orca_spark, tmp_path, form):
    floats = WHOLE.astype(np.float32)
    data, options = FORMS[form](floats, floats[:, 0].copy(), tmp_path)
    other, _ = FORMS[form](WHOLE, WHOLE[:, 0].astype(np.int32), tmp_path)
    est = estimator()
    stats = est.fit(data, validation_data=other, batch_size=4, **options)
    with torch.no_grad():
        found = est.get_model()(torch.from_numpy(floats))[:, 0].numpy()
    assert stats[0]["val_loss"] == pytest.approx(((found - floats[:, 0]) ** 2).mean(), rel=1e-5)


def test_what_the_type_cannot_hold_is_named(orca_spark):
    halves = WHOLE.astype(np.float32) + 0.5
    y = WHOLE[:, 0] % 2
    est = estimator(Floating)
    with refused("data-value", "'x[0]'", "validation_data", "5"):
        est.fit((WHOLE, y), validation_data=(halves, y))


NUMBER, VECTOR, FLAG = ["", "int64", []], ["", "float32", [3]], ["", "bool", []]


@pytest.mark.parametrize(
    ("own", "others", "message"),
    [
        ([[FLAG]], [[NUMBER]], ("data-schema", "'x'", "validation_data", "int64")),
        ([[VECTOR]], [[NUMBER]], ("data-schema", "'x'", "float32", "1")),
        ([[NUMBER]], [[["a", "int64", []]]], ("data-schema",)),
        ([[NUMBER]], [[NUMBER], [NUMBER]], ("data-schema", "1", "2")),
    ],
)
def test_features_of_another_form_are_refused_and_targets_left(own, others, message):
    with refused(*message):
        casts(["x"], own, others, is_target=False)
    assert casts(["x"], own, others, is_target=True) == {}


def test_batches_take_the_dtypes_of_others_where_their_forms_meet():
    training = [{"a": torch.rand(2), "b": torch.rand(2, 3)}, torch.rand(2), "text"]
    given = [{"a": torch.arange(2), "b": torch.arange(2)}, torch.tensor([True, False]), "other"]
    made = in_form(given, form_of(training))
    assert form_of(made) == [
        {"a": (torch.float32, 1), "b": (torch.int64, 1)},
        (torch.bool, 1),
        None,
    ]
    assert made[2] == "other"
    assert in_form(given, None) is given
