"""CPU cost of `embed` and `prompt` per row, next to Spark UDFs, Ray Data, Daft and OpenVINO GenAI.

    python benchmarks/ai_functions.py embed MODEL [--rows 2400] [--rounds 3]
        [--baseline PATH] [--daft PATH] [--json results.json]
    python benchmarks/ai_functions.py prompt MODEL [--rows 200] [--rounds 2] [--json results.json]

MODEL is a sentence-transformers folder, or the Hugging Face folder of a decoder. All sides compute
the same texts, paragraphs of Python's manual, with two tasks of one thread, and take turns in each
round. A side computes `rows` texts and a quarter of them; its cost is the difference of the CPU
seconds of its process tree, divided by the difference in texts, so that the start of jobs and
models is not measured. PATH are folders of ``pip install --no-deps --target PATH`` with
sentence-transformers, and with daft and its pyarrow; sides without a folder are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pydoc_data.topics import topics

import numpy as np
import psutil

from bigdl.llm import TextModel, embed, prompt
from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

SENTENCE_TRANSFORMERS = "pandas_udf, sentence-transformers"
QUESTION = "Explain this text in detail: "
NEW_TOKENS = 24


def texts_of(count):
    paragraphs = [" ".join(p.split()) for topic in topics.values() for p in topic.split("\n\n")]
    paragraphs = [p for p in paragraphs if 40 <= len(p) <= 600]
    return [f"{n} {paragraphs[n * 7919 % len(paragraphs)]}" for n in range(count)]


class Meter(threading.Thread):
    """CPU seconds and memory of this process and its descendants, also of those that have ended."""

    def __init__(self):
        super().__init__(daemon=True)
        self._known, self._lock, self.peak, self._own = {}, threading.Lock(), 0.0, 0.0

    def run(self):
        while True:
            self.cpu()
            self._own = time.thread_time()
            time.sleep(0.25)

    def cpu(self):
        with self._lock:
            process = psutil.Process()
            for each in [process, *process.children(recursive=True)]:
                try:
                    times = each.cpu_times()
                    self._known[each.pid, each.create_time()] = times.user + times.system
                except psutil.Error:
                    continue
            return sum(self._known.values()) - self._own

    def memory(self):
        """Return the proportional set size of Python processes, in MB; without the JVM."""
        total = 0.0
        for each in psutil.Process().children(recursive=True):
            try:
                if "java" not in each.name():
                    total += each.memory_full_info().pss / 1e6
            except psutil.Error:
                continue
        return total


METER = Meter()


# -- embed -----------------------------------------------------------------------------------------


def udf_side(folder, path):
    from collections.abc import Iterator

    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    def encode(batches):
        sys.path.insert(0, path)
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        model = SentenceTransformer(folder, device="cpu")
        for batch in batches:
            yield pd.Series(list(model.encode(batch.tolist(), batch_size=32)))

    encode.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.Series]}
    function = pandas_udf(encode, "array<float>")
    return lambda frame: frame.withColumn("embedding", function("text"))


def ray_dataset(texts):
    import pandas as pd
    import ray

    half = len(texts) // 2
    parts = [pd.DataFrame({"text": part}) for part in (texts[:half], texts[half:])]
    return ray.data.from_pandas(parts)


def start_ray(path=""):
    import logging

    import ray

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False


def ray_embed_side(folder, path):
    import ray

    class Encoder:
        def __init__(self):
            import torch
            from sentence_transformers import SentenceTransformer

            torch.set_num_threads(1)
            self.model = SentenceTransformer(folder, device="cpu")

        def __call__(self, batch):
            batch["embedding"] = self.model.encode(list(batch["text"]), batch_size=32)
            return batch

    def run(texts):
        pool = ray.data.ActorPoolStrategy(size=2)
        result = ray_dataset(texts).map_batches(
            Encoder, compute=pool, num_cpus=0.4, batch_size=4096
        )
        assert result.materialize().count() == len(texts)

    return run


DAFT = """
import json, sys
import daft
from daft.functions import embed_text
import torch
torch.set_num_threads(1)
for line in sys.stdin:
    frame = daft.from_pydict({"text": json.loads(line)})
    made = embed_text(frame["text"], provider="transformers", model=sys.argv[1])
    frame = frame.with_column("embedding", made).collect()
    print("rows", len(frame), flush=True)
"""


class DaftSide:
    """Daft in a process of its own, whose pyarrow is another one."""

    def __init__(self, folder, daft, sentence_transformers):
        paths = [daft, sentence_transformers, *filter(None, sys.path)]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "DAFT_PROGRESS_BAR": "0", "DO_NOT_TRACK": "true",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", DAFT, folder],
            env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __call__(self, texts):
        print(json.dumps(texts), file=self._process.stdin, flush=True)
        line = ""
        while not line.startswith("rows"):
            line = self._process.stdout.readline()
            assert line, "Daft ended"
        assert line.split() == ["rows", str(len(texts))], line

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def vectors_of(run, frame):
    return np.stack(run(frame).orderBy("id").toPandas().embedding)


def embed_sides(options, spark):
    models = {name: TextModel(options.model, name) for name in ("fp32", "int8")}
    frames = {}

    def frame_of(texts):
        key = texts[0], len(texts)
        if key not in frames:
            frame = spark.createDataFrame(list(enumerate(texts)), ["id", "text"])
            frames[key] = frame.repartition(2).cache()
            frames[key].count()
        return frames[key]

    on_spark = {
        f"embed, {name}": lambda frame, model=model: embed(frame, "text", model=model)
        for name, model in models.items()
    }
    if options.baseline:
        on_spark[SENTENCE_TRANSFORMERS] = udf_side(options.model, options.baseline)
    small = frame_of(texts_of(options.rows // 4))
    vectors = {name: vectors_of(run, small) for name, run in on_spark.items()}
    reference = vectors.get(SENTENCE_TRANSFORMERS, vectors["embed, fp32"])
    unit = {n: v / np.linalg.norm(v, axis=1, keepdims=True) for n, v in vectors.items()}
    reference = reference / np.linalg.norm(reference, axis=1, keepdims=True)
    cosines = {name: (each * reference).sum(1) for name, each in unit.items()}

    def spark_side(run):
        def side(texts):
            made = run(frame_of(texts))
            made.selectExpr("count(embedding)", "sum(embedding[0])").collect()

        side.prepare = frame_of
        return side

    sides = {name: spark_side(run) for name, run in on_spark.items()}
    if options.baseline:
        start_ray(options.baseline)
        sides["Ray Data, sentence-transformers"] = ray_embed_side(options.model, options.baseline)
    if options.daft:
        sides["Daft embed_text"] = DaftSide(options.model, options.daft, options.baseline)
    facts = {
        name: {"cosine_mean": float(each.mean()), "cosine_min": float(each.min())}
        for name, each in cosines.items()
    }
    return sides, facts


# -- prompt ----------------------------------------------------------------------------------------


def ray_prompt_side(folder):
    import ray

    class Generator:
        def __init__(self):
            import torch
            import transformers

            torch.set_num_threads(1)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
            self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
            self.model = model.eval()

        def __call__(self, batch):
            import torch

            chats = [[{"role": "user", "content": QUESTION + text}] for text in batch["text"]]
            texts = self.tokenizer.apply_chat_template(
                chats, tokenize=False, add_generation_prompt=True
            )
            inputs = self.tokenizer(
                texts, padding=True, return_tensors="pt", add_special_tokens=False
            )
            with torch.no_grad():
                ids = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            new = ids[:, inputs["input_ids"].shape[1] :]
            batch["answer"] = np.array(
                self.tokenizer.batch_decode(new, skip_special_tokens=True), object
            )
            return batch

    def run(texts):
        pool = ray.data.ActorPoolStrategy(size=2)
        result = ray_dataset(texts).map_batches(
            Generator, compute=pool, num_cpus=0.4, batch_size=32
        )
        assert result.materialize().count() == len(texts)

    return run


BY_HAND = """
import json, sys
import openvino_genai as og
scheduler = og.SchedulerConfig()
scheduler.enable_prefix_caching, scheduler.max_num_seqs = True, 64
pipeline = og.ContinuousBatchingPipeline(
    sys.argv[1], scheduler, "CPU",
    {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False},
)
tokenizer = pipeline.get_tokenizer()
config = og.GenerationConfig()
config.max_new_tokens, config.apply_chat_template = int(sys.argv[2]), False
for line in sys.stdin:
    handles = []
    for number, text in enumerate(json.loads(line)):
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], True)
        ids = tokenizer.encode(text, add_special_tokens=False).input_ids
        handles.append(pipeline.add_request(number, ids, config))
    while pipeline.has_non_finished_requests():
        pipeline.step()
    texts = [tokenizer.decode(handle.read_all()[0].generated_ids) for handle in handles]
    print("rows", len(texts), flush=True)
"""


class GenaiSide(DaftSide):
    """OpenVINO GenAI's continuous batching in a process of its own."""

    def __init__(self, path):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", BY_HAND, str(path), str(NEW_TOKENS)],
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __call__(self, texts):
        super().__call__([QUESTION + text for text in texts])


def prompt_sides(options, spark):
    model = TextModel(options.model)
    arguments = {"model": model, "max_new_tokens": NEW_TOKENS}

    def frame_of(texts):
        return spark.createDataFrame(list(enumerate(texts)), ["id", "text"]).repartition(2)

    def shared(texts):
        made = prompt(frame_of(texts), QUESTION + "{text}", **arguments)
        assert made.selectExpr("count(answer)").first()[0] == len(texts)

    def in_tasks(texts):
        def answered(frames):
            for frame in frames:
                yield prompt(frame, QUESTION + "{text}", **arguments)[["id", "answer"]]

        made = frame_of(texts).mapInPandas(answered, "id long, answer string")
        assert made.selectExpr("count(answer)").first()[0] == len(texts)

    start_ray()
    sides = {
        "prompt, one engine of the machine": shared,
        "prompt, one engine for each task": in_tasks,
        "OpenVINO GenAI by hand": GenaiSide(model.path),
        "Ray Data, transformers.generate": ray_prompt_side(options.model),
    }
    return sides, {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("function", choices=["embed", "prompt"])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--baseline", default="")
    parser.add_argument("--daft", default="")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    options.rows = options.rows or {"embed": 2400, "prompt": 200}[options.function]
    METER.start()
    os.environ["OMP_NUM_THREADS"] = "1"
    init_orca_context("local", cores=2, extra_params={"spark.ui.enabled": "false"})
    spark = OrcaContext.get_spark_session()
    make = embed_sides if options.function == "embed" else prompt_sides
    sides, facts = make(options, spark)
    sizes = (options.rows // 4, options.rows)
    calls = 2 * options.rounds + 1
    texts = texts_of(calls * options.rows)  # no text twice, for the caches of prefixes
    costs, walls, memory = ({name: [] for name in sides} for _ in range(3))
    for name, run in sides.items():  # warms up, and starts processes
        run(texts[:16])
        print("ready:", name, flush=True)
    for number in range(options.rounds):
        for name, run in sides.items():
            cpu, wall = [], []
            for call, size in enumerate(sizes, 1 + 2 * number):
                part = texts[call * options.rows :][:size]
                getattr(run, "prepare", len)(part)
                before, start = METER.cpu(), time.perf_counter()
                run(part)
                wall.append(time.perf_counter() - start)
                memory[name].append(METER.memory())
                cpu.append(METER.cpu() - before)
            difference = sizes[1] - sizes[0]
            costs[name].append(1000 * (cpu[1] - cpu[0]) / difference)
            walls[name].append(1000 * (wall[1] - wall[0]) / difference)
            print(name, f"{costs[name][-1]:.2f} CPU ms, {walls[name][-1]:.2f} ms", flush=True)
    results = {}
    for name, values in costs.items():
        results[name] = {
            "cpu_ms_per_row": statistics.median(values),
            "range": [min(values), max(values)],
            "wall_ms_per_row": statistics.median(walls[name]),
            "memory_mb": max(memory[name]),
            **facts.get(name, {}),
        }
        print(name, json.dumps(results[name]), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    for run in sides.values():
        if isinstance(run, DaftSide):
            run.close()
    import ray

    ray.shutdown()
    stop_orca_context()


if __name__ == "__main__":
    main()
