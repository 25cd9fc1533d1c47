"""Tables with what goes wrong in real ones, and plain Python beside which operators are tested."""

import math

import numpy as np
import pandas as pd

SCHEMA = (
    "user bigint, item int, time bigint, city string, tags string, price double, weight float, "
    "age int, small smallint, flag boolean, history array<int>"
)


def messy_rows(count: int, seed: int) -> list[tuple]:
    """Rows with nulls, NaN, empty arrays, a skewed key and equal rows."""
    rng = np.random.default_rng(seed)

    def maybe(value, share=0.2):
        return None if rng.random() < share else value

    def row():
        length = int(rng.integers(0, 6))
        return (
            int(0 if rng.random() < 0.5 else rng.integers(0, 6)),  # half of the rows of one user
            maybe(int(rng.integers(1, 12))),
            int(rng.integers(0, 20)),
            maybe(str(rng.choice(["oslo", "bern", "rome", "", "Zürich", "a,b"]))),
            maybe(str(rng.choice(["a,b", "c", "b,b,a", "", "z"]))),
            maybe(float(rng.choice([math.nan, -0.0, 0.0, 2.5, -7.25, 1e9]))),
            maybe(float(np.float32(rng.normal()))),
            maybe(int(rng.integers(-5, 90))),
            maybe(int(rng.integers(-3, 3))),
            maybe(bool(rng.random() < 0.5)),
            maybe([maybe(int(x)) for x in rng.integers(1, 12, length)]),
        )

    rows = [row() for _ in range(count)]
    return rows + rows[: count // 5]


def column(rows: list[tuple], name: str) -> list:
    names = [part.split()[0] for part in SCHEMA.split(", ")]
    return [row[names.index(name)] for row in rows]


def is_nan(value) -> bool:
    return isinstance(value, float) and math.isnan(value)


def same(found, wanted, tolerance=0.0) -> bool:
    """Whether two values, or nested lists of them, are equal; NaN equals NaN."""
    if isinstance(wanted, list | tuple | np.ndarray):
        return len(found) == len(wanted) and all(
            same(a, b, tolerance) for a, b in zip(found, wanted, strict=True)
        )
    if found is None or wanted is None:
        return found is wanted
    if is_nan(found) or is_nan(wanted):
        return is_nan(found) and is_nan(wanted)
    if tolerance:
        return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    return found == wanted


def assert_same(found, wanted, tolerance=0.0):
    wanted = list(wanted)
    assert same(found, wanted, tolerance), f"\nfound  {found}\nwanted {wanted}"


def is_present(value) -> bool:
    return value is not None and not is_nan(value) and value is not pd.NA
