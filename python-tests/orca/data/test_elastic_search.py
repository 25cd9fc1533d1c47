"""Test Elasticsearch indices as DataFrames and RDDs, and writes, with the official client.

The server is one of the helpers that answers the client's requests as Elasticsearch does.
"""

import datetime
import importlib
import sys

import pytest
from elastic_server import Refusal, elastic_server
from pyspark.sql import Row
from pyspark.sql import functions as F
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.versions import data_type
from bigdl.orca.data import elastic_search

pytest.importorskip(
    "elasticsearch", reason="elasticsearch is not installed: pip install 'bigdl[elasticsearch]'"
)

FILMS = {
    "title": {"type": "text", "fields": {"raw": {"type": "keyword"}}},
    "year": {"type": "integer"},
    "score": {"type": "half_float"},
    "seen": {"type": "boolean"},
    "shown": {"type": "date"},
    "at": {"type": "geo_point"},
    "studio": {"properties": {"name": {"type": "keyword"}, "staff": {"type": "long"}}},
    "roles": {"type": "nested", "properties": {"actor": {"type": "keyword"}}},
    "other_name": {"type": "alias", "path": "title"},
}


def film(number):
    return {
        "title": f"film {number}",
        "year": 1900 + number,
        "score": number / 2,
        "seen": number % 2 == 0,
        "shown": f"2020-01-02T03:04:{number % 60:02d}Z",
        "at": {"lat": 1.5, "lon": number},
        "studio": {"name": "S", "staff": number},
        "roles": [{"actor": "A"}, {"actor": "B"}],
    }


@pytest.fixture
def server(orca_spark):
    with elastic_server() as server:
        server.index("films", FILMS, map(film, range(25)))
        yield server


@pytest.fixture
def config(server):
    return {
        "es.nodes": "127.0.0.1",
        "es.port": server.port,
        "es.nodes.wan.only": "true",
        "es.http.retries": 0,
    }


# -- reading ------------------------------------------------------------------------------------


def test_every_document_is_read_once_by_slices_of_one_point_in_time(server, config):
    config |= {"es.scroll.size": "3", "es.input.max.docs.per.partition": "5"}
    frame = elastic_search.read_df(config, "films")
    assert frame.rdd.getNumPartitions() == 5
    assert sorted(row.year for row in frame.collect()) == list(range(1900, 1925))
    assert sum(path == "/films/_pit" for _, path, _ in server.requests) == 1
    server.indices["films"]["documents"].clear()
    assert frame.count() == 25  # as of the call, even if computed repeatedly


def test_there_is_a_partition_for_each_core_unless_documents_are_fewer(server, config, orca_spark):
    slots = orca_spark.sparkContext.defaultParallelism
    assert elastic_search.read_df(config, "films").rdd.getNumPartitions() == slots
    server.index("one", {"a": {"type": "long"}}, [{"a": 1}])
    assert elastic_search.read_rdd(config, "one").getNumPartitions() == 1
    server.index("none", {"a": {"type": "long"}})
    assert elastic_search.read_df(config, "none").collect() == []


def test_the_schema_is_that_of_the_mapping(config):
    frame = elastic_search.read_df(config, "films/film")  # with a type, as in programs for 2.x
    assert frame.schema.simpleString() == (
        "struct<title:string,year:int,score:float,seen:boolean,shown:timestamp,at:string,"
        "studio:struct<name:string,staff:bigint>,roles:array<struct<actor:string>>>"
    )
    row = frame.where("year = 1903").first()
    assert row.asDict(recursive=True) == {
        "title": "film 3",
        "year": 1903,
        "score": 1.5,
        "seen": False,
        "shown": row.shown,
        "at": '{"lat": 1.5, "lon": 3}',
        "studio": {"name": "S", "staff": 3},
        "roles": [{"actor": "A"}, {"actor": "B"}],
    }
    time = datetime.datetime(2020, 1, 2, 3, 4, 3, tzinfo=datetime.UTC)
    assert row.shown.timestamp() == time.timestamp()


def test_a_given_schema_says_what_is_read(server, config):
    schema = data_type("year string, roles array<struct<actor string>>, missing double")
    frame = elastic_search.read_df(config, "films", schema)
    assert frame.schema == schema
    assert frame.sort("year").first() == Row(
        year="1900", roles=[Row(actor="A"), Row(actor="B")], missing=None
    )
    (body, *_) = [body for _, path, body in server.requests if path == "/_search"]
    assert '"includes":["year","roles","missing"]' in body


def test_fields_are_chosen_and_read_as_arrays_or_as_text(server, config):
    server.index(
        "tags", {"tag": {"type": "keyword"}, "day": {"type": "date"}, "x": {"type": "long"}}
    )
    server.indices["tags"]["documents"] = {"a": {"tag": ["u", "v"], "day": 1577934245000}}
    config |= {"es.read.field.exclude": "x", "es.read.field.as.array.include": "tag"}
    time = datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.UTC).timestamp()
    row = elastic_search.read_df(config, "tags").first()
    assert (row.tag, row.day.timestamp()) == (["u", "v"], time)
    config |= {"es.mapping.date.rich": "false", "es.read.field.include": "day"}
    assert elastic_search.read_df(config, "tags").first() == Row(day="1577934245000")


def test_times_in_seconds_are_read_as_text(server, config):
    server.index("s", {"day": {"type": "date", "format": "epoch_second"}}, [{"day": 1577934245}])
    assert elastic_search.read_df(config, "s").first() == Row(day="1577934245")


def test_values_are_read_as_a_server_understands_them(server, config):
    properties = {"n": {"type": "long"}, "o": {"properties": {"p": {"type": "boolean"}}}}
    server.index("loose", properties, [{"n": "7", "o.p": "true"}, {"n": "", "o": None}])
    frame = elastic_search.read_df(config, "loose")
    assert sorted(map(str, frame.collect())) == [
        "Row(n=7, o=Row(p=True))",
        "Row(n=None, o=None)",
    ]


@pytest.mark.parametrize("query", ["?q=year:1903", '{"query": {"term": {"year": 1903}}}'])
def test_a_query_says_which_documents(config, query):
    assert elastic_search.read_df({**config, "es.query": query}, "films").count() == 1
    assert elastic_search.read_rdd(config, "films", esQuery=query).count() == 1


def test_an_rdd_has_ids_and_documents(config):
    rdd = elastic_search.read_rdd({**config, "es.resource": "films"}, filter="year,studio.name")
    assert dict(rdd.collect())["7"] == {"year": 1907, "studio": {"name": "S"}}


def test_structs_become_columns(orca_spark):
    frame = orca_spark.sql(
        "select 1 as a, named_struct('b', 2, 'c d', named_struct('e', 3)) as s, "
        "array(named_struct('f', 4)) as g, named_struct('e', 5) as t"
    )
    flat = elastic_search.flatten_df(frame)
    assert flat.columns == ["a", "b", "s_c d_e", "g", "t_e"]
    assert flat.first() == (1, 2, 3, [Row(f=4)], 5)


# -- writing ------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(server, config, orca_spark):
    frame = orca_spark.range(1000).select(
        "id",
        (F.col("id") / 4).alias("quarter"),
        F.lit("2020-01-02 03:04:05").cast("timestamp").alias("time"),
        F.struct(F.lit("x").alias("name")).alias("about"),
    )
    elastic_search.write_df({**config, "es.mapping.id": "id"}, "new/doc", frame)
    assert server.indices["new"]["documents"]["8"]["quarter"] == 2.0
    again = elastic_search.read_df(config, "new").select(frame.columns)
    assert again.schema.simpleString().replace("float", "double") == frame.schema.simpleString()
    assert sorted(again.collect()) == sorted(frame.collect())
    assert ("POST", "/new/_refresh", "") in server.requests


def test_documents_go_in_requests_of_the_size_that_is_asked_for(server, config, orca_spark):
    sized = {**config, "es.batch.size.entries": "10", "es.batch.write.refresh": "false"}
    frame = orca_spark.range(95).coalesce(1)
    elastic_search.write_df(
        {**sized, "es.mapping.exclude": "b"}, "new", frame.withColumn("b", F.lit(1))
    )
    assert sum(path == "/_bulk" for _, path, _ in server.requests) == 10
    assert {key for each in server.indices["new"]["documents"].values() for key in each} == {"id"}
    assert not any(path.endswith("_refresh") for _, path, _ in server.requests)


@pytest.mark.slow
def test_documents_are_created_changed_and_deleted_by_their_ids(server, config, orca_spark):
    def write(operation, *rows):
        frame = orca_spark.createDataFrame(rows, "k string, a int, b int")
        by_id = {"es.write.operation": operation, "es.mapping.id": "k", "es.mapping.exclude": "k"}
        elastic_search.write_df({**config, **by_id}, "new", frame)

    write("create", ("x", 1, 1), ("y", 1, 1))
    write("upsert", ("y", 2, None), ("z", 3, 3))
    write("update", ("x", None, 5))
    write("delete", ("z", None, None))
    assert server.indices["new"]["documents"] == {"x": {"a": 1, "b": 5}, "y": {"a": 2, "b": 1}}
    with pytest.raises(
        UsageError, match=r"0 documents were written.*1 were refused.*'x'.*conflict"
    ):
        write("create", ("x", 9, 9))


def test_refused_documents_are_counted_and_the_first_is_explained(server, config, orca_spark):
    server.index("typed", {"n": {"type": "long"}})
    frame = orca_spark.sql("select if(id % 10 = 0, 'many', string(id)) as n from range(100)")
    with refused("cluster-refused", "90", "10", "'many'"):
        elastic_search.write_df(config, "typed", frame)
    assert len(server.indices["typed"]["documents"]) == 90


def test_an_index_with_documents_is_left_alone(config, orca_spark):
    with refused("path-exists", "'films'"):
        elastic_search.write_df(config, "films", orca_spark.range(3))


def test_a_row_without_its_id_is_refused(config, orca_spark):
    frame = orca_spark.sql("select cast(null as string) as k")
    with refused("cluster-refused", "0", "id=k"):
        elastic_search.write_df({**config, "es.mapping.id": "k"}, "new", frame)


def test_an_index_is_made_only_where_it_may(server, config, orca_spark):
    config["es.index.auto.create"] = False
    with refused("path-missing", "'new'", "create=false"):
        elastic_search.write_df(config, "new", orca_spark.range(3))


# -- errors -------------------------------------------------------------------------------------


def test_a_missing_index_a_wrong_password_and_a_server_that_is_away(server, config):
    where = f"^Elasticsearch at http://127.0.0.1:{server.port} "
    with pytest.raises(UsageError, match=where + "has no such index: check.*fims"):
        elastic_search.read_df(config, "fims")
    server.users["ann"] = "secret"
    user = {**config, "es.net.http.auth.user": "ann", "es.net.http.auth.pass": "secret"}
    assert elastic_search.read_df(user, "films").count() == 25
    with pytest.raises(UsageError, match=where + r"rejects the user: check es.net.http.auth"):
        elastic_search.read_df({**user, "es.net.http.auth.pass": "wrong"}, "films")
    with refused("cluster-unreachable", "127", "0"):
        elastic_search.read_rdd({**config, "es.nodes": "127.0.0.1:1"}, "films")


def test_what_servers_drop_or_refuse_while_tasks_run(server, config, orca_spark):
    frame = elastic_search.read_df({**config, "es.input.max.docs.per.partition": 25}, "films")
    server.points.clear()
    with pytest.raises(
        Exception, match=r"closed the point in time.*es.scroll.keepalive.*: read the index"
    ):
        frame.collect()
    server.is_broken = lambda method, path: (
        Refusal(403, "security_exception", "not for you") if path == "/_bulk" else None
    )
    with refused("cluster-refused", "0"):
        elastic_search.write_df(config, "new", orca_spark.range(3))


@pytest.mark.slow
def test_a_value_that_does_not_fit_names_its_field(server, config):
    server.index("odd", {"o": {"properties": {"n": {"type": "long"}}}}, [{"o": {"n": [1, 2]}}])
    with pytest.raises(Exception, match=r"The field o.n of a document has several values: add it"):
        elastic_search.read_df(config, "odd").collect()
    server.index("odd", {"day": {"type": "date"}}, [{"day": "2/1/2020"}])
    with pytest.raises(
        Exception, match=r"The field day of a document is '2/1/2020', which is not of type"
    ):
        elastic_search.read_df(config, "odd").collect()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"es.nodse": "a"}, ("argument-unknown",)),
        ({"es.port": "http"}, ("argument-value", "10")),
        ({"es.scroll.size": "many"}, ("argument-value", "10", "10s", "10mb")),
        ({"es.nodes": "http://ann:secret@a"}, ("argument-value",)),
        ({"es.nodes": "a:b"}, ("argument-value", "'a:b'")),
        ({"es.net.ssl": "maybe"}, ("argument-value", "'true'", "'false'")),
        ({"es.query": "year=3"}, ("argument-value", "q=…")),
        ({"es.query": '{"query": {}, "size": 3}'}, ("argument-value", "q=…")),
        ({"es.write.operation": "append"}, ("argument-value", "'index'")),
        ({"es.write.operation": "upsert"}, ("argument-missing", "operation=upsert")),
    ],
)
def test_a_wrong_setting_is_named(config, orca_spark, setting, message):
    def use(settings):
        if "es.write.operation" in settings:
            elastic_search.write_df(settings, "new", orca_spark.range(1))
        elastic_search.read_df(settings, "films")

    with refused(*message):
        use({**config, **setting})


def test_a_missing_client_names_the_extra(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "elasticsearch", None)
    with refused("package-missing", "'bigdl[elasticsearch]'"):
        elastic_search.read_df(config, "films")


def test_what_is_no_configuration_or_no_index_is_refused(config):
    with refused("argument-type"):
        elastic_search.read_df("films", config)
    with refused("argument-value"):
        elastic_search.read_rdd(config)


def test_indices_whose_fields_have_several_types_are_refused(server, config):
    server.index("films2", {"year": {"type": "keyword"}})
    with refused("data-schema"):
        elastic_search.read_df(config, "films*")
    schema = elastic_search.read_df({**config, "es.read.field.include": "title"}, "films*").schema
    assert schema.names == ["title"]


def test_both_ways_of_2_x_to_import_it():
    module = importlib.import_module("bigdl.orca.data.elastic_search")
    assert module.elastic_search.read_df is elastic_search.read_df
