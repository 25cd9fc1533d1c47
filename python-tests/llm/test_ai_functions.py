"""AI functions keep rows, order and columns, and name the rows without an answer."""

import contextlib
import os
import signal

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from refusals import refused
from text_models import minilm, smollm, tiny_decoder, tiny_encoder

from bigdl.llm import TextModel, classify, embed, prompt, rank, register
from bigdl.llm.engine import ModelReference
from bigdl.llm.sent_files import SentFiles, sent_files
from bigdl.runtime.local import FileBroadcast

SENTENCES = ["the cat sat", "a dog sat on the mat", "good text", "bad word of the row"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Give the module a cache of converted models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_encoder(tmp_path_factory.mktemp("models") / "encoder")


@pytest.fixture(scope="module")
def model(folder):
    return TextModel(folder)


def reference(folder, texts):
    """Return the mean-pooled outputs of transformers, one text at a time."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        batches = [tokenizer([t], return_tensors="pt", truncation=True) for t in texts]
        return np.stack([encoder(**b).last_hidden_state[0].mean(0).numpy() for b in batches])


def test_embeddings_are_those_of_the_model_whatever_the_batch(folder, model):
    texts = [*SENTENCES, "word " * 100]
    frame = pd.DataFrame({"id": range(len(texts)), "text": texts}, index=[5, 3, 1, 9, 7])
    result = embed(frame, "text", model=model)
    assert list(result.columns) == ["id", "text", "embedding", "embedding_error"]
    assert result.index.equals(frame.index)
    assert np.allclose(np.stack(result.embedding), reference(folder, texts), atol=1e-5)
    assert result.embedding_error.isna().all()


def test_rows_that_cannot_be_embedded_are_named_and_others_are_not_lost(model):
    texts = pd.Series(["a cat", None, "a \ud800 dog", "x" * 2_000_000, 3, "a cat"], dtype=object)
    result = embed(pd.DataFrame({"text": texts}), "text", model=model, output="e")
    errors = result.e_error
    assert errors.isna().tolist() == [True, True, False, False, False, True]
    assert result.e.isna().tolist() == [False, True, True, True, True, False]
    assert "position 2" in errors[2]
    assert "2000000 characters" in errors[3]
    assert "int" in errors[4]


def test_a_table_of_arrow_with_invalid_bytes(model):
    texts = pa.array([b"a cat", b"\xff\xfe", None]).view(pa.string())
    result = embed(pa.table({"text": texts}), "text", model=model)
    assert result.schema.field("embedding").type == pa.list_(pa.float32())
    assert result.column("embedding").is_null().to_pylist() == [False, True, True]
    assert "byte 0" in result.column("embedding_error")[1].as_py()
    with refused("data-value", "byte 0"):
        embed(pa.table({"text": texts}), "text", model=model, on_error="raise")


def test_long_texts_are_truncated_or_named(model):
    frame = pd.DataFrame({"text": ["cat " * 100, "a cat"]})
    assert embed(frame, "text", model=model).embedding_error.isna().all()
    errors = embed(frame, "text", model=model, truncate=False).embedding_error
    assert "102 tokens" in errors[0]
    assert errors[1] is None


def test_wrong_arguments_are_named(model, tmp_path):
    frame = pd.DataFrame({"text": ["a"]})
    with refused("column-missing", "'words'"):
        embed(frame, "words", model=model)
    with refused("column-duplicate", "'text'"):
        embed(frame, "text", model=model, output="text")
    with refused("model-type", "'embed'"):
        prompt(frame, "{text}", model=model)
    with refused("data-type", "list"):
        embed(["a"], "text", model=model)
    with refused("path-missing", "no-folder"):
        TextModel(tmp_path / "no-folder")
    with refused("argument-conflict", "int4"):
        TextModel(model.path.parent, "int4", task="embed")
    with refused("argument-missing", "labels"):
        classify(frame, "text", model=model)


def test_spark_keeps_rows_and_order_and_equals_pandas(orca_spark, model):
    texts = [f"{SENTENCES[n % 4]} number {n % 50}" for n in range(1000)]
    frame = pd.DataFrame({"id": range(1000), "te.xt": texts})
    expected = np.stack(embed(frame, "te.xt", model=model).embedding)
    data = orca_spark.createDataFrame(frame).repartitionByRange(4, "id").sortWithinPartitions("id")
    data = data.selectExpr(
        "id",
        "case id when 7 then cast(X'FFFE' as string) when 9 then null else `te.xt` end as `te.xt`",
    )
    result = embed(data, "te.xt", model=model)
    assert result.columns == ["id", "te.xt", "embedding", "embedding_error"]
    rows = result.select("id", "embedding", "embedding_error").toPandas()
    assert rows.id.tolist() == list(range(1000))
    assert rows.embedding_error.notna().to_numpy().nonzero()[0].tolist() == [7]
    answered = [n for n in range(1000) if n not in (7, 9)]
    assert np.allclose(np.stack(rows.embedding[answered]), expected[answered], atol=1e-5)


def test_a_sql_function_gives_value_and_error(orca_spark, model):
    register("ai_embed", embed, model=model)
    query = "select ai_embed(if(id = 1, null, concat('a cat ', id))) as e from range(3)"
    rows = orca_spark.sql(query).select("e.value", "e.error").collect()
    assert [row.value is None for row in rows] == [False, True, False]
    expected = embed(pd.DataFrame({"text": ["a cat 2"]}), "text", model=model).embedding[0]
    assert np.allclose(rows[2].value, expected, atol=1e-5)
    with refused("argument-value", "print"):
        register("ai_print", print, model=model)


def test_a_killed_engine_repeats_unfinished_rows_only(model):
    import dataclasses

    engine = dataclasses.replace(model.reference(), threads=1).engine()
    first = engine.submit(SENTENCES, {"truncate": True})
    expected, errors = first()
    os.kill(engine.process_id, signal.SIGKILL)
    waits = [engine.submit(part, {"truncate": True}) for part in (SENTENCES[:2], SENTENCES[2:])]
    values = [value for wait in waits for value in wait()[0]]
    assert np.array_equal(values, expected)
    assert errors == [None] * 4
    engine.close()


@pytest.mark.slow
def test_a_text_that_ends_the_engine_is_alone_in_its_error(model, tmp_path, monkeypatch):
    import dataclasses

    from bigdl.llm.engine import SharedEngine

    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "from bigdl.llm.encoder import TextEncoder\n"
        "run = TextEncoder.run\n"
        "def guarded(self, texts, **options):\n"
        "    if any('bad' in text for text in texts):\n"
        "        os._exit(9)\n"
        "    return run(self, texts, **options)\n"
        "TextEncoder.run = guarded\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = SharedEngine(dataclasses.replace(model.reference(), threads=1), private=True)
    values, errors = engine.submit(SENTENCES, {"truncate": True})()
    engine.close()
    assert errors == [None, None, None, "the engine ended while it computed this row"]
    assert [value is None for value in values] == [False, False, False, True]


@pytest.mark.slow
def test_ten_thousand_rows_with_poison_and_killed_engines(model):
    import dataclasses
    import threading

    random = np.random.default_rng(0)
    texts = pd.Series([f"row {n} " + "word " * (n % 20) for n in range(10_000)], dtype=object)
    poison = [None, "x" * 1_100_000, b"\xff\xfe", "a \ud800"]
    poisoned = random.choice(10_000, 100, replace=False)
    for number, row in enumerate(poisoned):
        texts[row] = poison[number % 4]
    engine = dataclasses.replace(model.reference(), threads=2).engine()
    finished = threading.Event()

    def kill() -> None:
        for _ in range(5):
            if finished.wait(1) or engine.process_id is None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.process_id, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    shared = dataclasses.replace(model.reference(), threads=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "reference", lambda: shared)
        result = embed(pd.DataFrame({"text": texts}), "text", model=model)
    finished.set()
    killer.join()
    engine.close()
    assert set(np.flatnonzero(result.embedding.isna())) == set(poisoned)
    assert result.embedding_error.notna().sum() == 75
    answered = result.embedding.notna()
    expected = embed(pd.DataFrame({"text": texts[answered]}), "text", model=model)
    assert np.allclose(
        np.stack(result.embedding[answered]), np.stack(expected.embedding), atol=1e-5
    )


def test_a_saved_model_is_the_same_model(model, tmp_path):
    model.save(tmp_path / "saved")
    again = TextModel(tmp_path / "saved")
    assert (again.digest, again.task, again.precision) == (model.digest, "embed", "fp32")
    with refused("path-exists", "saved"):
        model.save(tmp_path / "saved")
    with refused("argument-conflict", "fp32"):
        TextModel(tmp_path / "saved", "int8")


def test_machines_without_the_files_get_them(model, tmp_path, monkeypatch):
    files = SentFiles(model.path, FileBroadcast)
    expected = model.reference().engine().submit(SENTENCES, {"truncate": True})()
    gone = ModelReference(str(tmp_path / "gone"), model.facts, threads=3, files=files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache of another machine"))
    engine = cloudpickle.loads(cloudpickle.dumps(gone)).engine()
    try:
        values, errors = engine.submit(SENTENCES, {"truncate": True})()
    finally:
        engine.close()
    assert errors == [None] * len(SENTENCES)
    assert np.allclose(np.stack(values), np.stack(expected[0]), atol=1e-6)
    copy = TextModel(tmp_path / "cache of another machine" / "bigdl" / "llm" / model.digest)
    names = sorted(each.name for each in model.path.rglob("*"))
    assert sorted(each.name for each in copy.path.rglob("*")) == names


def test_files_are_sent_unless_all_tasks_have_this_model(model):
    def see(check):
        return check()

    assert sent_files(model.path, model.digest, FileBroadcast, see) is None
    assert sent_files(model.path, "another model", FileBroadcast, see) is not None


def test_files_are_divided_into_parts_and_joined(tmp_path, monkeypatch):
    monkeypatch.setattr("bigdl.llm.sent_files.PART", 1000)
    contents = {"a": b"", "b/c": os.urandom(3500), "d": os.urandom(499), "bigdl.json": b"{}"}
    for name, content in contents.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = SentFiles(tmp_path / "model", FileBroadcast).write("digest")
    assert {n: (copy / n).read_bytes() for n in contents} == contents


def test_a_journal_answers_without_the_model(model, tmp_path, monkeypatch):
    frame = pd.DataFrame({"text": SENTENCES})
    journal = str(tmp_path / "journal")
    expected = np.stack(embed(frame[:2], "text", model=model, journal=journal).embedding)
    computed = []
    engine = model.reference().engine()
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda i, *o: computed.extend(i) or submit(i, *o))
    both = embed(frame, "text", model=model, journal=journal)
    assert computed == SENTENCES[2:]
    assert np.array_equal(np.stack(both.embedding[:2]), expected)
    embed(frame, "text", model=model, journal=journal)
    assert computed == SENTENCES[2:]


@pytest.mark.slow
def test_classifiers_and_cross_encoders(tmp_path):
    import torch
    import transformers

    folder = tiny_encoder(tmp_path / "classes", 3)
    frame = pd.DataFrame({"text": [*SENTENCES, None]})
    result = classify(frame, "text", model=TextModel(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    module = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = module(**tokenizer(SENTENCES, padding=True, return_tensors="pt")).logits
    best = logits.softmax(1).max(1)
    assert result.label[:4].tolist() == [f"LABEL_{index}" for index in best.indices]
    assert np.allclose(result.label_score[:4], best.values, atol=1e-5)
    assert result.label.isna()[4]

    pairs = pd.DataFrame({"query": ["a cat", "a dog", None], "text": SENTENCES[:3]})
    folder = tiny_encoder(tmp_path / "pairs", 1)
    scores = rank(pairs, "query", "text", model=TextModel(folder)).score
    module = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = tokenizer(list(pairs["query"][:2]), SENTENCES[:2], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = module(**inputs).logits.sigmoid()[:, 0]
    assert np.allclose(scores[:2], expected, atol=1e-5)
    assert scores.isna()[2]


@pytest.mark.slow
def test_int8_embeddings_stay_near(tmp_path):
    folder = minilm(tmp_path)
    exact, small = TextModel(folder), TextModel(folder, "int8")
    from pydoc_data.topics import topics

    texts = [" ".join(t.split())[:400] for t in topics.values()][:100]
    frame = pd.DataFrame({"text": texts})
    first, second = (np.stack(embed(frame, "text", model=m).embedding) for m in (exact, small))
    assert (first * second).sum(1).mean() > 0.99
    labels = classify(
        pd.DataFrame({"text": ["The goalkeeper saved the penalty", "Parliament passed the law"]}),
        "text",
        ["sport", "politics"],
        model=small,
    )
    assert labels.label.tolist() == ["sport", "politics"]


@pytest.mark.slow
def test_prompts_of_a_small_language_model():
    model = TextModel(smollm())
    frame = pd.DataFrame({"place": ["France", None, "Spain", "word " * 9000]})
    result = prompt(frame, "What is the capital of {place}? Answer in one sentence.", model=model,
                    max_new_tokens=16)  # fmt: skip
    assert "Paris" in result.answer[0]
    assert "Madrid" in result.answer[2]
    assert result.answer.isna().tolist() == [False, True, False, True]
    assert "tokens" in result.answer_error[3]
    assert result.answer_error.isna().tolist() == [True, True, True, False]
    chosen = prompt(frame[:1], "Is {place} a country?", model=model, choices=["yes (1)", "no"])
    assert chosen.answer[0] in ("yes (1)", "no")
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
              "required": ["city"], "additionalProperties": False}  # fmt: skip
    cut = prompt(frame[:1], "Name a city in {place}.", model=model, schema=schema, max_new_tokens=2)
    assert "schema" in cut.answer_error[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_converted_decoder_generates_the_tokens_of_transformers(tmp_path, precision):
    pytest.importorskip("openvino_genai")
    import torch
    import transformers

    folder = tiny_decoder(tmp_path / "decoder")
    model = TextModel(folder, precision)
    frame = pd.DataFrame({"text": [*SENTENCES, None, "word " * 60]})
    result = prompt(frame, "{text}", model=model, max_new_tokens=8)
    assert result.answer.isna().tolist() == [False] * 4 + [True, True]
    assert "tokens" in result.answer_error[5]
    if precision != "fp32":
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    original = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for text, answer in zip(SENTENCES, result.answer, strict=False):
        inputs = tokenizer([text], return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            ids = original.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
        expected = tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer.replace(" ", "") == expected.replace("##", "").replace(" ", "")
