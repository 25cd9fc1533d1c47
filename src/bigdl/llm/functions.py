"""AI functions on tables: ``embed``, ``prompt``, ``classify`` and ``rank``."""

from __future__ import annotations

import dataclasses
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from bigdl.common.checks import check_choice, check_integer, check_number
from bigdl.common.errors import UsageError, type_name
from bigdl.llm.engine import Deliver, ModelReference
from bigdl.llm.facts import CLASSIFY, EMBED, GENERATE
from bigdl.llm.generator import Completion
from bigdl.llm.journal import Journal, key_of, prefix_of
from bigdl.llm.model import TextModel
from bigdl.llm.tables import (
    ColumnFunction,
    Columns,
    FunctionCapture,
    Pending,
    apply,
    sql_function,
)

_LONGEST = 1 << 20  # characters of one text
_TEXTS_OF_WINDOW = 4096  # which are sorted by length
_PROMPTS_OF_WINDOW = 256
_SPECIAL = re.compile(r"[\\.^$|?*+()\[\]{}]")  # characters with a meaning in the engine's grammar
_FIELD = re.compile(r"[^{}\[\].!:]+")

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from pyspark.sql import Column

T = TypeVar("T")

Cell = tuple[Any, str | None]
"""A value and an error; both are None for a row with a null."""


# -- functions of users ----------------------------------------------------------------------------


def embed(
    data: T,
    column: str,
    *,
    model: TextModel,
    output: str = "embedding",
    truncate: bool = True,
    on_error: str = "null",
    journal: str | None = None,
) -> T:
    """Add a column with the embedding of each text.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, pandas.DataFrame, pyarrow.Table, XShards or ray.data.Dataset
        Also a DataFrame of Spark Connect or a streaming DataFrame.
    column : str
        Column of texts; null gives null.
    model : TextModel
        A model with task ``"embed"``.
    output : str
        Name of the new column, of type ``array<float>``. ``<output>_error`` has the reason for each
        row without an embedding.
    truncate : bool
        Truncate texts that are longer than the model's limit; otherwise they are errors.
    on_error : {"null", "raise"}
        Store errors in ``<output>_error``, or raise the first one.
    journal : str, optional
        Folder that keeps answers, so that a job that died does not compute them again.

    Returns
    -------
    Table of the same type, lazy if `data` is.

    Raises
    ------
    UsageError
        If a column is missing, a name is taken, or the model is for another task.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.llm import TextModel, embed
    >>> frame = pd.DataFrame({"text": ["a cat", None]})
    >>> embed(frame, "text", model=TextModel("all-MiniLM-L6-v2"))  # doctest: +SKIP
    """
    checked_model(model, EMBED)
    function = _Embedder(
        [column], {output: "array<float>"}, output, model.reference(), {"truncate": truncate}
    )
    return _applied(data, function, on_error, journal)


def prompt(
    data: T,
    template: str,
    *,
    model: TextModel,
    output: str = "answer",
    system: str | None = None,
    examples: Iterable[tuple[str, str]] = (),
    schema: Mapping[str, Any] | type | None = None,
    choices: Sequence[str] | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    chat: bool = True,
    on_error: str = "null",
    journal: str | None = None,
) -> T:
    """Add a column with a model's answer to a prompt for each row.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, pandas.DataFrame, pyarrow.Table, XShards or ray.data.Dataset
    template : str
        Prompt with columns in braces, such as ``"Summarize: {title} {body}"``; ``{{`` is a brace.
        A row with a null in any of them gives null.
    model : TextModel
        A model with task ``"generate"``.
    output : str
        Name of the new string column, which holds the completion alone. ``<output>_error`` has the
        reason for each row without an answer.
    system : str, optional
        System prompt.
    examples : iterable of (str, str)
        Prompts and answers that precede the prompt.
    schema : dict or pydantic model class, optional
        JSON schema of the answer, which is JSON in a string then.
    choices : list of str, optional
        The answer is one of these strings.
    max_new_tokens : int
        Maximum number of tokens of an answer. A longer answer is truncated; with `schema` or
        `choices` it is an error.
    temperature : float
        0 selects the most probable token. Otherwise the answer depends on `seed` and the row's
        content only.
    stop : list of str
        Strings that end the answer.
    seed : int
    chat : bool
        Use the chat template of the model, if it has one. False sends the text as it is.
    on_error, journal
        See :func:`embed`.

    Returns
    -------
    Table of the same type, lazy if `data` is.

    Raises
    ------
    UsageError
        If a column is missing, a name is taken, an option is invalid, or the model is for another
        task.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.llm import TextModel, prompt
    >>> frame = pd.DataFrame({"text": ["It broke after a day."]})
    >>> model = TextModel("SmolLM2-135M-Instruct")  # doctest: +SKIP
    >>> prompt(frame, "Is this good or bad? {text}", model=model,
    ...        choices=["good", "bad"])  # doctest: +SKIP
    """
    checked_model(model, GENERATE)
    if schema is not None and choices is not None:
        raise UsageError(
            "schema and choices exclude each other; leave one out",
            code="argument-conflict",
            argument="choices",
        )
    check_integer("max_new_tokens", max_new_tokens, 1)
    check_number("temperature", temperature, 0.0)
    options: dict[str, Any] = {
        "system": system,
        "examples": [list(pair) for pair in examples],
        "json_schema": None if schema is None else json_schema(schema),
        "regex": None if choices is None else _alternatives(choices),
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "seed": check_integer("seed", seed, 0),
        "chat": bool(chat),
    }
    inputs, rendered = parse_template(template)
    function = _Prompter(
        inputs,
        {output: "string"},
        output,
        model.reference(),
        options,
        window=_PROMPTS_OF_WINDOW,
        template=rendered,
    )
    return _applied(data, function, on_error, journal)


def classify(
    data: T,
    column: str,
    labels: Sequence[str] | None = None,
    *,
    model: TextModel,
    output: str = "label",
    on_error: str = "null",
    journal: str | None = None,
) -> T:
    """Add a column with the label of each text.

    A classifier (task ``"classify"``) has its labels. An embedding model selects the label whose
    embedding is nearest to that of the text, and a model that generates selects one as its answer.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, pandas.DataFrame, pyarrow.Table, XShards or ray.data.Dataset
    column : str
        Column of texts; null gives null.
    labels : list of str, optional
        Labels, not for classifiers.
    model : TextModel
    output : str
        Name of the new string column. ``<output>_score`` has the probability of a classifier, or
        the cosine similarity of embeddings; a model that generates gives no scores.
    on_error, journal
        See :func:`embed`.

    Returns
    -------
    Table of the same type, lazy if `data` is.

    Raises
    ------
    UsageError
        If `labels` are missing or superfluous, a column is missing, or a name is taken.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.llm import TextModel, classify
    >>> frame = pd.DataFrame({"text": ["The goalkeeper saved the penalty."]})
    >>> model = TextModel("all-MiniLM-L6-v2")  # doctest: +SKIP
    >>> classify(frame, "text", ["sport", "politics"], model=model)  # doctest: +SKIP
    """
    checked_model(model, CLASSIFY, EMBED, GENERATE)
    if (labels is None) != (model.task == CLASSIFY):
        raise UsageError(
            f"The model has labels already ({', '.join(model.labels)}); leave labels out"
            if model.task == CLASSIFY
            else f"A model with task {model.task!r} has no labels; pass labels=[...]",
            code="argument-conflict" if model.task == CLASSIFY else "argument-missing",
            argument="labels",
        )
    names = model.labels if labels is None else list(labels)
    if model.task == GENERATE:
        template = f"Which of these labels fits the text: {', '.join(names)}?\n\nText: "
        template = template.replace("{", "{{").replace("}", "}}") + "{" + column + "}"
        options: dict[str, Any] = {"choices": names, "max_new_tokens": 64}
        return prompt(
            data,
            template,
            model=model,
            output=output,
            on_error=on_error,
            journal=journal,
            **options,
        )
    vectors = None
    if model.task == EMBED:
        _alternatives(names)  # checks them
        outputs, errors = model.reference().engine().submit(names, {"truncate": True})()
        if any(errors):
            raise UsageError(
                f"A label cannot be embedded: {next(filter(None, errors))}",
                code="argument-value",
                argument="labels",
            )
        vectors = _unit(np.stack(outputs))
    function = _Classifier(
        [column],
        {output: "string", f"{output}_score": "double"},
        output,
        model.reference(),
        {"truncate": True},
        labels=names,
        vectors=vectors,
    )
    return _applied(data, function, on_error, journal)


def rank(
    data: T,
    query: str,
    column: str,
    *,
    model: TextModel,
    output: str = "score",
    on_error: str = "null",
    journal: str | None = None,
) -> T:
    """Add a column with the relevance of each text for the query of its row.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, pandas.DataFrame, pyarrow.Table, XShards or ray.data.Dataset
    query, column : str
        Columns of queries and texts; null gives null.
    model : TextModel
        A cross-encoder (task ``"classify"`` with one label), or an embedding model, whose score is
        the cosine similarity.
    output : str
        Name of the new column, of type ``double``.
    on_error, journal
        See :func:`embed`.

    Returns
    -------
    Table of the same type, lazy if `data` is.

    Raises
    ------
    UsageError
        If a column is missing, a name is taken, or the model has several labels.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.llm import TextModel, rank
    >>> frame = pd.DataFrame({"query": ["pets"], "text": ["Cats sleep a lot."]})
    >>> rank(frame, "query", "text", model=TextModel("all-MiniLM-L6-v2"))  # doctest: +SKIP
    """
    checked_model(model, CLASSIFY, EMBED)
    if model.task == CLASSIFY and len(model.labels) != 1:
        raise UsageError(
            f"rank needs a model with one score, but {model.path.name!r} has the labels "
            f"{', '.join(model.labels)}; use classify",
            code="model-type",
            argument="model",
        )
    function_class = _PairScorer if model.task == CLASSIFY else _SimilarityScorer
    function = function_class(
        [query, column], {output: "double"}, output, model.reference(), {"truncate": True}
    )
    return _applied(data, function, on_error, journal)


def register(
    name: str, function: Callable[..., Any], *, model: TextModel, **options: object
) -> Callable[..., Column]:
    """Register an AI function as a SQL function of the active Spark session.

    Parameters
    ----------
    name : str
        Name in SQL.
    function : callable
        :func:`embed`, :func:`prompt`, :func:`classify` or :func:`rank`. The SQL function takes a
        text, or two for `rank`; that of `prompt` takes the whole prompt.
    model : TextModel
    **options
        Options of the function, such as ``labels=`` or ``max_new_tokens=``.

    Returns
    -------
    callable
        The function for columns. Its value is a struct with the fields ``value`` and ``error``,
        and ``score`` for `classify`.

    Raises
    ------
    UsageError
        If the function is another one, or an option is invalid.

    Examples
    --------
    >>> from bigdl.llm import TextModel, prompt, register
    >>> model = TextModel("SmolLM2-135M-Instruct")  # doctest: +SKIP
    >>> register("ai_prompt", prompt, model=model)  # doctest: +SKIP
    >>> spark.sql("select ai_prompt('Name a city.').value").show()  # doctest: +SKIP
    """
    columns = {embed: ["text"], prompt: ["{text}"], classify: ["text"], rank: ["query", "text"]}
    if function not in columns:
        raise UsageError(
            f"function must be embed, prompt, classify or rank of bigdl.llm, got {function!r}",
            code="argument-value",
            argument="function",
        )
    from bigdl.orca.cluster.connect import active_spark

    capture = FunctionCapture()
    function(capture, *columns[function], model=model, output="value", **options)
    made = sql_function(cast(ColumnFunction, capture.function))
    return active_spark().spark.udf.register(name, made)


# -- arguments -------------------------------------------------------------------------------------


def checked_model(model: object, *tasks: str) -> TextModel:
    """Return a TextModel for one of the tasks; raise UsageError for other objects."""
    if not isinstance(model, TextModel):
        raise UsageError(
            f"model must be a TextModel, got {type_name(model)}; use TextModel(folder)",
            code="model-type",
            argument="model",
        )
    if model.task not in tasks:
        raise UsageError(
            f"This function needs a model with task {' or '.join(map(repr, tasks))}, but "
            f"{model.path.name!r} has task {model.task!r}",
            code="model-type",
            argument="model",
        )
    return model


def parse_template(template: str) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return the columns of a template, and its parts: a text and the column after it, or None.

    Raises
    ------
    UsageError
        If the template has no columns or its braces are wrong.
    """
    if not isinstance(template, str):
        raise UsageError(
            f"template must be a string, got {type_name(template)}",
            code="argument-type",
            argument="template",
        )
    try:
        parts = [(text, name) for text, name, *_ in string.Formatter().parse(template)]
    except ValueError as error:
        raise UsageError(
            f"The template is invalid: {error}; write {{{{ and }}}} for braces",
            code="argument-value",
            argument="template",
        ) from error
    names = list(dict.fromkeys(name for _, name in parts if name is not None))
    if not names or not all(map(_FIELD.fullmatch, names)):
        raise UsageError(
            "A template names its columns in braces, such as 'Summarize: {text}', got "
            f"{template!r}; write {{{{ and }}}} for braces",
            code="argument-value",
            argument="template",
        )
    return names, parts


def json_schema(schema: object) -> str:
    """Return a JSON schema as text."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        raise UsageError(
            f"schema must be a JSON schema as a dict, or a pydantic class, got {type_name(schema)}",
            code="argument-type",
            argument="schema",
        )
    return json.dumps(schema)


def _alternatives(choices: Sequence[str]) -> str:
    """Return a regular expression for one of the choices."""
    valid = not isinstance(choices, str) and all(isinstance(each, str) for each in choices)
    if not valid or not choices or len(set(choices)) < len(choices) or not all(choices):
        raise UsageError(
            f"choices and labels must be distinct, non-empty strings, got {choices!r}",
            code="argument-value",
            argument="choices",
        )
    return "(" + "|".join(_SPECIAL.sub(r"\\\g<0>", each) for each in choices) + ")"


def _applied(data: T, function: _TextFunction, on_error: str, journal: str | None) -> T:
    check_choice("on_error", on_error, ("null", "raise"))
    if on_error == "null":
        function.outputs = {**function.outputs, f"{function.output}_error": "string"}
    function.journal = None if journal is None else str(journal)
    return apply(data, function)


# -- row functions ---------------------------------------------------------------------------------


def decoded(value: object) -> Cell:
    """Return a cell as text, None for null, and the reason if it cannot be used."""
    if value is None or value is not value:  # NaN
        return None, None
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            value = bytes(value).decode()
        except UnicodeDecodeError as error:
            return None, f"the text is not valid UTF-8 at byte {error.start}"
    if not isinstance(value, str):
        return None, f"the value is not a string but of type {type(value).__name__}"
    if len(value) > _LONGEST:
        return None, f"the text has {len(value)} characters, more than {_LONGEST}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return None, f"the text has an invalid character at position {error.start}"
    return value, None


@dataclasses.dataclass
class _TextFunction:
    """Base class of row functions: items of rows, their values, and the added columns.

    Equal items of a window, and items that the journal has, are computed once.
    """

    inputs: list[str]
    outputs: dict[str, str]
    output: str
    model: ModelReference
    options: dict[str, Any]
    window: int = _TEXTS_OF_WINDOW
    journal: str | None = None
    _journal: Journal | None = None

    def items(self, columns: Columns) -> list[Cell]:
        """Return the item of each row that the engine computes, or an error."""
        return [decoded(value) for value in columns[self.inputs[0]]]

    def cells(self, values: list[Any]) -> dict[str, list]:
        """Return the added columns for the engine's values, of which some are None."""
        return {self.output: values}

    def check(self, value: object) -> Cell:
        """Return what is kept of an engine's value, and an error if it cannot be used."""
        return value, None

    def start(self, columns: Columns) -> Pending:
        items = self.items(columns)
        keys = [self._key(item) for item, _ in items]
        answers = self._known(keys)
        todo = {
            key: item
            for key, (item, _) in zip(keys, items, strict=True)
            if item is not None and key not in answers
        }
        wait = self._computed(list(todo), list(todo.values()))

        def finish() -> Mapping[str, Any]:
            answers.update(zip(todo, wait(), strict=True))
            rows = [
                (None, error) if item is None else answers[key]
                for key, (item, error) in zip(keys, items, strict=True)
            ]
            return self._columns([v for v, _ in rows], [e for _, e in rows])

        return finish

    def _computed(self, keys: list[Any], items: list[Any]) -> Callable[[], list[Cell]]:
        """Start items; return a function that waits for their cells and stores them."""
        journal = self._journal
        stored: set[int] = set()

        def store(rows: Sequence[int], values: Sequence[Any], errors: Sequence[str | None]) -> None:
            if journal is not None:
                # Without errors of the engine: another run may have none.
                triples = zip(rows, values, errors, strict=True)
                fine = [(row, value) for row, value, error in triples if error is None]
                journal.add([(keys[row], *self.check(v)) for row, v in fine if row not in stored])
                stored.update(row for row, _ in fine)

        wait = self.compute(items, store)

        def finish() -> list[Cell]:
            raw = wait()
            if journal is not None and raw:
                store(range(len(raw)), *zip(*raw, strict=True))
                journal.flush()
            return [(None, error) if error else self.check(value) for value, error in raw]

        return finish

    def compute(self, items: list[Any], arrived: Deliver | None = None) -> Callable[[], list[Cell]]:
        """Start items in the engine; return a function that waits for their values and errors."""
        wait = self.model.engine().submit(items, self.options, arrived)
        return lambda: list(zip(*wait(), strict=True))

    def _key(self, item: object) -> object:
        return item if self.journal is None or item is None else key_of(self._prefix(), item)

    def _prefix(self) -> bytes:
        return prefix_of(
            self.model.facts["digest"], {"function": type(self).__name__, **self.options}
        )

    def _known(self, keys: list[Any]) -> dict[Any, Cell]:
        """Return the answers that the journal has."""
        if self.journal is None:
            return {}
        if self._journal is None:
            self._journal = Journal(self.journal)
        self._journal.refresh()
        return self._journal.find([key for key in keys if key is not None])

    def _columns(self, values: list[Any], errors: list[str | None]) -> Mapping[str, Any]:
        """Return the columns of a window, or raise its first error if there is no error column."""
        name = f"{self.output}_error"
        if name in self.outputs:
            return {**self.cells(values), name: errors}
        first = next((error for error in errors if error is not None), None)
        if first is not None:
            raise UsageError(
                f"Column '{self.output}': {first}; pass on_error='null' to keep such rows",
                code="data-value",
                column=self.output,
            )
        return self.cells(values)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open journal."""
        return {**vars(self), "_journal": None}


class _Embedder(_TextFunction):
    """Row function of :func:`embed`."""


@dataclasses.dataclass
class _Prompter(_TextFunction):
    """Row function of :func:`prompt`."""

    template: Sequence[tuple[str, str | None]] = ()

    def items(self, columns: Columns) -> list[Cell]:
        cells = {name: [_as_text(v) for v in columns[name]] for name in self.inputs}
        count = len(columns[self.inputs[0]])
        return [self._rendered({n: cells[n][row] for n in self.inputs}) for row in range(count)]

    def _rendered(self, cells: Mapping[str, Cell]) -> Cell:
        for name, (_, error) in cells.items():
            if error is not None:
                return None, f"column '{name}': {error}"
        if any(text is None for text, _ in cells.values()):
            return None, None
        parts = [
            text + (cells[name][0] if name is not None else "") for text, name in self.template
        ]
        return decoded("".join(parts))

    def check(self, value: object) -> Cell:
        text = cast(Completion, value).text
        if self.options["regex"] is not None and not re.fullmatch(self.options["regex"], text):
            return None, f"the answer {text[:100]!r} is not one of the choices"
        if self.options["json_schema"] is not None:
            try:
                json.loads(text)
            except ValueError:
                limit = self.options["max_new_tokens"]
                return None, f"the answer does not fulfill the schema within {limit} tokens"
        return text, None


def _as_text(value: object) -> Cell:
    """Return a cell of a template as text; numbers and other values as Python prints them."""
    if value is None or isinstance(value, str | bytes | bytearray | memoryview | float):
        is_number = isinstance(value, float) and value == value
        return (str(value), None) if is_number else decoded(value)
    return str(value), None


@dataclasses.dataclass
class _Classifier(_TextFunction):
    """Row function of :func:`classify` with a classifier or with embeddings of labels."""

    labels: list[str] = dataclasses.field(default_factory=list)
    vectors: Any = None

    def cells(self, values: list[Any]) -> dict[str, list]:
        labels: list[str | None] = []
        scores: list[float | None] = []
        for value in values:
            if value is None:
                labels.append(None)
                scores.append(None)
                continue
            value = np.asarray(value, np.float64)
            if self.vectors is not None:
                likeness = self.vectors @ _unit(value)
            elif len(self.labels) == 1:
                likeness = 1 / (1 + np.exp(-value))
            else:
                powers = np.exp(value - value.max())
                likeness = powers / powers.sum()
            best = int(likeness.argmax())
            labels.append(self.labels[best])
            scores.append(float(likeness[best]))
        return {self.output: labels, f"{self.output}_score": scores}


class _PairScorer(_TextFunction):
    """Row function of :func:`rank` with a cross-encoder."""

    def items(self, columns: Columns) -> list[Cell]:
        pairs = zip(*(columns[name] for name in self.inputs), strict=True)
        return [self._pair(decoded(first), decoded(second)) for first, second in pairs]

    def _pair(self, first: Cell, second: Cell) -> Cell:
        error = next((error for _, error in (first, second) if error is not None), None)
        if error is not None or first[0] is None or second[0] is None:
            return None, error
        return (first[0], second[0]), None

    def cells(self, values: list[Any]) -> dict[str, list]:
        scores = [None if v is None else float(1 / (1 + np.exp(-np.float64(v[0])))) for v in values]
        return {self.output: scores}


class _SimilarityScorer(_PairScorer):
    """Row function of :func:`rank` with an embedding model: each text is embedded once."""

    def compute(self, items: list[Any], arrived: Deliver | None = None) -> Callable[[], list[Cell]]:
        texts = list(dict.fromkeys(text for pair in items for text in pair))
        wait = super().compute(texts)

        def finish() -> list[Cell]:
            cells = dict(zip(texts, wait(), strict=True))
            return [self._similarity(cells[first], cells[second]) for first, second in items]

        return finish

    def _similarity(self, first: Cell, second: Cell) -> Cell:
        error = next((error for _, error in (first, second) if error is not None), None)
        if error is not None:
            return None, error
        return np.asarray([_unit(first[0]) @ _unit(second[0])]), None

    def cells(self, values: list[Any]) -> dict[str, list]:
        return {self.output: [None if v is None else float(v[0]) for v in values]}


def _unit(vectors: ArrayLike) -> np.ndarray:
    """Return vectors divided by their lengths."""
    vectors = np.asarray(vectors, np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
