"""Modules of fine-tuned models: their loss on rows of tokens, without padding where possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from bigdl.common.errors import UsageError, as_usage_error, require
from bigdl.llm.conversion import pooling_steps, quiet_loading, text_module
from bigdl.llm.tuning.rows import CAUSAL, CLASSIFICATION, EMBEDDING
from bigdl.training.state import isolated_rng

if TYPE_CHECKING:
    import peft as peft_library
    from transformers import PreTrainedModel

    from bigdl.runtime.collectives.base import GradientSync

_TOKENS_OF_PASS = 512  # tokens of a forward pass, unless one row is longer
_PADDED_TOKENS = 2048  # the same with padding
_SCALE = 20.0  # of cosine similarities, as in sentence-transformers
_CLASSES = {CAUSAL: "AutoModelForCausalLM", CLASSIFICATION: "AutoModelForSequenceClassification"}
_PEFT_TASKS = {CAUSAL: "CAUSAL_LM", CLASSIFICATION: "SEQ_CLS"}
_HEADS = ("classifier", "score")  # layers that peft trains for SEQ_CLS


@dataclass
class TuningOutput:
    """Loss of a batch of rows.

    Attributes
    ----------
    loss : torch.Tensor
        Mean over the labels.
    count : float
        Number of labels.
    logits : torch.Tensor, optional
        Logits of the classes of each row.
    """

    loss: torch.Tensor
    count: float
    logits: torch.Tensor | None = None


def label_count(output: TuningOutput, target: object) -> float:
    """Return the number of labels of a batch, by which its mean loss is weighted."""
    return output.count


@dataclass
class ModuleSource:
    """Picklable function that loads a model and adds its adapter.

    Attributes
    ----------
    folder : str
        Folder with the files of a Hugging Face model; every worker reads it.
    task : str
    peft : peft.PeftConfig, optional
        Adapter; None trains all weights.
    dtype : str
        dtype of the frozen weights; the trained ones are float32.
    checkpointing : bool
        Whether the backward pass computes activations again, to save memory.
    packing : bool
        Whether several rows are computed as one sequence, if the model can.
    pad_token : int
    classes : tuple of str
        Names of the classes of a classifier; empty for those of the files.
    """

    folder: str
    task: str
    peft: Any = None
    dtype: str = "float32"
    checkpointing: bool = False
    packing: bool = True
    pad_token: int = 0
    classes: tuple[str, ...] = ()

    def base(self) -> tuple[torch.nn.Module, list[str]]:
        """Return the model of the folder, without an adapter, and the weights that its files lack.

        Those, such as the weights of a new classifier, get the same random values in each call.
        """
        transformers = require("transformers", "llm")
        if not Path(self.folder, "config.json").exists():
            raise UsageError(
                f"{self.folder!r} has no config.json on this machine; pass the path of a folder "
                "that the driver and all workers share",
                code="path-missing",
                path=self.folder,
            )
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "local_files_only": True,
            "output_loading_info": True,
        }
        if self.classes:
            names = dict(enumerate(self.classes))
            options |= {
                "num_labels": len(names),
                "id2label": names,
                "label2id": {name: index for index, name in names.items()},
                "ignore_mismatched_sizes": True,
            }
        model_class = getattr(transformers, _CLASSES.get(self.task, "AutoModel"))
        failure = f"The model in {self.folder!r} cannot be loaded for task={self.task!r}"
        with (
            quiet_loading(),
            isolated_rng(0),
            as_usage_error(failure, code="model-unsupported", path=self.folder),
        ):
            model, facts = model_class.from_pretrained(self.folder, **options)
        if getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = self.pad_token
        missing = {*facts["missing_keys"], *(each[0] for each in facts["mismatched_keys"])}
        return model, sorted(missing)

    def _adapter(self, missing: Sequence[str]) -> peft_library.PeftConfig:
        """Return the configuration of the adapter, which trains all layers with missing weights."""
        settings: Any = self.peft
        task_type = settings.task_type or _PEFT_TASKS.get(self.task, "FEATURE_EXTRACTION")
        kept = list(getattr(settings, "modules_to_save", None) or ())
        known = [*kept, *(_HEADS if task_type == "SEQ_CLS" else ())]
        changes: dict[str, Any] = {"task_type": task_type}
        if saved := [*kept, *layers_of(missing, known)]:
            changes["modules_to_save"] = saved  # a new list, which peft extends
        return dataclasses.replace(settings, **changes)

    def _pooling(self) -> list[dict[str, Any]]:
        """Return the steps after the encoder, as the files say."""
        steps = pooling_steps(Path(self.folder))
        if any(step["step"] == "dense" for step in steps):
            raise UsageError(
                f"{self.folder!r} has a Dense layer after its pooling, which cannot be trained; "
                "use an encoder with pooling only",
                code="model-unsupported",
                path=self.folder,
            )
        return steps

    def __call__(self, config: Mapping[str, Any]) -> TuningModule:
        """Return the module to train."""
        base, missing = self.base()
        model: Any = base
        if self.peft is not None:
            peft = require("peft", "llm")
            with as_usage_error(
                f"The adapter does not fit the model in {self.folder!r}",
                code="argument-value",
                argument="peft",
            ):
                model = peft.get_peft_model(model, self._adapter(missing))
        if self.checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        module = TuningModule(model, self.task, self.pad_token)
        if self.task == EMBEDDING:
            module.use_pooling(self._pooling())
        module.packing = self.packing and self.task == CAUSAL and module.can_pack()
        return module


class TuningModule(torch.nn.Module):
    """Module that computes the loss of rows of tokens.

    Its parameters and its state are those that are trained: with an adapter, neither the optimizer
    nor a checkpoint has the weights of the model.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
    task : str
    pad_token : int

    Attributes
    ----------
    packing : bool
        Whether several rows are computed as one sequence.
    """

    packing = False

    def __init__(self, model: torch.nn.Module, task: str, pad_token: int = 0):
        super().__init__()
        self.model, self._task, self._pad_token = model, task, pad_token
        self._encoder: list[torch.nn.Module] = []  # in a list, so that it is not registered
        self._sync: GradientSync | None = None

    def use_pooling(self, steps: list[dict[str, Any]]) -> None:
        """Set the steps that make one vector of the states of a text."""
        self._encoder = [text_module(cast("PreTrainedModel", self.model), steps)]

    def connect_workers(self, sync: GradientSync) -> None:
        """Use the texts of all workers as negatives of each other."""
        self._sync = sync

    # -- trained weights -----------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the names and values of the trained parameters."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if parameter.requires_grad:
                yield name, parameter

    def state_dict(  # type: ignore[override]
        self, *args: object, **keywords: object
    ) -> dict[str, torch.Tensor]:
        """Return the trained weights."""
        state: dict[str, torch.Tensor] = super().state_dict(*args, **keywords)  # type: ignore[arg-type, call-overload]
        trained = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in state.items() if name in trained}

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False
    ) -> tuple[list[str], list[str]]:
        """Load the trained weights.

        Raises
        ------
        RuntimeError
            If the weights belong to another module.
        """
        trained = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        if trained != set(state_dict):
            missing, unknown = trained - set(state_dict), set(state_dict) - trained
            raise RuntimeError(
                f"{len(missing)} weights are missing ({', '.join(sorted(missing)[:3])}) and "
                f"{len(unknown)} unknown ({', '.join(sorted(unknown)[:3])})"
            )
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    # -- passes --------------------------------------------------------------------------------

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> TuningOutput:
        """Return the loss of a batch of rows.

        Parameters
        ----------
        tokens : torch.Tensor, shape (rows, length)
            See :mod:`bigdl.llm.tuning.rows`.
        labels : torch.Tensor, optional
            Classes of the rows, or the tokens of the texts that belong to them.
        """
        lengths = (tokens >= 0).sum(1).tolist()
        if self._task == CAUSAL:
            return self._causal(tokens, lengths)
        if self._task == EMBEDDING and labels is not None:
            others = (labels >= 0).sum(1).tolist()
            return self._contrastive(
                self._by_length(tokens, lengths), self._by_length(labels, others)
            )
        logits = self._by_length(tokens, lengths)
        if labels is None:
            return TuningOutput(logits.sum() * 0.0, 0.0, logits)
        loss = functional.cross_entropy(logits.float(), labels.reshape(-1).long())
        return TuningOutput(loss, float(len(tokens)), logits)

    def _causal(self, tokens: torch.Tensor, lengths: Sequence[int]) -> TuningOutput:
        total, count = tokens.new_zeros((), dtype=torch.float32), 0
        passes = pack(lengths, _TOKENS_OF_PASS) if self.packing else _equal_rows(lengths)
        for rows in passes:
            row = torch.cat([tokens[index, : lengths[index]] for index in rows])
            positions = torch.cat([torch.arange(lengths[i], device=row.device) for i in rows])
            predicted = ((row & 1) == 1) & (positions > 0)
            ids, (targets,) = (row >> 1).long(), predicted.nonzero(as_tuple=True)
            if not len(targets):
                continue
            logits = self._logits(ids, positions, targets - 1)
            losses = functional.cross_entropy(logits.float(), ids[targets], reduction="sum")
            total, count = total + losses, count + len(targets)
        if not count:  # a loss without a graph has no backward pass
            total = sum((p.sum() * 0.0 for p in self.parameters()), total)
        return TuningOutput(total / max(1, count), float(count))

    def _logits(
        self, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits at the kept positions of one sequence of packed rows."""
        result = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=kept,
        )
        return result.logits[0]

    def _by_length(self, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return the logits or embeddings of rows, computed in groups of similar length."""
        parts, order = [], []
        for rows in groups(lengths, _PADDED_TOKENS):
            longest = max(1, *(lengths[index] for index in rows))
            some = tokens[rows][:, :longest]
            mask = some >= 0
            ids = torch.where(mask, some >> 1, self._pad_token).long()
            inputs = {"input_ids": ids, "attention_mask": mask.long()}
            parts.append(
                self._encoder[0](**inputs) if self._encoder else self.model(**inputs).logits
            )
            order += rows
        index = torch.tensor(order, device=tokens.device).argsort()
        return torch.cat(parts)[index]

    def _contrastive(self, texts: torch.Tensor, others: torch.Tensor) -> TuningOutput:
        """Return the loss of pairs, whose negatives are the other pairs of all workers.

        Each worker computes the loss of the whole batch, with a graph for its rows only. Its
        gradient is multiplied by the number of workers, over which gradients are averaged.
        """
        workers, sides = 1, [functional.normalize(side.float(), dim=1) for side in (texts, others)]
        if self._sync is not None and self.training and self._sync.world_size > 1:
            sides, workers = _of_all_workers(sides, self._sync)
        similarities = _SCALE * sides[0] @ sides[1].T
        loss = functional.cross_entropy(
            similarities, torch.arange(len(similarities), device=similarities.device)
        )
        return TuningOutput(loss + (workers - 1) * (loss - loss.detach()), 1.0)

    def join_workers(self) -> None:
        """Take part in the exchange of a batch of which this worker has no rows."""
        if self._task == EMBEDDING and self._sync is not None and self._sync.world_size > 1:
            device = next(super().parameters()).device
            _of_all_workers([torch.zeros(0, 0, device=device)] * 2, self._sync)

    @torch.no_grad()
    def can_pack(self) -> bool:
        """Return True if packed rows have the logits that they have separately."""
        training = self.training
        device = next(super().parameters()).device
        size = 5
        first = torch.arange(3, 3 + size, device=device)
        second = torch.arange(4 + size, 4, -1, device=device)
        positions = torch.arange(size, device=device)
        self.eval()
        try:
            alone = [self._logits(ids, positions, positions) for ids in (first, second)]
            together = torch.cat([first, second]), torch.cat([positions, positions])
            packed = self._logits(*together, torch.arange(2 * size, device=device))
            scale = torch.cat(alone).float().abs().max()
            return bool((packed - torch.cat(alone)).float().abs().max() <= 1e-3 * scale)
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        finally:
            self.train(training)


def _of_all_workers(
    sides: Sequence[torch.Tensor], sync: GradientSync
) -> tuple[list[torch.Tensor], int]:
    """Return the rows of all workers in the order of ranks; a collective call.

    Returns
    -------
    sides : list of torch.Tensor
        Rows with a graph for those of this worker only.
    workers : int
        Number of workers that have rows.
    """
    facts = sync.all_gather([float(size) for size in sides[0].shape])
    sizes, width = [int(rows) for rows, _ in facts], int(max(dim for _, dim in facts))
    first, last = sum(sizes[: sync.rank]), sum(sizes[: sync.rank + 1])
    result = []
    for side in sides:
        every = side.new_zeros(sum(sizes), width, requires_grad=False)
        if len(side):
            every[first:last] = side.detach()
        every = sync.all_reduce(every).to(side.device)
        result.append(torch.cat([every[:first], side, every[last:]]) if len(side) else every)
    return result, sum(size > 0 for size in sizes)


def layers_of(weights: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the layers of weights, without those that a known layer contains.

    Examples
    --------
    >>> layers_of(["head.dense.bias", "head.dense.weight", "classifier.weight"], ["classifier"])
    ['head.dense']
    """
    names = list(known)
    for layer in sorted({name.rpartition(".")[0] for name in weights} - {""}):
        parts = layer.split(".")
        parents = (".".join(parts[: count + 1]) for count in range(len(parts)))
        if not any(parent.endswith(tuple(names)) for parent in parents):
            names.append(layer)
    return names[len(known) :]


def _equal_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Return every row by itself."""
    return [[index] for index in range(len(lengths))]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide rows into sequences of at most `capacity` tokens, or of one longer row.

    The longest rows come first, each into the first sequence with enough space.

    Examples
    --------
    >>> pack([3, 9, 5, 2], 10)
    [[1], [2, 0, 3]]
    """
    bins: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for number, (used, rows) in enumerate(bins):
            if used + lengths[index] <= capacity:
                rows.append(index)
                bins[number] = used + lengths[index], rows
                break
        else:
            bins.append((lengths[index], [index]))
    return [rows for _, rows in bins]


def groups(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide rows into groups of similar length with at most `capacity` tokens, with padding.

    Examples
    --------
    >>> groups([3, 9, 5, 2], 10)
    [[3, 0], [2], [1]]
    """
    result: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        is_full = bool(result) and (len(result[-1]) + 1) * lengths[index] > capacity
        if not result or is_full:
            result.append([])
        result[-1].append(index)
    return result
