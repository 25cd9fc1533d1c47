"""Programs for `bigdl.llm` of BigDL 2.4 load, convert, save, generate and train as documented."""

import json

import pytest
import torch
from refusals import refused
from text_models import tiny_decoder, tiny_encoder

from bigdl.llm import llm_convert, optimize_model
from bigdl.llm.low_bit import LOW_BITS, LowBitLinear
from bigdl.llm.optimize import load_low_bit, low_memory_init
from bigdl.llm.transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
)

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[2, 40, 41, 42, 43], [2, 44, 45, 46, 47]])
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder(tmp_path_factory.mktemp("models") / "decoder")


@pytest.fixture(scope="module")
def original(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def distance(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("low_bit", LOW_BITS)
def test_a_format_rounds_weights_and_is_saved(low_bit, tmp_path):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(128, 32), torch.nn.Linear(32, 8, bias=False))
    values = torch.randn(40, 128)
    expected = layers(values).detach()
    bound = {"4": 0.2, "5": 0.1, "8": 0.06, "6": 0.01}[low_bit.removesuffix("bit")[-1]]
    model = optimize_model(layers, low_bit=low_bit)
    assert isinstance(model[0], LowBitLinear)
    with torch.no_grad():
        assert distance(model(values), expected) < bound
        assert distance(model(values[:2]), expected[:2]) < bound
    model.save_low_bit(tmp_path)
    with low_memory_init():
        empty = torch.nn.Sequential(torch.nn.Linear(128, 32), torch.nn.Linear(32, 8, bias=False))
    again = load_low_bit(empty, tmp_path)
    with torch.no_grad():
        assert torch.equal(again(values), model(values))


def test_gradients_pass_through_a_layer():
    torch.manual_seed(0)
    layer = LowBitLinear.of(torch.nn.Linear(64, 8), "asym_int5")
    values = torch.randn(3, 64, requires_grad=True)
    layer(values).square().sum().backward()
    plain = values.detach().clone().requires_grad_()
    torch.nn.functional.linear(plain, layer.weight, layer.bias).square().sum().backward()
    assert torch.allclose(values.grad, plain.grad, atol=1e-5)


def test_a_decoder_in_four_bits_generates_and_is_saved(folder, original, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), load_in_4bit=True, trust_remote_code=True
    )
    assert model.config.bigdl_transformers_low_bit == "sym_int4"
    ids = model.generate(**INPUTS, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert ids.shape == (2, 11)
    with torch.no_grad():
        assert (
            distance(model(**INPUTS).logits, original(**INPUTS).logits) < 0.7
        )  # of random weights
    model.save_low_bit(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["bigdl_transformers_low_bit"] == "sym_int4"
    again = AutoModelForCausalLM.load_low_bit(str(tmp_path / "saved"), trust_remote_code=True)
    again_ids = again.generate(**INPUTS, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(again_ids, ids)
    with refused("file-format", "load_low_bit"):
        AutoModelForCausalLM.from_pretrained(str(tmp_path / "saved"), load_in_4bit=True)


def test_a_decoder_in_pytorch_keeps_named_modules(folder, original, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        load_in_low_bit="sym_int8",
        torch_dtype=torch.float32,
        modules_to_not_convert=["lm_head"],
    )
    assert type(model.lm_head) is torch.nn.Linear
    assert isinstance(model.model.layers[0].mlp.down_proj, LowBitLinear)
    with torch.no_grad():
        logits = model(**INPUTS).logits
    assert distance(logits, original(**INPUTS).logits.detach()) < 0.05
    model.save_low_bit(tmp_path)
    again = AutoModelForCausalLM.load_low_bit(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**INPUTS).logits, logits)
    with low_memory_init():
        empty = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_low_bit(empty, tmp_path)(**INPUTS).logits, logits)


def test_classifiers_and_encoders_keep_their_classes(tmp_path):
    folder = tiny_encoder(tmp_path / "classifier", labels=3)
    expected = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model = AutoModelForSequenceClassification.from_pretrained(folder, load_in_low_bit="bf16")
    with torch.no_grad():
        assert distance(model(**INPUTS).logits, expected(**INPUTS).logits) < 0.05
    encoder = AutoModel.from_pretrained(folder, load_in_4bit=True)
    assert isinstance(encoder.encoder.layer[0].output.dense, LowBitLinear)
    assert encoder(**INPUTS).last_hidden_state.shape == (2, 5, 16)


SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}


def test_a_speech_model_transcribes(tmp_path):
    config = transformers.WhisperConfig(
        **SIZES, **HEADS, **TOKENS, max_source_positions=20, max_target_positions=16,
        num_mel_bins=8, begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path, load_in_4bit=True)
    assert isinstance(model.model.encoder.layers[0].fc1, LowBitLinear)
    ids = model.generate(torch.randn(1, 8, 40), max_new_tokens=4)
    assert ids.shape[0] == 1


def test_a_sequence_to_sequence_model_generates(tmp_path):
    config = transformers.BartConfig(**SIZES, **HEADS, **TOKENS, max_position_embeddings=32)
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path / "bart")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "bart", load_in_low_bit="sym_int8")
    ids = model.generate(IDS, max_new_tokens=4)
    model.save_low_bit(tmp_path / "saved")
    again = AutoModelForSeq2SeqLM.load_low_bit(tmp_path / "saved")
    assert torch.equal(again.generate(IDS, max_new_tokens=4), ids)


def test_a_model_that_scales_logits_of_tied_heads_keeps_its_outputs(tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 50}
    layers = {"num_layers": 1, "num_decoder_layers": 1, "num_experts": 2, "expert_capacity": 8}
    config = transformers.SwitchTransformersConfig(
        **sizes, **layers, num_sparse_encoder_layers=0, num_sparse_decoder_layers=0,
        decoder_start_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    original = transformers.SwitchTransformersForConditionalGeneration(config).eval()
    original.save_pretrained(tmp_path / "original")
    with torch.no_grad():
        expected = original(input_ids=IDS, decoder_input_ids=IDS).logits
        model = AutoModelForSeq2SeqLM.from_pretrained(
            tmp_path / "original", load_in_low_bit="sym_int8"
        )
        logits = model(input_ids=IDS, decoder_input_ids=IDS).logits
        assert distance(logits, expected) < 0.1
        model.tie_weights()
        model.save_low_bit(tmp_path / "saved")
        again = AutoModelForSeq2SeqLM.load_low_bit(tmp_path / "saved")
        again.tie_weights()
        assert torch.equal(again(input_ids=IDS, decoder_input_ids=IDS).logits, logits)


@pytest.mark.slow
def test_a_folder_has_the_model_saved_last(folder, tmp_path):
    engine = AutoModelForCausalLM.from_pretrained(folder, load_in_4bit=True)
    layers = AutoModelForCausalLM.from_pretrained(
        folder, load_in_low_bit="nf4", optimize_model=False
    )
    layers.generation_config.max_new_tokens = 5
    engine.save_low_bit(tmp_path)
    with low_memory_init():
        empty = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with refused("file-format", "AutoModelForCausalLM.load_low_bit"):
        load_low_bit(empty, tmp_path)
    layers.save_low_bit(tmp_path)
    again = AutoModelForCausalLM.load_low_bit(tmp_path)
    assert again.config.bigdl_transformers_low_bit == "nf4"
    assert isinstance(again.lm_head, LowBitLinear)
    assert load_low_bit(empty, tmp_path).generation_config.max_new_tokens == 5
    engine.save_low_bit(tmp_path)
    again = AutoModelForCausalLM.load_low_bit(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**INPUTS).logits, engine(**INPUTS).logits)


def test_what_cannot_be_is_one_sentence(folder, tmp_path):
    with refused("unsupported", "nf3", "nf4"):
        AutoModelForCausalLM.from_pretrained(folder, load_in_low_bit="nf3")
    with refused("unsupported", "xpu"):
        AutoModelForCausalLM.from_pretrained(folder, load_in_4bit=True, device_map="xpu")
    with refused("file-format", "from_pretrained"):
        AutoModelForCausalLM.load_low_bit(folder)
    with refused("model-unsupported", "ReLU"):
        optimize_model(torch.nn.ReLU())
    with refused("model-unsupported", "Linear"):
        optimize_model(torch.nn.Linear(64, 8))
    config = transformers.LlamaConfig(bigdl_transformers_low_bit="sym_int4")
    config.save_pretrained(tmp_path / "marked")
    with refused("file-format", "convert the original again"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "marked", load_in_4bit=True)
    with refused("unsupported", "gptq"):
        llm_convert(folder, tmp_path, "llama", model_format="gptq")
    with pytest.raises(ImportError, match="TextModel"):
        from bigdl.llm.transformers import BigdlNativeForCausalLM  # noqa: F401


def test_adapters_are_trained_on_four_bits(folder, tmp_path):
    peft = pytest.importorskip("peft")
    from bigdl.llm.transformers.qlora import (
        LoraLowBitLinear,
        PeftModel,
        get_peft_model,
        prepare_model_for_kbit_training,
    )

    def base():
        return AutoModelForCausalLM.from_pretrained(
            folder,
            load_in_low_bit="nf4",
            optimize_model=False,
            torch_dtype=torch.float32,
            modules_to_not_convert=["lm_head"],
        )

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
                             lora_dropout=0.0, bias="none", task_type="CAUSAL_LM")  # fmt: skip
    model = get_peft_model(prepare_model_for_kbit_training(base()), config)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, LoraLowBitLinear)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.02)
    losses = []
    for _ in range(8):
        loss = model(**INPUTS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(), tmp_path)
    with torch.no_grad():
        expected = model.eval()(**INPUTS).logits
        assert torch.allclose(again.eval()(**INPUTS).logits, expected, atol=1e-5)
    with refused("unsupported", "merge_and_unload"):
        model.merge_adapter()
    engine = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with refused("model-type", "optimize_model=False"):
        get_peft_model(engine, config)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_converted_folder_continues_prompts_in_the_terminal(folder, cache, tmp_path, capsys):
    pytest.importorskip("openvino_genai")
    from bigdl.llm.cli import main

    path = llm_convert(folder, tmp_path / "out", model_family="llama", outtype="int8")
    assert path.endswith("bigdl_llm_llama_int8")
    capsys.readouterr()
    assert main(["-m", path, "-t", "1", "-x", "llama", "-n", "4", "-p", "the cat sat"]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["-m", str(tmp_path / "missing"), "-p", "the"]) == 1
    assert "missing" in capsys.readouterr().err


@pytest.mark.slow
def test_langchain_gets_texts_and_embeddings(folder, cache, tmp_path):
    pytest.importorskip("langchain_core")
    from bigdl.llm.langchain.embeddings import TransformersEmbeddings
    from bigdl.llm.langchain.llms import TransformersLLM

    llm = TransformersLLM.from_model_id(str(folder), model_kwargs={"max_new_tokens": 4})
    text = llm.invoke("the cat sat")
    assert isinstance(text, str)
    assert llm.invoke("the cat sat", stop=[text[1:3]]) == text[: text.find(text[1:3])]
    greedy = {"temperature": 0, "do_sample": True}
    assert llm.invoke("the cat sat", **greedy) == llm.invoke("the cat sat", do_sample=False)
    encoder = tiny_encoder(tmp_path / "encoder")
    embeddings = TransformersEmbeddings.from_model_id(str(encoder))
    vectors = embeddings.embed_documents(["a cat", "a dog sat"])
    assert [len(each) for each in vectors] == [16, 16]
    assert embeddings.embed_query("a cat") == pytest.approx(vectors[0], abs=1e-5)
