"""Generated queries of Parquet files return the rows of Spark if pyarrow evaluates them."""

import datetime
import decimal
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.versions import to_arrow
from bigdl.orca.data.lake_tables.scans import file_tasks

INF, NAN = math.inf, math.nan
DOUBLES = [0.0, -0.0, 1.5, -1.5, NAN, INF, -INF, 1e300, 2.0**31, -(2.0**63), 2.0**63, 0.1, None]
INTS = [0, 1, -1, 127, 128, -129, 32768, 2**31 - 1, -(2**31), 5, None]
LONGS = [0, 1, -1, 2**31, -(2**40), 2**53 + 1, 2**63 - 1, -(2**63), 100, None]
TEXTS = ["", "a", "ab", "abc", "b", "é", "a%", "A", "\u00ff", "\U0001f600", None]
DAYS = [datetime.date(2020, 1, 1), datetime.date(1970, 1, 1), datetime.date(2262, 5, 1), None]
ZONED = [
    datetime.datetime(2020, 1, 1, 12, 30, 0, 123456, datetime.UTC),
    datetime.datetime(1969, 12, 31, 23, 59, 59, 999999, datetime.UTC),
    datetime.datetime(2300, 1, 1, tzinfo=datetime.UTC),
    None,
]
DECIMALS = [decimal.Decimal(each) for each in ("0.00", "1.50", "-1.50", "123456.78")] + [None]
SCHEMA = pa.schema(
    {
        "byte": pa.int8(),
        "short": pa.int16(),
        "int": pa.int32(),
        "long": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "flag": pa.bool_(),
        "text": pa.string(),
        "data": pa.binary(),
        "day": pa.date32(),
        "time": pa.timestamp("us", "UTC"),
        "local": pa.timestamp("us"),
        "money": pa.decimal128(8, 2),
        "wide": pa.decimal128(30, 4),
        "floats": pa.list_(pa.float64()),
    }
)
LITERALS = {
    "byte": ["0Y", "1Y", "127Y", "-128Y"],
    "short": ["0S", "300S", "1"],
    "int": ["0", "128", "5", "2147483647", "1.5", "10000000000"],
    "long": ["0L", "9007199254740993L", "100", "9223372036854775807L"],
    "float": ["0.5", "float('NaN')", "float('-0.0')", "float('Infinity')", "1.5F", "1.5"],
    "double": ["0.0D", "double('NaN')", "-0.0D", "1.5", "double('-Infinity')", "0.1D", "2"],
    "flag": ["true", "false"],
    "text": ["''", "'a'", "'ab'", "'\u00ff'", "'b'"],
    "data": ["X'61'", "X''", "X'ff'"],
    "day": ["date'2020-01-01'", "date'1970-01-01'", "'2020-01-01'"],
    "time": ["timestamp'2020-01-01 12:30:00.123456+00:00'", "timestamp'2000-01-01 02:00:00+05:00'"],
    "local": ["timestamp_ntz'2020-01-01 12:30:00.123456'", "timestamp_ntz'1970-01-01 00:00:00'"],
    "money": ["1.5BD", "0.00BD", "123456.78BD", "1"],
    "wide": ["1.5BD", "-1.5000BD"],
}
NUMBERS = ["byte", "short", "int", "long", "float", "double"]
TARGETS = ["tinyint", "smallint", "int", "bigint", "float", "double", "boolean"]


@pytest.fixture(scope="module")
def table(orca_spark, tmp_path_factory):
    """DataFrame of two files with row groups, whose columns have special values and nulls."""
    folder = tmp_path_factory.mktemp("queries")

    def cycled(values, count, step):
        return [values[(i * step) % len(values)] for i in range(count)]

    def as_of(values, low, high):
        return [None if v is None else min(max(v, low), high) for v in values]

    for part, rows in enumerate((40, 23)):
        doubles, ints = cycled(DOUBLES, rows, 5), cycled(INTS, rows, 3)
        texts = cycled(TEXTS, rows, 4 + part)
        zoned = cycled(ZONED, rows, 3)
        money = cycled(DECIMALS, rows, 2)
        columns = [
            *(as_of(ints, -128, 127), as_of(ints, -32768, 32767), ints, cycled(LONGS, rows, 7)),
            *(pa.array(doubles, pa.float64()).cast(pa.float32(), safe=False), doubles[::-1]),
            cycled([True, None, False, True], rows, 3),
            *(texts, [None if t is None else t.encode("utf-16") for t in texts]),
            *(cycled(DAYS, rows, 3), zoned),
            [None if z is None else z.replace(tzinfo=None) for z in reversed(zoned)],
            *(
                money,
                money[::-1],
                [None if i % 7 == 0 else [d, NAN] for i, d in enumerate(doubles)],
            ),
        ]
        data = pa.table(
            [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
        )
        pq.write_table(data, folder / f"{part}.parquet", row_group_size=16)
    return orca_spark.read.parquet(str(folder))


def comparisons():
    def of(column):
        literal = st.sampled_from(LITERALS[column])
        options = st.lists(literal, min_size=1, max_size=3).map(
            lambda each: f"{column} IN ({', '.join(each)})"
        )
        compare = st.tuples(st.sampled_from(["=", "<", "<=", ">", ">=", "<>", "<=>"]), literal)
        return st.one_of(
            compare.map(lambda each: f"{column} {each[0]} {each[1]}"),
            compare.map(lambda each: f"{each[1]} {each[0]} {column}"),
            options,
            options.map(lambda each: each.removesuffix(")") + ", NULL)"),
            st.sampled_from([f"{column} IS NULL", f"{column} IS NOT NULL"]),
        )

    numbers = st.sampled_from(NUMBERS)
    return st.one_of(
        st.sampled_from(list(LITERALS)).flatmap(of),
        st.tuples(numbers, st.sampled_from(["=", "<", ">=", "<=>"]), numbers).map(" ".join),
        st.sampled_from(["isnan(float)", "isnan(double)", "flag", "NOT flag", "floats IS NULL"]),
        st.sampled_from(["'a%'", "'%b'", "'%b%'", "'\u00e9%'", "''"]).map("text LIKE {}".format),
        numbers.map(lambda each: f"{each} IN ({', '.join(map(str, range(-2, 12)))})"),
        st.sampled_from(["byte + 1 > 2", "length(text) > 1"]),
    )


def conditions():
    return st.recursive(
        comparisons(),
        lambda inner: st.one_of(
            inner.map("NOT ({})".format),
            st.tuples(inner, st.sampled_from(["AND", "OR"]), inner).map(
                lambda e: f"({' '.join(e)})"
            ),
        ),
        max_leaves=4,
    )


def outputs():
    return st.one_of(
        st.sampled_from(SCHEMA.names),
        st.tuples(st.sampled_from([*NUMBERS, "flag"]), st.sampled_from(TARGETS)).map(
            lambda each: f"CAST({each[0]} AS {each[1]})"
        ),
        st.sampled_from(["CAST(floats AS array<float>)", "CAST(money AS double)"]),
        st.sampled_from(["coalesce(double, 0.0D)", "nanvl(double, 1.0D)", "coalesce(int, 7)"]),
    )


def values(table):
    def key(value):
        if isinstance(value, list):
            return [key(each) for each in value]
        return (type(value), repr(value))  # NaN equals NaN, and the zeros differ

    return [[key(v) for v in column.to_pylist()] for column in table.columns]


def run(frame):
    """Rows of Spark, or None if a cast overflows."""
    try:
        return to_arrow(frame)
    except Exception as error:
        if "CAST_OVERFLOW" in str(error):
            return None
        raise


def rows_of_files(tasks):
    groups, columns = tasks
    batches = [b for task in groups for each in task for b in each.batches(columns, 10)]
    return pa.Table.from_batches(batches) if batches else None


@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    st.lists(conditions(), max_size=2),
    st.lists(outputs(), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_rows_are_those_of_spark(table, orca_spark, where, selected, ansi, drops):
    orca_spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        frame = table
        for each in where:
            frame = frame.where(each)
        frame = frame.dropna(subset=["double", "text"]) if drops else frame
        frame = frame.selectExpr(*(f"{each} AS c{i}" for i, each in enumerate(selected)))
        tasks = file_tasks(frame)
        COUNTS.append(tasks is not None)
        if tasks is None:
            return
        expected = run(frame)
        if expected is None:
            with pytest.raises(UsageError, match="cannot be cast"):
                rows_of_files(tasks)
            return
        actual = rows_of_files(tasks)
        assert values(actual or expected.schema.empty_table()) == values(expected)
        groups, columns = tasks
        if columns.query.condition is not None:
            counted = sum(sum(columns.count(each)) for task in groups for each in task)
            assert counted == expected.num_rows
    finally:
        orca_spark.conf.unset("spark.sql.ansi.enabled")


COUNTS = []


def test_most_generated_queries_were_read_from_files():
    assert sum(COUNTS) > 0.6 * len(COUNTS) > 0
