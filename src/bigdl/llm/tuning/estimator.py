"""Estimator that fine-tunes a language model on the text columns of a table."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError, as_usage_error, hide_frames, require
from bigdl.llm.conversion import read_json
from bigdl.llm.functions import classify, embed, prompt
from bigdl.llm.model import PRECISIONS, TextModel
from bigdl.llm.tuning.module import ModuleSource, TuningModule, label_count
from bigdl.llm.tuning.rows import (
    CAUSAL,
    CLASSIFICATION,
    EMBEDDING,
    TASKS,
    RowTokenizer,
    TextColumns,
)
from bigdl.llm.tuning.tables import class_names, opened, tokenized
from bigdl.orca.learn.pytorch.estimator import Estimator, PyTorchEstimator

if TYPE_CHECKING:
    import peft as peft_library
    import transformers

    from bigdl.orca.learn.types import Criterion as Creator
else:
    Creator = Callable

logger = logging.getLogger("bigdl.llm")

T = TypeVar("T")

_LONGEST = 1024  # tokens of a row by default
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_RATES = {True: 2e-4, False: 5e-5}  # of AdamW, with and without an adapter
_LABELS = "labels.json"  # classes of a classifier, next to its adapter
# Settings of adapters that change results, but not the names and sizes of weights.
_SCALES = ("peft_type", "lora_alpha", "alpha", "alpha_pattern", "use_rslora")


@hide_frames
class TextEstimator:
    """Estimator of a language model, created by ``Estimator.from_transformers``.

    Parameters
    ----------
    source : ModuleSource
    tokenizer : transformers.PreTrainedTokenizerFast
    estimator : PyTorchEstimator
        Estimator that trains the modules of `source`.
    in_spark : bool
        Whether Spark reads the files of a path.

    Attributes
    ----------
    estimator : PyTorchEstimator
        Estimator that trains the weights, e.g. for reports and gradient clipping.

    Examples
    --------
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> from peft import LoraConfig  # doctest: +SKIP
    >>> estimator = Estimator.from_transformers(  # doctest: +SKIP
    ...     "SmolLM2-135M", task="causal_lm", peft=LoraConfig(r=8), backend="local"
    ... )
    >>> history = estimator.fit(  # doctest: +SKIP
    ...     frame, epochs=2, prompt_col="question", completion_col="answer"
    ... )
    >>> estimator.save("adapter")  # doctest: +SKIP
    """

    def __init__(
        self,
        source: ModuleSource,
        tokenizer: transformers.PreTrainedTokenizerBase,
        estimator: PyTorchEstimator,
        *,
        in_spark: bool = False,
    ):
        self.estimator = estimator
        self._source, self._tokenizer, self._in_spark = source, tokenizer, in_spark
        self._rows: RowTokenizer | None = None  # of the last fit
        self._converted: dict[str, TextModel] = {}  # by precision
        self._converted_weights = b""  # hash of the weights of those models

    @property
    def task(self) -> str:
        """Task of the model."""
        return self._source.task

    def fit(
        self,
        data: object,
        epochs: int = 1,
        batch_size: int = 8,
        *,
        text_col: str | None = None,
        label_cols: str | None = None,
        prompt_col: str | None = None,
        completion_col: str | None = None,
        messages_col: str | None = None,
        validation_data: object = None,
        max_length: int | None = None,
        packing: bool = True,
        chat: bool | None = None,
        **options: object,
    ) -> list[dict]:
        """Train the model; a further call continues the training.

        The loss is the mean over all labels of a batch: for causal_lm, over the tokens of all
        workers and accumulated batches together, whatever worker computes them.

        Parameters
        ----------
        data : pyspark.sql.DataFrame, pandas.DataFrame, pyarrow.Table, XShards, ray.data.Dataset \
or str
            A str is a path of Parquet files.
        epochs : int
            Number of epochs to train.
        batch_size : int
            Number of rows per batch, over all workers.
        text_col : str, optional
            Column of texts: all tokens of a text are labels of causal_lm. For classification, the
            texts to classify.
        label_cols : str, optional
            Column of the classes, for classification. For embedding, the column of texts that
            belong to those of `text_col`, such as answers; the pairs of all workers in a batch are
            negatives of each other, and an incomplete last batch is skipped.
        prompt_col, completion_col : str, optional
            Columns of prompts and their answers; only the tokens of answers are labels.
        messages_col : str, optional
            Column of conversations: lists of messages with ``role`` and ``content``, or their JSON.
            The tokens of the assistant are labels.
        validation_data : optional
            Data to evaluate after every epoch, of the same type as `data`.
        max_length : int, optional
            Longer rows are truncated: prompts and conversations at their start, other texts at
            their end. Default: the limit of the model, at most 1,024 tokens.
        packing : bool
            Whether rows of a batch are computed as one sequence, without padding, in which no row
            attends to another. It does not change the loss. A model whose logits would differ
            computes each row separately.
        chat : bool, optional
            Whether prompts and completions get the chat template of the tokenizer; default: if it
            has one.
        **options
            Further arguments of :meth:`PyTorchEstimator.fit
            <bigdl.orca.learn.pytorch.estimator.PyTorchEstimator.fit>`, such as ``resume``,
            ``accumulate_grad_batches`` and ``seed``.

        Returns
        -------
        list of dict
            Metrics of each epoch: ``train_loss``, and with validation ``val_loss``.

        Raises
        ------
        UsageError
            If an argument or the data is invalid.
        WorkerError
            If the model raised an error in a worker.

        Examples
        --------
        >>> history = estimator.fit(frame, text_col="body")  # doctest: +SKIP
        """
        columns = TextColumns(text_col, prompt_col, completion_col, messages_col, label_cols)
        columns.check(self.task)
        if self.task == EMBEDDING:
            self._check_pairs(validation_data, batch_size, options)
            options["recovery"] = "restart"
        data, validation_data = self._opened(data), self._opened(validation_data)
        if self.task == CLASSIFICATION and not self._source.classes:
            self._source.classes = class_names(data, str(label_cols))
        self._source.packing = bool(packing)
        tokenizer = self._row_tokenizer(columns, max_length, chat)
        rows, keywords = tokenized(data, tokenizer), cast("dict[str, Any]", options)
        if validation_data is not None:
            keywords["validation_data"] = tokenized(validation_data, tokenizer).data
        history = self.estimator.fit(
            rows.data,
            epochs=epochs,
            batch_size=batch_size,
            feature_cols=rows.feature_cols,
            label_cols=rows.label_cols,
            **keywords,
        )
        self._rows = tokenizer
        return history

    def evaluate(self, data: object, batch_size: int = 8, **options: object) -> dict:
        """Return the loss and metrics of data with the columns of the last fit.

        Parameters
        ----------
        data : see fit
        batch_size : int
            Number of rows per batch, over all workers.
        **options
            Further arguments of ``PyTorchEstimator.evaluate``.

        Returns
        -------
        dict
            ``num_samples``, ``val_loss`` and the metrics.

        Raises
        ------
        UsageError
            If there was no fit, or the data is invalid.

        Examples
        --------
        >>> estimator.evaluate(held_out)["val_loss"]  # doctest: +SKIP
        1.2
        """
        rows = tokenized(self._opened(data), self._fitted())
        metrics: Any = self.estimator.evaluate(
            rows.data,
            batch_size=batch_size,
            feature_cols=rows.feature_cols,
            label_cols=rows.label_cols,
            **cast("dict[str, Any]", options),
        )
        return metrics

    def predict(self, data: T, template: str | None = None, **options: object) -> T:
        """Add a column with the answers of the trained model to a table.

        The model is merged and converted once for the same weights, see :meth:`text_model`.

        Parameters
        ----------
        data : pyspark.sql.DataFrame, pandas.DataFrame, pyarrow.Table, XShards or ray.data.Dataset
        template : str, optional
            For causal_lm, the prompt with columns in braces; default: the prompt column of the fit.
            For other tasks, the column of the texts; default: that of the fit.
        **options
            Further arguments of :func:`bigdl.llm.prompt`, :func:`bigdl.llm.classify` or
            :func:`bigdl.llm.embed`, by the task.

        Returns
        -------
        same type as `data`

        Raises
        ------
        UsageError
            If an argument or the data is invalid.

        Examples
        --------
        >>> answers = estimator.predict(frame, max_new_tokens=16)  # doctest: +SKIP
        """
        columns = TextColumns() if self._rows is None else self._rows.columns
        column = columns.prompt if self.task == CAUSAL else columns.text
        if template is None and column is None:
            raise UsageError(
                "predict needs a template, such as '{question}': no fit has named the prompts",
                code="argument-missing",
                argument="template",
            )
        keywords = cast("dict[str, Any]", options)
        model = keywords.pop("model", None) or self.text_model()
        if self.task == CAUSAL:
            if self._rows is not None:
                is_chat = self._rows.chat or columns.messages is not None
                keywords.setdefault("chat", is_chat)
            return prompt(data, template or "{" + str(column) + "}", model=model, **keywords)
        function = classify if self.task == CLASSIFICATION else embed
        return function(data, template or str(column), model=model, **keywords)

    def text_model(self, precision: str = "auto") -> TextModel:
        """Return the trained model for the AI functions on tables.

        It is merged and converted by the first call with a precision after each change of the
        weights.

        Parameters
        ----------
        precision : {"auto", "fp32", "int8", "int4"}
            See :class:`bigdl.llm.TextModel`.

        Returns
        -------
        TextModel

        Raises
        ------
        UsageError
            If the model cannot be converted.

        Examples
        --------
        >>> estimator.text_model("fp32").save("converted")  # doctest: +SKIP
        """
        check_choice("precision", precision, PRECISIONS)
        total = hashlib.blake2b(self.estimator._weights())
        total.update(json.dumps(self._source.classes).encode())
        if self._converted_weights != total.digest():
            self._converted, self._converted_weights = {}, total.digest()
        model = self._converted.get(precision)
        if model is None or not model.path.exists():
            with tempfile.TemporaryDirectory(prefix="bigdl-merged-") as folder:
                self.save(folder, merge=True)
                model = self._converted[precision] = TextModel(folder, precision)
        return model

    def get_model(self) -> torch.nn.Module:
        """Return a copy of the trained model: a transformers model, or peft's with an adapter.

        Returns
        -------
        torch.nn.Module

        Examples
        --------
        >>> estimator.get_model().generate(ids)  # doctest: +SKIP
        """
        module = self.estimator.get_model()
        assert isinstance(module, TuningModule)
        return module.model.eval()

    def save(self, path: str | os.PathLike, *, merge: bool = False) -> str:
        """Write the model and its tokenizer as files of Hugging Face.

        Parameters
        ----------
        path : str or os.PathLike
            Local folder that does not exist, or is empty. An adapter is written as peft does,
            without the weights of the model, and with the classes in ``labels.json``.
        merge : bool
            Whether to add the adapter to the weights and write the whole model.

        Returns
        -------
        str
            `path`.

        Raises
        ------
        UsageError
            If the folder is not empty, or cannot be written.

        Examples
        --------
        >>> estimator.save("adapter")  # doctest: +SKIP
        """
        path = os.fspath(path)
        target, is_whole = Path(path), merge or self._source.peft is None
        failure = f"{path!r} cannot be written"
        with as_usage_error(failure, code="path-unusable", path=path):
            is_used = target.exists() and any(target.iterdir())
        if is_used:
            raise UsageError(
                f"{path!r} is not empty; choose another folder", code="path-exists", path=path
            )
        model: Any = self.get_model()
        if merge and self._source.peft is not None:
            model = model.merge_and_unload()
        with as_usage_error(failure, code="path-unusable", path=path):
            target.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(path)
            self._tokenizer.save_pretrained(path)
            if is_whole and self.task == EMBEDDING:
                self._copy_extras(target)
            if self.task == CLASSIFICATION and not is_whole:
                labels = json.dumps(_classes_of(model.config), ensure_ascii=False)
                (target / _LABELS).write_text(labels, encoding="utf-8")
        return path

    def _copy_extras(self, target: Path) -> None:
        """Copy the files of a sentence-transformers folder that are not the model's."""
        source = Path(self._source.folder)
        if not (source / "modules.json").exists():
            return
        for each in source.iterdir():
            name = each.name
            if each.is_dir() and (each / "config.json").exists():
                shutil.copytree(each, target / name, dirs_exist_ok=True)
            elif name == "modules.json" or "sentence" in name:
                shutil.copy(each, target / name)

    def load(self, path: str | os.PathLike) -> None:
        """Load the weights that :meth:`save` wrote, to evaluate, predict or train further.

        Parameters
        ----------
        path : str or os.PathLike
            Folder with an adapter, or with a whole model if this Estimator has no adapter.

        Raises
        ------
        UsageError
            If the files do not fit the model.

        Examples
        --------
        >>> estimator.load("adapter")  # doctest: +SKIP
        """
        path = os.fspath(path)
        if not Path(path).is_dir():
            raise UsageError(f"There is no folder {path!r}", code="path-missing", path=path)
        source = self._source
        if self.task == CLASSIFICATION:
            source = dataclasses.replace(source, classes=self._classes_in(path))
        if source.peft is None:
            model, missing = dataclasses.replace(source, folder=path).base()
            module = TuningModule(model, self.task)
        else:
            module = source({})
            missing = self._load_adapter(module, path)
        if missing:
            raise UsageError(
                f"{path!r} lacks weights of this Estimator's model: {', '.join(missing[:3])}; load "
                "what save has written, with the same peft configuration",
                code="model-mismatch",
                path=path,
            )
        self.estimator.load_state_dict(dict(module.state_dict()))
        self._source.classes = source.classes

    def _classes_in(self, path: str) -> tuple[str, ...]:
        """Return the classes of the files in a folder, which should be those of this Estimator."""
        expected = self._source.classes
        if self._source.peft is None:
            transformers = require("transformers", "llm")
            with as_usage_error(f"{path!r} cannot be read", code="file-damaged", path=path):
                saved = _classes_of(transformers.AutoConfig.from_pretrained(path))
        else:
            saved = tuple(map(str, read_json(Path(path, _LABELS)))) or expected
        if not saved:
            raise UsageError(
                f"{path!r} has no {_LABELS} with the classes of the adapter; pass labels= to "
                "Estimator.from_transformers, in the order of the training",
                code="argument-missing",
                argument="labels",
            )
        if expected and saved != expected:
            raise UsageError(
                f"{path!r} has the classes {', '.join(saved)}, but this Estimator has "
                f"{', '.join(expected)}; pass labels={list(saved)} to Estimator.from_transformers",
                code="model-mismatch",
                path=path,
            )
        return saved

    def _load_adapter(self, module: TuningModule, path: str) -> list[str]:
        """Load the adapter of a folder, and return the names of trained weights that it lacks."""
        peft, adapter = require("peft", "llm"), self._source.peft
        saved = read_json(Path(path, "adapter_config.json"))
        for name in _SCALES if saved else ():
            if (saved.get(name) or None) != (getattr(adapter, name, None) or None):
                raise UsageError(
                    f"The adapter in {path!r} has {name}={saved.get(name)!r}, but this Estimator's "
                    f"has {getattr(adapter, name, None)!r}; pass the same peft configuration",
                    code="model-mismatch",
                    path=path,
                )
        with as_usage_error(
            f"{path!r} has no adapter of this model", code="model-mismatch", path=path
        ):
            weights = peft.load_peft_weights(path, device="cpu")
            result = peft.set_peft_model_state_dict(module.model, weights)
        if result.unexpected_keys:
            raise UsageError(
                f"The adapter in {path!r} has other weights than this Estimator's: "
                f"{', '.join(result.unexpected_keys[:3])}; pass the same peft configuration",
                code="model-mismatch",
                path=path,
            )
        trained = {name.removeprefix("model.") for name, _ in module.named_parameters()}
        return sorted(trained.intersection(result.missing_keys))

    def shutdown(self) -> None:
        """Stop idle workers of the backend.

        Examples
        --------
        >>> estimator.shutdown()  # doctest: +SKIP
        """
        self.estimator.shutdown()

    # -- helpers -------------------------------------------------------------------------------

    def _opened(self, data: object) -> object:
        return opened(data, in_spark=self._in_spark)

    def _check_pairs(self, validation_data: object, batch_size: int, options: dict) -> None:
        """Raise an error for arguments that a loss over all pairs of a batch does not support."""
        if check_positive("batch_size", batch_size) < 2:
            raise UsageError(
                "The pairs of a batch are negatives of each other, so batch_size should be at "
                f"least 2, got {batch_size}",
                code="argument-value",
                argument="batch_size",
            )
        conflicts = {
            "validation_data": validation_data is not None,
            "exact": options.get("exact") is not None,
            "local_steps": options.get("local_steps", 1) != 1,
            "recovery": (options.get("recovery") or "restart") != "restart",
        }
        if name := next((name for name, is_set in conflicts.items() if is_set), None):
            raise UsageError(
                f"task='embedding' does not support {name}=, since its loss compares the pairs of "
                "all workers; leave it out",
                code="argument-conflict",
                argument=name,
            )

    def _fitted(self) -> RowTokenizer:
        if self._rows is None:
            raise UsageError(
                "There was no fit, so the columns are unknown; call fit first", code="not-fitted"
            )
        return self._rows

    def _row_tokenizer(
        self, columns: TextColumns, max_length: int | None, chat: bool | None
    ) -> RowTokenizer:
        tokenizer, limit = self._tokenizer, self._limit()
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if (chat or columns.messages is not None) and not has_template:
            raise UsageError(
                "The tokenizer has no chat template; set tokenizer.chat_template, or pass "
                "prompt_col and completion_col with chat=False",
                code="argument-value",
                argument="chat",
            )
        if max_length is None:
            max_length = min(limit, _LONGEST)
        elif check_positive("max_length", max_length) > limit:
            raise UsageError(
                f"max_length={max_length} is more than the {limit} tokens of the model; pass less",
                code="argument-value",
                argument="max_length",
            )
        return RowTokenizer(
            tokenizer,
            self.task,
            columns,
            max_length,
            has_template if chat is None else chat,
            self._source.classes,
        )

    def _limit(self) -> int:
        """Return the number of tokens that the model and the tokenizer support."""
        config = require("transformers", "llm").AutoConfig.from_pretrained(self._source.folder)
        limits = [self._tokenizer.model_max_length]
        limits += [getattr(config, "max_position_embeddings", None) or 10**6]
        return int(min(limits))


def _classes_of(config: transformers.PretrainedConfig) -> tuple[str, ...]:
    """Return the names of the classes of a model."""
    labels: Any = config.id2label
    return tuple(str(labels[index]) for index in range(len(labels)))


def from_transformers(
    model_dir: str | os.PathLike,
    *,
    task: str,
    peft: peft_library.PeftConfig | None = None,
    tokenizer: transformers.PreTrainedTokenizerBase | str | None = None,
    labels: Sequence[str] | None = None,
    optimizer: Callable | None = None,
    learning_rate: float | None = None,
    gradient_checkpointing: bool = False,
    precision: str = "fp32",
    base_precision: str = "fp32",
    backend: str = "spark",
    checkpoint_dir: str | None = None,
    **options: object,
) -> TextEstimator:
    """Create an Estimator; see ``Estimator.from_transformers`` for the arguments."""
    check_choice("task", task, TASKS)
    check_choice("base_precision", base_precision, tuple(_DTYPES))
    if backend == "bigdl":
        raise UsageError(
            "backend='bigdl' does not train language models; use 'spark', 'ray' or 'local'",
            code="unsupported",
            argument="backend",
        )
    folder = os.path.abspath(os.path.expanduser(os.fspath(model_dir)))
    if not Path(folder, "config.json").exists():
        raise UsageError(
            f"{os.fspath(model_dir)!r} is no folder with the files of a Hugging Face model "
            "(config.json and weights)",
            code="path-missing",
            path=os.fspath(model_dir),
        )
    if base_precision != "fp32" and peft is None:
        raise UsageError(
            f"base_precision={base_precision!r} is for the frozen weights under an adapter; pass "
            "peft=, or precision='bf16' for bfloat16 passes",
            code="argument-conflict",
            argument="base_precision",
        )
    if peft is not None:
        _check_adapter(peft)
    words = _tokenizer_of(folder if tokenizer is None else tokenizer)
    pad = next((i for i in (words.pad_token_id, words.eos_token_id) if i is not None), 0)
    source = ModuleSource(
        folder,
        task,
        peft,
        _DTYPES[base_precision],
        gradient_checkpointing,
        pad_token=int(pad),
        classes=tuple(map(str, labels or ())),
    )
    rate = _RATES[peft is not None] if learning_rate is None else learning_rate
    if optimizer is None:
        optimizer = DefaultOptimizer(rate)
    elif learning_rate is not None:
        raise UsageError(
            "learning_rate is for the default optimizer, AdamW; set the rate of optimizer= there",
            code="argument-conflict",
            argument="learning_rate",
        )
    keywords = cast("dict[str, Any]", options)
    if task == EMBEDDING:  # each batch has the same number of negatives
        keywords["config"] = {"drop_last": True, **(keywords.get("config") or {})}
    estimator = Estimator.from_torch(
        model=source,
        optimizer=optimizer,
        loss_weight=label_count,
        precision=precision,
        backend=backend,
        model_dir=checkpoint_dir,
        **keywords,
    )
    in_spark = backend in ("spark", "horovod")
    return TextEstimator(source, words, estimator, in_spark=in_spark)


class DefaultOptimizer:
    """Picklable function that creates AdamW without weight decay."""

    def __init__(self, rate: float):
        self._rate = rate

    def __call__(self, model: torch.nn.Module, config: dict) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self._rate, weight_decay=0.0)


def _check_adapter(adapter: object) -> None:
    peft = require("peft", "llm")
    if not isinstance(adapter, peft.PeftConfig) or isinstance(adapter, peft.PromptLearningConfig):
        raise UsageError(
            "peft should be a configuration that adds weights to layers, such as "
            f"peft.LoraConfig(r=8), got {type(adapter).__name__}",
            code="argument-type",
            argument="peft",
        )


def _tokenizer_of(
    source: str | os.PathLike | transformers.PreTrainedTokenizerBase,
) -> transformers.PreTrainedTokenizerBase:
    """Return a tokenizer, loaded from a folder."""
    if not isinstance(source, str | os.PathLike):
        if not (callable(source) and hasattr(source, "save_pretrained")):
            raise UsageError(
                "tokenizer should be a tokenizer of transformers or a folder, got "
                f"{type(source).__name__}",
                code="argument-type",
                argument="tokenizer",
            )
        return source
    transformers = require("transformers", "llm")
    with as_usage_error(
        f"The tokenizer in {os.fspath(source)!r} cannot be loaded",
        code="path-unusable",
        path=os.fspath(source),
    ):
        return transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
