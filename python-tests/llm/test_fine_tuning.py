"""Fine-tuning from a table: exact for any number of workers, and files that transformers loads."""

import json
import os
import shutil
import signal

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused
from text_models import WORDS, tiny_decoder, tiny_encoder, tiny_tokenizer
from torch.nn import functional

from bigdl.llm.tuning.module import ModuleSource, groups, pack
from bigdl.llm.tuning.rows import LABELS, TOKENS, RowTokenizer, TextColumns, labelled
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import SeveralIteration

CHAT = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }} [SEP]{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


def sentences(count, seed=0):
    """Return texts of 1 to 12 words."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 13, count)
    return [" ".join(random.choice(WORDS, size)) for size in sizes]


def answers(count, seed=0):
    return pd.DataFrame({"q": sentences(count, seed), "a": sentences(count, seed + 1)})


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return tiny_decoder(tmp_path_factory.mktemp("models") / "decoder")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Return an encoder without dropout."""
    folder = tiny_encoder(tmp_path_factory.mktemp("models") / "encoder")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("models") / "words")
    tokenizer.eos_token = "[SEP]"
    return tokenizer


def causal_rows(words, columns, rows, max_length=32, *, chat=False):
    """Return the ids and the labelled ids of rows."""
    function = RowTokenizer(words, "causal_lm", TextColumns(**columns), max_length, chat)
    tokens = function(rows)[TOKENS]
    ids = [row[row >= 0] >> 1 for row in tokens]
    targets = [(row >> 1)[labelled(row)] for row in tokens]
    return [words.decode(each) for each in ids], [words.decode(each) for each in targets]


def test_rows_divide_into_passes_without_losing_any():
    lengths = np.random.default_rng(1).integers(0, 40, 200).tolist()
    for divide in (pack, groups):
        passes = divide(lengths, 64)
        assert sorted(index for rows in passes for index in rows) == list(range(200))
    assert all(sum(lengths[i] for i in rows) <= 64 for rows in pack(lengths, 64))
    assert all(len(rows) * max(lengths[i] for i in rows) <= 64 for rows in groups(lengths, 64))
    assert pack([100, 3], 64) == [[0], [1]]


def test_answers_are_labels_and_prompts_are_truncated_first(words):
    columns = {"prompt": "q", "completion": "a"}
    rows = {"q": ["the cat sat", "the dog sat on the mat"], "a": ["on mat", "good text"]}
    ids, targets = causal_rows(words, columns, rows, max_length=8)
    assert ids == ["[CLS] the cat sat [SEP] on mat [SEP]", "sat on the mat [SEP] good text [SEP]"]
    assert targets == ["on mat [SEP]", "good text [SEP]"]
    ids, targets = causal_rows(words, {"text": "t"}, {"t": ["a cat"]})
    assert (ids, targets) == (["[CLS] a cat [SEP]"], ["a cat [SEP]"])
    ids, _ = causal_rows(words, {"text": "t"}, {"t": ["a cat sat on mat"]}, max_length=4)
    assert ids == ["[CLS] a cat [SEP]"]


def test_only_the_tokens_of_the_assistant_are_labels_of_a_conversation(words, monkeypatch):
    monkeypatch.setattr(words, "chat_template", CHAT)
    talk = [("user", "the cat"), ("assistant", "sat on"), ("user", "a mat"), ("assistant", "good")]
    messages = [{"role": role, "content": content} for role, content in talk]
    rows = {"m": [messages, json.dumps(messages)]}
    ids, targets = causal_rows(words, {"messages": "m"}, rows)
    assert targets == ["sat on [SEP] good [SEP]"] * 2
    assert ids[0].replace("[CLS] ", "").startswith("u the cat [SEP] a sat on")
    pair = {"q": ["the cat"], "a": ["sat"]}
    _, targets = causal_rows(words, {"prompt": "q", "completion": "a"}, pair, chat=True)
    assert targets[0].startswith("sat")
    with refused("data-value", "role"):
        causal_rows(words, {"messages": "m"}, {"m": [["hello"]]})


def test_packed_rows_have_the_loss_and_gradients_of_separate_rows(decoder, words):
    module = ModuleSource(str(decoder), "causal_lm")({})
    assert module.packing
    columns = TextColumns(prompt="q", completion="a")
    rows = RowTokenizer(words, "causal_lm", columns, 40)(answers(40).to_dict("list"))
    tokens = torch.from_numpy(rows[TOKENS])
    total, count = 0.0, 0
    for row in tokens:  # as transformers computes it
        row = row[row >= 0]
        ids = (row >> 1).long()
        targets = torch.where((row & 1) == 1, ids, -100)
        logits = module.model(input_ids=ids[None]).logits[0]
        total += functional.cross_entropy(logits[:-1], targets[1:], reduction="sum")
        count += int((targets[1:] != -100).sum())
    (total / count).backward()
    expected = [p.grad.clone() for p in module.parameters()]
    assert count == rows[LABELS].sum()
    for packing in (True, False):
        module.packing = packing
        module.zero_grad()
        output = module(tokens)
        output.loss.backward()
        assert output.count == count
        assert torch.allclose(output.loss, total / count, rtol=1e-5)
        pairs = zip(module.parameters(), expected, strict=True)
        assert all(torch.allclose(p.grad, e, atol=1e-5) for p, e in pairs)
    empty = module(torch.full((2, 4), -1, dtype=torch.int32))
    empty.loss.backward()
    assert (empty.loss.item(), empty.count) == (0.0, 0.0)


@pytest.mark.slow
def test_a_classifier_is_fine_tuned_and_its_files_have_the_labels(encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    encoder = shutil.copytree(encoder, tmp_path / "encoder")
    (encoder / "modules.json").write_text("[]")  # the file of a sentence encoder
    texts = sentences(96)
    frame = pd.DataFrame({"text": texts, "topic": ["cat" if "cat" in t else "none" for t in texts]})
    estimator = Estimator.from_transformers(
        encoder, task="classification", backend="local", learning_rate=0.01, metrics=["accuracy"]
    )
    history = estimator.fit(
        frame, 10, 16, text_col="text", label_cols="topic", validation_data=frame, seed=1
    )
    assert min(epoch["val_loss"] for epoch in history) < 0.5 * history[0]["val_loss"]
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        estimator.save(tmp_path / "saved")
    )
    assert model.config.id2label == {0: "cat", 1: "none"}
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        classes = [int(model(**words(t, return_tensors="pt")).logits.argmax()) for t in texts]
    accuracy = np.mean(np.array(classes) == (frame.topic == "none"))
    assert accuracy == pytest.approx(history[-1]["val_accuracy"])
    predicted = estimator.predict(frame[["text"]]).label
    assert predicted.tolist() == [("cat", "none")[index] for index in classes]
    converted = estimator.text_model()
    assert converted is estimator.text_model()
    again = Estimator.from_transformers(
        encoder, task="classification", backend="local", labels=["cat", "none"]
    )
    again.load(tmp_path / "saved")
    for ours, theirs in zip(again.get_model().parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    estimator.fit(frame, 1, 16, text_col="text", label_cols="topic", seed=1)
    assert estimator.text_model() is not converted


def classifier(folder, *labels, **options):
    return Estimator.from_transformers(
        folder, task="classification", backend="local", labels=labels, **options
    )


def test_a_classifier_with_other_classes_is_not_loaded(encoder, tmp_path):
    saved = classifier(encoder, "a", "b").save(tmp_path / "saved")
    fresh = classifier(encoder)
    fresh.load(saved)
    assert fresh.get_model().config.id2label == {0: "a", 1: "b"}
    for labels in (("b", "a"), ("a", "b", "c")):
        with refused("model-mismatch", "a, b"):
            classifier(encoder, *labels).load(saved)
    with refused("model-mismatch", "classifier"):
        classifier(encoder).load(encoder)  # without a head
    with refused("path-missing", "nowhere"):
        fresh.load(tmp_path / "nowhere")


def test_wrong_arguments_are_named(decoder, encoder, tmp_path):
    estimator = Estimator.from_transformers(decoder, task="causal_lm", backend="local")
    frame = pd.DataFrame({"text": ["a", None]})
    with refused("data-null", "'text'"):
        estimator.fit(frame, text_col="text")
    with refused("column-missing", "'body'"):
        estimator.fit(frame, text_col="body")
    with refused("argument-missing", "text_col"):
        estimator.fit(frame)
    with refused("argument-missing", "completion_col"):
        estimator.fit(frame, prompt_col="text")
    with refused("argument-conflict", "label_cols"):
        estimator.fit(frame, text_col="text", label_cols="text")
    with refused("argument-value", "32"):
        estimator.fit(frame, text_col="text", max_length=65)
    with refused("argument-value", "chat template"):
        estimator.fit(frame, messages_col="text")
    with refused("not-fitted"):
        estimator.evaluate(frame)
    with refused("path-missing", "no-folder"):
        Estimator.from_transformers(tmp_path / "no-folder", task="causal_lm")
    with refused("unsupported", "bigdl"):
        Estimator.from_transformers(decoder, task="causal_lm", backend="bigdl")
    rows = pd.DataFrame({"text": ["a", "b"], "label": ["a", "c"]})
    with refused("data-value", "'c'"):
        classifier(encoder, "a", "b").fit(rows, text_col="text", label_cols="label")


# -- adapters --------------------------------------------------------------------------------------


def lora(**options):
    peft = pytest.importorskip("peft", reason="needs pip install peft")
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **options)


def tuned(folder, data, epochs=1, batch_size=32, *, workers=1, resume=None, **options):
    """Return an Estimator after a fit with SGD in the order of the rows, and its metrics."""
    creation = {key: options.pop(key) for key in ("checkpoint_dir", "backend") if key in options}
    estimator = Estimator.from_transformers(
        folder,
        task="causal_lm",
        peft=lora(),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.01),
        config={"shuffle": False},
        workers_per_node=workers,
        **{"backend": "local", **creation},
    )
    columns = {"prompt_col": "q", "completion_col": "a", "seed": 3, "resume": resume}
    return estimator, estimator.fit(data, epochs, batch_size, **columns, **options)


def difference(one, other):
    """Return the largest difference of trained weights."""
    ours, theirs = (
        {n: p.detach() for n, p in each.get_model().named_parameters() if p.requires_grad}
        for each in (one, other)
    )
    assert list(ours) == list(theirs)
    return max(float((ours[n] - theirs[n]).abs().max()) for n in ours)


def test_all_new_layers_of_a_classifier_are_in_its_adapter(encoder, tmp_path):
    peft = pytest.importorskip("peft", reason="needs pip install peft")
    import transformers

    folder = tmp_path / "no-pooler"
    shutil.copytree(encoder, folder)
    transformers.BertModel.from_pretrained(encoder, add_pooling_layer=False).save_pretrained(folder)
    adapter = peft.LoraConfig(r=4, target_modules=["query", "dense"], modules_to_save=["norm"])
    ours = classifier(folder, "b", "a", peft=adapter)
    saved = ours.save(tmp_path / "adapter")
    assert adapter.modules_to_save == ["norm"]
    trained = ours.estimator.get_model().state_dict()
    assert any("pooler" in name for name in trained)
    again = classifier(folder, peft=adapter)
    again.load(saved)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        expected = ours.get_model()(ids).logits
        assert torch.equal(again.get_model()(ids).logits, expected)
        loaded = peft.PeftModel.from_pretrained(base, saved).eval()
        assert torch.equal(loaded(ids).logits, expected)
    assert again.get_model().config.id2label == {0: "b", 1: "a"}
    with refused("model-mismatch", "b, a"):
        classifier(folder, "a", "b", peft=adapter).load(saved)
    with refused("path-exists", "adapter"):
        ours.save(saved, merge=True)
    other = peft.LoraConfig(r=4, target_modules=["query", "dense"], lora_alpha=16)
    with refused("model-mismatch", "lora_alpha"):
        classifier(folder, peft=other).load(saved)
    os.unlink(tmp_path / "adapter" / "labels.json")
    with refused("argument-missing", "labels"):
        classifier(folder, peft=adapter).load(saved)


@pytest.mark.slow
def test_workers_packing_and_accumulation_give_the_same_adapter(decoder, tmp_path):
    data = answers(200)
    one, _ = tuned(decoder, data)
    assert difference(one, tuned(decoder, data, workers=2)[0]) < 1e-6
    assert difference(one, tuned(decoder, data, packing=False)[0]) < 1e-6
    options = {"batch_size": 8, "accumulate_grad_batches": 4}
    assert difference(one, tuned(decoder, data, workers=4, **options)[0]) < 1e-6

    import peft
    import transformers

    folder = one.save(tmp_path / "adapter")
    files = {each.name for each in (tmp_path / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
    base = transformers.AutoModelForCausalLM.from_pretrained(decoder)
    loaded = peft.PeftModel.from_pretrained(base, folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(data.q[0], return_tensors="pt")
    ids = ids.input_ids
    with torch.no_grad():
        expected = one.get_model()(ids).logits
        assert torch.equal(loaded(ids).logits, expected)
        one.save(tmp_path / "merged", merge=True)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(merged.eval()(ids).logits, expected, atol=1e-4)
    again, _ = tuned(decoder, data[:8])
    again.load(folder)
    assert difference(one, again) == 0


class KillOnce(Callback):
    """Callback that kills its worker at a step of the first attempt."""

    def __init__(self, marker, step):
        self._marker, self._step = marker, step

    def after_train_iter(self, runner):
        is_due = runner.rank == 0 and runner.global_step == self._step
        if is_due and not os.path.exists(self._marker):
            open(self._marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_fit_whose_worker_was_killed_gives_the_same_adapter(decoder, tmp_path):
    data, options = answers(96), {"epochs": 2, "workers": 2}
    expected, _ = tuned(decoder, data, **options)
    marker = tmp_path / "killed"
    survivor, history = tuned(
        decoder,
        data,
        **options,
        checkpoint_dir=str(tmp_path / "run"),
        checkpoint_trigger=SeveralIteration(1),
        callbacks=[KillOnce(str(marker), 4)],
    )
    assert marker.exists()
    assert len(history) == 2
    assert difference(expected, survivor) == 0
    files = list((tmp_path / "run").rglob("model.pt"))
    size = sum(p.nbytes for p in survivor.estimator.get_model().state_dict().values())
    assert files
    assert max(each.stat().st_size for each in files) < 3 * size + 10_000  # the adapter alone


@pytest.mark.slow
def test_spark_trains_the_adapter_of_a_pandas_frame(orca_spark, decoder, tmp_path):
    data = answers(64)
    options = {"epochs": 2, "batch_size": 64}
    expected, _ = tuned(decoder, data, **options)
    frame = orca_spark.createDataFrame(data)
    in_spark, _ = tuned(decoder, frame, backend="spark", workers=2, **options)
    assert difference(expected, in_spark) < 1e-6
    frame.write.parquet(str(tmp_path / "rows"))
    of_files, _ = tuned(decoder, str(tmp_path / "rows"), backend="spark", workers=2, **options)
    assert difference(expected, of_files) < 1e-6


def test_a_lost_worker_restarts_a_fit_on_pairs(encoder, monkeypatch):
    estimator = Estimator.from_transformers(encoder, task="embedding", backend="local")
    seen = {}
    monkeypatch.setattr(estimator.estimator, "fit", lambda *a, **options: seen.update(options))
    estimator.fit(answers(8), text_col="q", label_cols="a", recovery=None)
    assert seen["recovery"] == "restart"
    with refused("argument-conflict", "recovery"):
        estimator.fit(answers(8), text_col="q", label_cols="a", recovery="in_place")


@pytest.mark.slow
def test_the_pairs_of_all_workers_are_negatives_of_each_other(encoder, tmp_path):
    data = answers(40)

    def trained(workers, **options):
        estimator = Estimator.from_transformers(
            encoder,
            task="embedding",
            optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.05),
            config={"shuffle": False},
            backend="local",
            workers_per_node=workers,
        )
        columns = {"text_col": "q", "label_cols": "a"}
        batch_size = options.pop("batch_size", 12)
        return estimator, estimator.fit(data, 3, batch_size, **columns, seed=3, **options)

    def weights(estimator):
        model = estimator.get_model()
        return {n: p.detach() for n, p in model.named_parameters()}

    one, history = trained(1)
    two, metrics = trained(2)
    expected, pairs = weights(one), weights(two)
    assert max(float((expected[n] - pairs[n]).abs().max()) for n in expected) < 1e-6
    assert history[-1]["train_loss"] == pytest.approx(metrics[-1]["train_loss"], rel=1e-5)
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert history[-1]["num_samples"] == 36  # an incomplete batch has fewer negatives
    with refused("argument-conflict", "validation_data"):
        trained(1, validation_data=data)
    with refused("argument-value", "2"):
        trained(1, batch_size=1)
