"""Accelerate third-party models, compare each with the original, and print a table.

``make test-zoo`` runs it in a separate environment, with timm, transformers,
segmentation_models_pytorch and torch_geometric from PyPI. Weights are random; nothing is loaded
from a hub. Each model is converted by each method with one input and compared on others: of other
values, of more rows, of one row. Exits with 1 if a result is wrong or something is raised that is
not a sentence.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bigdl.nano.acceleration import Precision

METHODS = (
    *("openvino_fp32", "openvino_bf16", "openvino_int8", "openvino_int8_weight_only"),
    *("onnxruntime_fp32", "onnxruntime_int8_qlinear", "jit_fp32", "inductor_fp32"),
    *("bf16", "static_int8", "torchao_int8"),
)
EXACT = 1e-6
ROWS = (2, 3, 1, 5)  # of the inputs that are compared, and of those that int8 is calibrated with
DRAWS = 10  # of noise of a precision's size, each of which may move what is chosen by a bound
TIMES = 4  # as much as noise of a precision's size may move a result, a method may
Make = Callable[[int, torch.Generator], tuple[tuple, dict]]
ZOO: dict[str, tuple[Callable[[], nn.Module], Make]] = {}


def images(size: int = 64) -> Make:
    return lambda rows, random: ((torch.randn(rows, 3, size, size, generator=random),), {})


def numbers(*shape: int) -> Make:
    return lambda rows, random: ((torch.randn(rows, *shape, generator=random),), {})


def tokens(words: int = 100, length: int = 8, **others: Any) -> Make:
    def make(rows: int, random: torch.Generator) -> tuple[tuple, dict]:
        ids = torch.randint(3, words, (rows, length), generator=random)
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[:, length - 2 :] = torch.randint(0, 2, (rows, 2), generator=random)
        mask[:, -1] &= mask[:, -2]
        return (), {"input_ids": ids, "attention_mask": mask, **others}

    return make


def add(name: str, make: Make) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def added(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO[name] = (build, make)
        return build

    return added


def add_timm() -> None:
    import timm

    for name in (
        *("resnet18", "mobilenetv3_small_050", "efficientnet_lite0", "convnext_atto"),
        *("regnetx_002", "ghostnet_050", "densenet121", "edgenext_xx_small"),
    ):
        add(f"timm {name}", images())(lambda name=name: timm.create_model(name, num_classes=10))
    for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224"):
        add(f"timm {name}", images())(
            lambda name=name: timm.create_model(name, num_classes=10, img_size=64)
        )
    add("timm resnet18, features", images())(
        lambda: timm.create_model("resnet18", features_only=True)
    )


def add_segmentation() -> None:
    import segmentation_models_pytorch as smp

    for name in ("Unet", "FPN", "Linknet", "DeepLabV3Plus", "PSPNet"):
        add(f"smp {name}", images())(
            lambda name=name: getattr(smp, name)("resnet18", encoder_weights=None, classes=3)
        )
    add("smp Unet with a class", images())(
        lambda: smp.Unet("resnet18", encoder_weights=None, aux_params={"classes": 4})
    )


def add_transformers() -> None:
    import transformers as hf

    small = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    add("BERT", tokens())(lambda: hf.BertModel(hf.BertConfig(**small)))
    add("BERT, classes", tokens())(
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**small, num_labels=3))
    )
    add("RoBERTa, tokens", tokens())(
        lambda: hf.RobertaForTokenClassification(hf.RobertaConfig(**small))
    )
    add("ELECTRA", tokens())(lambda: hf.ElectraModel(hf.ElectraConfig(**small, embedding_size=32)))
    add("DistilBERT", tokens())(
        lambda: hf.DistilBertModel(
            hf.DistilBertConfig(
                vocab_size=100, dim=32, n_layers=2, n_heads=2, hidden_dim=64,
                max_position_embeddings=64,
            )
        )
    )  # fmt: skip
    llama = {**small, "num_key_value_heads": 2}
    add("Llama", tokens())(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**llama)))
    add("Llama, no cache", tokens(use_cache=False))(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**llama))
    )
    gpt2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    add("GPT-2", tokens())(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)))
    add("GPT-2, no cache", tokens(use_cache=False))(
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2))
    )
    t5 = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    add("T5 encoder", tokens())(lambda: hf.T5EncoderModel(hf.T5Config(**t5)))
    vision = {**small, "image_size": 64, "patch_size": 16}
    vision = {k: v for k, v in vision.items() if k not in ("vocab_size", "max_position_embeddings")}
    pixels: Make = lambda rows, random: (  # noqa: E731
        (),
        {"pixel_values": torch.randn(rows, 3, 64, 64, generator=random)},
    )
    add("ViT", pixels)(lambda: hf.ViTForImageClassification(hf.ViTConfig(**vision)))
    add("Segformer", pixels)(
        lambda: hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(depths=[1, 1, 1, 1], decoder_hidden_size=16)
        )
    )


def add_graphs() -> None:
    from torch_geometric.nn import GAT, GCN, GraphSAGE

    def graph(rows: int, random: torch.Generator) -> tuple[tuple, dict]:
        count = 4 * rows
        edges = torch.randint(0, count, (2, 20), generator=random)
        return (torch.randn(count, 6, generator=random), edges), {}

    for cls in (GCN, GraphSAGE, GAT):
        add(f"PyG {cls.__name__}", graph)(lambda cls=cls: cls(6, 8, num_layers=2, out_channels=3))


@add("LSTM", numbers(5, 6))
class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        steps, (hidden, _) = self.lstm(x)
        return self.head(steps[:, -1]), hidden


@add("GRU, a cell in a loop", numbers(5, 6))
class GRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.zeros(x.shape[0], 8)
        for step in range(x.shape[1]):
            hidden = self.cell(x[:, step], hidden)
        return hidden


def _padded(rows: int, random: torch.Generator) -> tuple[tuple, dict]:
    lengths = torch.randint(1, 6, (rows,), generator=random)
    lengths[0] = 5
    return (torch.randn(rows, 5, 6, generator=random), lengths), {}


@add("LSTM, packed", _padded)
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return self.lstm(packed)[1][0]


@add("detector, boxes above a score", images(32))
class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, 8, 4, 4)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> Any:
        boxes_found = self.head(torch.relu(self.trunk(x))).flatten(2).transpose(1, 2).flatten(0, 1)
        boxes_found = boxes_found[boxes_found[:, 4] > 0.1]
        return {"boxes": boxes_found[:, :4], "scores": boxes_found[:, 4].sigmoid()}


@add("detector, a list of images", images(32))
class ListDetector(Detector):
    def forward(self, x: torch.Tensor) -> Any:
        return [super(ListDetector, self).forward(each[None]) for each in x]


@add("detector, best k", images(32))
class TopDetector(Detector):
    def forward(self, x: torch.Tensor) -> Any:
        head_output = self.head(torch.relu(self.trunk(x))).flatten(2).transpose(1, 2)
        scores, indices = head_output[..., 4].topk(5)
        boxes = head_output[..., :4].gather(1, indices[..., None].expand(-1, -1, 4))
        return {"boxes": boxes, "scores": scores, "places": indices}


def _ratings(rows: int, random: torch.Generator) -> tuple[tuple, dict]:
    users, items = (torch.randint(0, 50, (rows,), generator=random) for _ in range(2))
    return (users, items), {}


@add("NCF", _ratings)
class NCF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8), nn.Embedding(50, 8)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> Any:
        return self.layers(torch.cat([self.users(user), self.items(item)], 1)).squeeze(1)


@add("arguments named cat and mean", lambda n, r: ((numbers(6)(n, r)[0][0],) * 2, {}))
class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, cat: torch.Tensor, mean: torch.Tensor) -> Any:
        return self.layer(torch.cat([cat, mean], 1)) + cat.mean()


def _nested(rows: int, random: torch.Generator) -> tuple[tuple, dict]:
    x = torch.randn(rows, 6, generator=random)
    return ({"x": x, "more": [x + 1, (x * 2,)]},), {"scale": 2.0}


@add("nested dict, keyword", _nested)
class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, batch: dict, *, scale: float = 1.0) -> Any:
        one = self.layer(batch["x"]) * scale
        return {"one": one, "rest": [self.layer(batch["more"][1][0]), None, ("text", one > 0)]}


@add("scatter by index_add", lambda n, r: (_scattered(n, r), {}))
class Scatter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
        messages = self.layer(x)[edges[0]]
        total = torch.zeros(x.shape[0], 4).index_add(0, edges[1], messages)
        index = edges[1][:, None].expand(-1, 4)
        largest = torch.zeros(x.shape[0], 4).scatter_reduce(0, index, messages, "amax")
        return total, largest


def _scattered(rows: int, random: torch.Generator) -> tuple:
    edges = torch.randint(0, 4 * rows, (2, 9), generator=random)
    return torch.randn(4 * rows, 6, generator=random), edges


@add("branch on data", numbers(6))
class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        if x.sum() > 0:
            return self.layer(x)
        return -2 * self.layer(x)


@add("autoencoder with noise", numbers(6))
class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(functional.dropout(x, 0.5, training=True))


@add("state in an attribute", numbers(6))
class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.total = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> Any:
        self.total = self.total + self.layer(x).sum(0)
        return self.layer(x) + self.total


def add_lightning() -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)

        def training_step(self, batch: Any, index: int) -> Any:
            return functional.cross_entropy(self(batch[0]), batch[1])

    add("LightningModule", numbers(6))(Module)


def fill() -> None:
    """Register the models of third-party packages; a missing package is an error."""
    # PyPI's torchvision is built for CUDA: with a CPU torch its operators are missing, and its
    # import needs their names only.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    fill.library = library  # type: ignore[attr-defined]
    for each in (add_timm, add_segmentation, add_transformers, add_graphs, add_lightning):
        each()


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def outcome(name: str, method: str) -> tuple[str, str]:
    """Return the table entry, and the message of an error."""
    from bigdl.common.errors import UsageError
    from bigdl.nano.acceleration.agreement import difference
    from bigdl.nano.acceleration.method import find_method
    from bigdl.nano.pytorch import InferenceOptimizer
    from bigdl.nano.pytorch.inference.decoders import DecoderModel

    build, make = ZOO[name]
    torch.manual_seed(0)
    model = build().eval()
    args, kwargs = make(2, seeded(0))
    options: dict[str, Any] = {"input_sample": args or None, "example_kwarg_inputs": kwargs}
    if not args:
        options = {"input_sample": kwargs}
    precision = find_method(method).precision
    if precision.needs_calibration:
        batches = (make(ROWS[number % len(ROWS)], seeded(100 + number)) for number in range(32))
        options["calib_data"] = [_batch(*batch) for batch in batches]
    try:
        fast = InferenceOptimizer.build(model, method, **options)
    except UsageError as error:
        text = str(error)
        return ("refused" if "\n" not in text else "CRASH"), text
    except Exception as error:
        return "CRASH", f"{type(error).__name__}: {error}"
    worst, refused = 0.0, ""
    for number, rows in enumerate(ROWS, start=10):
        args, kwargs = make(rows, seeded(number))
        with torch.no_grad():
            try:
                expected, again = model(*args, **kwargs), model(*args, **kwargs)
            except Exception:
                continue
            if difference(expected, again, 1e-4):
                return "random", ""
            try:
                actual = fast(*args, **kwargs)
            except UsageError as error:
                refused = str(error)
                continue
            except Exception as error:
                return "CRASH", f"{type(error).__name__}: {error}"
        deviation = difference(expected, actual, 0.0)
        if deviation:
            draws = (_moved(model, args, kwargs, expected, precision) for _ in range(DRAWS))
            if not any(
                deviation.size <= max(precision.error_bound, TIMES * moved) for moved in draws
            ):
                return "WRONG", deviation.words
            worst = max(worst, deviation.size)
    others = ""
    if isinstance(fast, DecoderModel):
        for rows, beams in itertools.product((2, 1), (1, 3)):
            _, prompt = make(rows, seeded(rows))
            asked = {**prompt, "max_new_tokens": 12, "num_beams": beams, "pad_token_id": 0}
            expected = model.generate(**asked)
            if not difference(expected, fast.generate(**asked), 0.0):
                continue
            draws = (_noisy(model, precision, TIMES) for _ in range(DRAWS))
            noisy = (each.generate(**asked) for each in draws)
            if precision == "fp32" or not any(difference(expected, each, 0.0) for each in noisy):
                return "WRONG", f"other tokens with {beams} beams"
            others = ", other tokens"
    if refused:
        return "some sizes", refused
    if worst == math.inf:
        return "other sizes", ""
    return ("exact" if worst <= EXACT else f"{worst:.0e}") + others, ""


def _moved(
    model: nn.Module, args: tuple, kwargs: dict, expected: Any, precision: Precision
) -> float:
    """Return the change of the result caused by noise of a precision's rounding error."""
    from bigdl.nano.acceleration.agreement import difference

    with torch.no_grad():
        moved = _noisy(model, precision)(*args, **kwargs)
    error = difference(expected, moved, 0.0)
    return error.size if error else 0.0


def _noisy(model: nn.Module, precision: Precision, times: float = 1.0) -> nn.Module:
    """Return a copy of a model with weight noise of a precision's rounding error."""
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.is_floating_point():
                weight.mul_(1 + times * precision.rounding * torch.randn_like(weight))
    return noisy


def _batch(args: tuple, kwargs: dict) -> Any:
    if not args:
        return kwargs
    return args[0] if len(args) == 1 and torch.is_tensor(args[0]) else (args, 0)


class Page:
    """Page with the table; writing replaces rows of the same models.

    Parameters
    ----------
    path : Path
    methods : sequence of str
        The columns. A table with other columns is not kept.
    """

    BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"

    def __init__(self, path: Path, methods: Sequence[str]):
        self._path = path
        self._head = f"| model | {' | '.join(methods)} |"
        self._line = f"|---{'|---' * len(methods)}|"
        table = path.read_text(encoding="utf-8").partition(self.BEGIN)[2].partition(self.END)[0]
        lines = table.splitlines() if self._head in table else []
        known = set(ZOO)
        self._rows = {
            name: line
            for line in lines
            for name in [line.strip("| ").partition(" |")[0]]
            if line.startswith("| ") and name in known
        }
        self._notes = [line for line in lines if line.startswith("* ")]

    def write(self, name: str, row: str, notes: Mapping[str, str]) -> None:
        """Write the row of a model and its error messages."""
        self._rows[name] = row
        of_model = f"* {name}, "
        self._notes = [line for line in self._notes if not line.startswith(of_model)]
        self._notes += [f"{of_model}{key}: {' '.join(why.split())}" for key, why in notes.items()]
        ordered = [self._rows[each] for each in ZOO if each in self._rows]
        sentences = ["Errors:", "", *self._notes, ""] if self._notes else []
        body = "\n".join([self._head, self._line, *ordered, "", *sentences])
        text = self._path.read_text(encoding="utf-8")
        before, after = text.partition(self.BEGIN)[0], text.partition(self.END)[2]
        page = before + self.BEGIN + body + self.END + after
        self._path.write_text(page, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of models; all by default")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--write", type=Path, help="page in whose table the rows are put")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    fill()
    methods = tuple(options.methods.split(","))
    names = [n for n in ZOO if not options.names or any(part in n for part in options.names)]
    page = Page(options.write, methods) if options.write else None
    bad = 0
    begin = time.monotonic()
    for name in names:
        results = {method: outcome(name, method) for method in methods}
        bad += sum(word in ("WRONG", "CRASH") for word, _ in results.values())
        notes = {method: why for method, (_, why) in results.items() if why}
        row = f"| {name} | {' | '.join(word for word, _ in results.values())} |"
        print(row, *(f"    {method}: {why}" for method, why in notes.items()), sep="\n", flush=True)
        if page:
            page.write(name, row, notes)
    print(f"{len(names)} models in {time.monotonic() - begin:.0f} s, {bad} wrong or crashed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
