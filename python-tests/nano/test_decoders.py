"""Decoders of transformers in other runtimes generate the tokens of the original."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from refusals import refused

from bigdl.nano.pytorch import InferenceOptimizer

transformers = pytest.importorskip("transformers")

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def llama(**others):
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, **TOKENS, **others)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    sizes = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TOKENS)).eval()


def prompts(rows, length, seed=0):
    """Tokens, of which the last row begins with padding if there are several."""
    ids = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[-1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model, inputs, **options):
    torch.manual_seed(1)
    return model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, **options)


@pytest.fixture(scope="module")
def original():
    return llama()


@pytest.fixture(scope="module", params=["openvino", "onnxruntime"])
def fast(request, original):
    return InferenceOptimizer.trace(original, prompts(2, 6), accelerator=request.param)


@pytest.mark.slow_cases(
    "onnxruntime-beams", "onnxruntime-sampling", "openvino-beams", "openvino-sampling"
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"use_cache": False},
    ],
    ids=["greedy", "beams", "sampling", "no_cache"],
)
def test_generate_gives_the_tokens_of_the_original(original, fast, options):
    for rows, length in ((2, 6), (1, 3), (3, 11)):
        inputs = prompts(rows, length)
        expected = generated(original, inputs, **options)
        assert torch.equal(generated(fast, inputs, **options), expected)


def test_assisted_generation_takes_tokens_back(original, fast):
    inputs, options = prompts(1, 9), {"prompt_lookup_num_tokens": 3}
    assert torch.equal(generated(fast, inputs, **options), generated(original, inputs, **options))


def test_forward_continues_its_cache(original, fast):
    inputs = prompts(2, 7)
    with torch.no_grad():
        expected = original(**inputs).logits
    first = fast(inputs["input_ids"][:, :4], attention_mask=inputs["attention_mask"][:, :4])
    cache = first.cache if "cache" in first else first.past_key_values
    assert cache.get_seq_length() == 4
    name = "cache" if "cache" in first else "past_key_values"
    rest = fast(
        input_ids=inputs["input_ids"][:, 4:],
        attention_mask=inputs["attention_mask"],
        **{name: cache},
    )
    assert torch.allclose(torch.cat([first.logits, rest.logits], 1)[0], expected[0], atol=1e-5)
    assert cache.get_seq_length() == 7


def test_threads_generate_at_the_same_time(original, fast):
    cases = [prompts(2, 4 + number, seed=number) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda inputs: generated(fast, inputs), cases))
    for inputs, result in zip(cases, results, strict=True):
        assert torch.equal(result, generated(original, inputs))


def test_a_saved_decoder_generates_without_the_original(original, fast, tmp_path):
    InferenceOptimizer.save(fast, tmp_path / "decoder")
    again = InferenceOptimizer.load(tmp_path / "decoder")
    inputs = prompts(2, 5)
    assert torch.equal(generated(again, inputs), generated(original, inputs))
    assert again.config.num_hidden_layers == 2
    with refused("argument-conflict"):
        InferenceOptimizer.save(fast, tmp_path / "half", compression="bf16")


def test_a_copy_generates_too(original, fast):
    inputs = prompts(2, 5)
    assert torch.equal(generated(copy.deepcopy(fast), inputs), generated(original, inputs))


def test_what_a_decoder_cannot_take_is_refused_by_name(fast):
    inputs = prompts(2, 5)
    with refused("unsupported"):
        fast(**inputs, labels=inputs["input_ids"])
    with refused("model-input", "2", "5"):
        fast(inputs["input_ids"], attention_mask=torch.ones(2, 9, dtype=torch.long))
    with refused("argument-type", "DynamicCache", "StaticCache"):
        generated(fast, inputs, cache_implementation="static")


@pytest.mark.slow
def test_weights_in_8_bits_generate(original):
    inputs = prompts(2, 6)
    small = InferenceOptimizer.quantize(
        original, accelerator="openvino", method="weight_only", input_sample=inputs
    )
    with torch.no_grad():
        expected = original(**inputs).logits[0]
    assert (small(**inputs).logits[0] - expected).norm() < 0.1 * expected.norm()
    assert generated(small, inputs).shape == (2, 18)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_weights_are_private(original, precision):
    inputs, changed = prompts(2, 6), copy.deepcopy(original)
    small = InferenceOptimizer.quantize(
        changed,
        precision,
        accelerator="openvino",
        method="weight_only",
        input_sample=inputs,
        strict_check=False,
    )
    before = small(**inputs).logits
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.fill_(0.5)
    assert torch.equal(small(**inputs).logits, before)
    assert torch.equal(copy.deepcopy(small)(**inputs).logits, before)


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime"])
def test_gpt2_generates_the_tokens_of_the_original(accelerator):
    original, inputs = gpt2(), prompts(2, 6)
    fast = InferenceOptimizer.trace(original, inputs, accelerator=accelerator)
    for options in ({}, {"num_beams": 3}, {"do_sample": True}):
        for each in (inputs, prompts(1, 3), prompts(4, 9)):
            assert torch.equal(
                generated(fast, each, **options), generated(original, each, **options)
            )


def test_a_cache_with_a_window_is_refused():
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.MistralConfig(**sizes, **heads, **TOKENS, sliding_window=4)
    model = transformers.MistralForCausalLM(config).eval()
    with refused("model-unsupported"):
        InferenceOptimizer.trace(model, prompts(2, 6), accelerator="openvino")


def test_generate_computes_logits_of_the_last_token_of_a_prompt_only(fast, original, monkeypatch):
    shapes, step = [], type(fast).nano_step

    def noting(model, cache, inputs):
        logits = step(model, cache, inputs)
        shapes.append(logits.shape[1])
        return logits

    monkeypatch.setattr(type(fast), "nano_step", noting)
    inputs = prompts(2, 6)
    assert torch.equal(generated(fast, inputs), generated(original, inputs))
    assert set(shapes) == {1}
    inputs = prompts(1, 6)  # without padding, whose logits mean nothing
    whole = original(**inputs).logits
    for keep, expected in (
        (0, whole),
        (2, whole[:, -2:]),
        (torch.tensor([1, 4]), whole[:, [1, 4]]),
    ):
        result = fast(**inputs, logits_to_keep=keep).logits
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fast(**inputs).logits, whole, atol=1e-4, rtol=1e-4)


class OrderedByBuffer(torch.nn.Module):
    """Module whose outputs depend on a buffer of integers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("rows", torch.tensor([0, 1, 2, 3]))

    def forward(self, values):
        return self.linear(values).index_select(1, self.rows)


def test_a_network_of_rounded_weights_keeps_the_buffers_of_its_module(monkeypatch):
    monkeypatch.setenv("BIGDL_NANO_CACHE_GB", "0")
    torch.manual_seed(0)
    module, values = OrderedByBuffer().eval(), torch.rand(2, 4)
    network = InferenceOptimizer.quantize(
        module, "int8", accelerator="openvino", method="weight_only", input_sample=values
    )
    expected = network(values)
    module.rows.zero_()
    module.linear.weight.data.zero_()
    again = network(torch.cat([values, values]))  # another shape is compiled again
    assert torch.equal(again[:2], expected)
