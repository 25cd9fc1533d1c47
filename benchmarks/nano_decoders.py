"""Tokens per second of decoders of transformers: eager, OpenVINO and ONNX Runtime with a cache.

Weights are random. All sides are in one process and take turns; a table shows the median and the
range of the repeats. Greedy tokens of all sides are compared.
"""

import argparse
import statistics
import time

import torch
import transformers

from bigdl.nano.pytorch import InferenceOptimizer

SIDES = ("eager", "openvino", "onnxruntime")
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def llama(hidden, layers):
    heads = hidden // 64
    config = transformers.LlamaConfig(
        vocab_size=8000,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        **TOKENS,
    )
    return transformers.LlamaForCausalLM(config).eval()


def gpt2(hidden, layers):
    config = transformers.GPT2Config(
        vocab_size=8000, n_embd=hidden, n_layer=layers, n_head=hidden // 64, **TOKENS
    )
    return transformers.GPT2LMHeadModel(config).eval()


def measure(name, hidden, layers, rows, options):
    torch.manual_seed(0)
    model = {"llama": llama, "gpt2": gpt2}[name](hidden, layers)
    ids = torch.randint(3, 8000, (rows, options.prompt))
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    sides = {"eager": model}
    for runtime in SIDES[1:]:
        sides[runtime] = InferenceOptimizer.trace(
            model, prompt, accelerator=runtime, thread_num=options.threads
        )
    new = options.tokens
    seconds = {side: [] for side in sides}
    results = {}
    for repeat in range(options.repeats + 1):
        for side, each in sides.items():
            started = time.perf_counter()
            results[side] = each.generate(**prompt, max_new_tokens=new, min_new_tokens=new)
            if repeat:  # the first is a warm-up
                seconds[side].append(time.perf_counter() - started)
    for side, times in seconds.items():
        rates = [rows * new / each for each in times]
        ratios = [slow / fast for slow, fast in zip(seconds["eager"], times, strict=True)]
        same = "yes" if torch.equal(results[side], results["eager"]) else "NO"
        print(
            f"| {name} {hidden}x{layers}, {rows} row(s) | {side} | {statistics.median(rates):.0f} "
            f"({min(rates):.0f}–{max(rates):.0f}) | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}–{max(ratios):.2f}) | {same} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", default=["llama", "gpt2"])
    parser.add_argument("--sizes", nargs="*", default=["64x2", "512x6"], help="hidden x layers")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| model | Implementation | tokens/s | x eager | same tokens |\n|---|---|---|---|---|")
    for name in options.models:
        for size in options.sizes:
            hidden, layers = map(int, size.split("x"))
            for rows in options.rows:
                measure(name, hidden, layers, rows, options)


if __name__ == "__main__":
    main()
