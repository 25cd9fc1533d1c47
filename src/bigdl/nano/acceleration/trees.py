"""Boosted trees of XGBoost and LightGBM, read from the bytes of a model file.

:func:`read_trees` returns the trees of either library with one interface for predictions.
:func:`matrix_of` converts columns to their input.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    import lightgbm
    import xgboost

Categories = Mapping[int, Sequence[str]]
"""Texts of the categorical text features by position; the position in the list is the code."""

_ATTRIBUTE = "bigdl"
_FACTS = re.compile(r"^bigdl:(\{.*\})\n", re.M)
_LIGHTGBM = b"tree\n"


class Trees(ABC):
    """Boosted trees of a library, for predictions.

    Attributes
    ----------
    library : str
        ``"xgboost"`` or ``"lightgbm"``.
    threads : int
        Threads of a call; 0 for all.
    """

    library: ClassVar[str]
    threads: int

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of matrix columns."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of the matrix columns; empty without names."""

    @abstractmethod
    def read_facts(self) -> dict[str, Any]:
        """Return the facts about the training that BigDL stored; empty for other programs."""

    @abstractmethod
    def with_facts(self, facts: Mapping[str, Any]) -> bytes:
        """Return a model file with other facts, which the library ignores."""

    @abstractmethod
    def predict(
        self,
        block: np.ndarray,
        result: str = "value",
        missing: float = np.nan,
        margin: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return predictions for a float32 matrix of shape ``(rows, width)``.

        Parameters
        ----------
        block : ndarray
        result : {"value", "margin", "leaf", "contributions"}
        missing : float
            Value of missing features, in addition to NaN.
        margin : ndarray, optional
            Base margin of each row.
        """


class XGBTrees(Trees):
    """Trees of XGBoost.

    Parameters
    ----------
    data : bytes
        Content of a model file in JSON or UBJSON.
    threads : int
    """

    library = "xgboost"

    def __init__(self, data: bytes, threads: int = 0):
        require("xgboost", "xgboost")
        self.threads = threads
        self.booster = read_booster(data, threads)

    @property
    def width(self) -> int:
        return int(self.booster.num_features())

    @property
    def names(self) -> list[str]:
        return list(self.booster.feature_names or ())

    def read_facts(self) -> dict[str, Any]:
        text = self.booster.attr(_ATTRIBUTE)
        return json.loads(text) if text else {}

    def with_facts(self, facts: Mapping[str, Any]) -> bytes:
        self.booster.set_attr(**{_ATTRIBUTE: json.dumps(dict(facts))})
        return bytes(self.booster.save_raw("ubj"))

    def predict(
        self,
        block: np.ndarray,
        result: str = "value",
        missing: float = np.nan,
        margin: np.ndarray | None = None,
    ) -> np.ndarray:
        import xgboost

        if result in ("value", "margin"):
            return self.booster.inplace_predict(
                block,
                predict_type=result,
                missing=missing,
                validate_features=False,
                base_margin=margin,
            )
        types = self.booster.feature_types
        matrix = xgboost.DMatrix(
            block,
            missing=missing,
            base_margin=margin,
            feature_types=types,
            enable_categorical="c" in (types or ()),
        )
        is_leaf = result == "leaf"
        return self.booster.predict(
            matrix, pred_leaf=is_leaf, pred_contribs=not is_leaf, validate_features=False
        )


class LGBMTrees(Trees):
    """Trees of LightGBM.

    Parameters
    ----------
    data : bytes
        Content of a model file.
    threads : int
    """

    library = "lightgbm"

    def __init__(self, data: bytes, threads: int = 0):
        require("lightgbm", "lightgbm")
        self.threads = threads
        self._text = data.decode()
        self.booster = read_lightgbm(data)

    @property
    def width(self) -> int:
        return int(self.booster.num_feature())

    @property
    def names(self) -> list[str]:
        return list(self.booster.feature_name())

    def read_facts(self) -> dict[str, Any]:
        match = _FACTS.search(self._text)
        return json.loads(match[1]) if match else {}

    def with_facts(self, facts: Mapping[str, Any]) -> bytes:
        text = _FACTS.sub("", self._text)
        body, mark, tail = text.rpartition("pandas_categorical:")
        if not mark:
            body, tail = text.rstrip("\n") + "\n\n", "null\n"
        line = f"bigdl:{json.dumps(dict(facts))}\n"
        return f"{body}{line}pandas_categorical:{tail}".encode()

    def predict(
        self,
        block: np.ndarray,
        result: str = "value",
        missing: float = np.nan,
        margin: np.ndarray | None = None,
    ) -> np.ndarray:
        if not np.isnan(missing):
            block = np.where(block == np.float32(missing), np.float32(np.nan), block)
        if margin is not None and result == "value":
            raise UsageError(
                'LightGBM adds no base margin to predictions; pass output="margin" with '
                "base_margin_col",
                code="unsupported",
                argument="base_margin_col",
            )
        if not len(block):
            block = np.zeros((1, self.width), np.float32)
            return self.predict(block, result)[:0]
        values = np.asarray(
            self.booster.predict(
                block,
                raw_score=result == "margin",
                pred_leaf=result == "leaf",
                pred_contrib=result == "contributions",
                num_threads=self.threads,
            )
        )
        if result == "contributions" and values.shape[1] > self.width + 1:
            values = values.reshape(len(block), -1, self.width + 1)
        return values if margin is None else values + margin.reshape(values.shape)


def read_booster(data: bytes, threads: int = 0) -> xgboost.Booster:
    """Return the booster of a file's bytes; it uses `threads` threads (0: all)."""
    import xgboost

    booster = xgboost.Booster({"nthread": threads})
    booster.load_model(bytearray(data))
    return booster


def read_lightgbm(data: bytes) -> lightgbm.Booster:
    """Return the booster of LightGBM of a file's bytes.

    Raises
    ------
    UsageError
        If LightGBM cannot read them.
    """
    import lightgbm

    try:
        return lightgbm.Booster(model_str=data.decode())
    except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
        raise UsageError(f"LightGBM cannot read the model: {error}", code="file-format") from error


def read_trees(data: bytes, threads: int = 0) -> Trees:
    """Return the trees of a model file of XGBoost or LightGBM.

    Parameters
    ----------
    data : bytes
        Content of the file.
    threads : int
        Threads of a prediction; 0 for all.

    Raises
    ------
    UsageError
        If the library is missing, or cannot read the file.
    """
    if data.startswith(_LIGHTGBM):
        return LGBMTrees(data, threads)
    return XGBTrees(data, threads)


def missing_of(facts: Mapping[str, Any]) -> float:
    """Return the value of missing features in a fit, in addition to NaN."""
    value = facts.get("missing")
    return np.nan if value is None else float(value)


def codes_of(texts: np.ndarray, categories: Sequence[str]) -> np.ndarray:
    """Return the float32 codes of encoded texts, and NaN for texts without a category."""
    codes = {text.encode(): code for code, text in enumerate(categories)}
    distinct, inverse = np.unique(texts.reshape(-1), return_inverse=True)
    values = np.array([codes.get(text, np.nan) for text in distinct.tolist()], np.float32)
    return values[inverse] if len(distinct) else np.empty(0, np.float32)


def matrix_of(columns: Sequence[Any], categories: Categories, width: int) -> np.ndarray:
    """Return columns as one float32 matrix with the columns of the trees.

    Parameters
    ----------
    columns : list of ndarray
        One array per feature; encoded texts have a dtype such as ``S16``.
    categories : dict of int to list of str
    width : int
        Number of matrix columns of the trees.

    Raises
    ------
    UsageError
        If a feature is a map or an unexpected text, or the trees have other features.
    """
    blocks = []
    for index, values in enumerate(columns):
        if isinstance(values, dict):
            raise UsageError(
                "The features of trees must be numbers, got a map; select its values as columns",
                code="data-dtype",
            )
        if values.dtype.kind == "S":
            if index not in categories:
                raise UsageError(
                    f"Feature {index} holds texts, but it was no text in the fit; pass the "
                    "columns of the fit",
                    code="model-input",
                )
            values = codes_of(values, categories[index])
        blocks.append(values.reshape(len(values), -1))
    if len(blocks) == 1:
        block = np.ascontiguousarray(blocks[0], dtype=np.float32)
    else:
        block = np.concatenate([each.astype(np.float32, copy=False) for each in blocks], axis=1)
    if block.shape[1] != width:
        raise UsageError(
            f"The trees were trained with {width} features, got {block.shape[1]}; pass the columns "
            "of the fit",
            code="model-input",
        )
    return block
