"""Trees of XGBoost in ONNX Runtime, and the choice of the faster runtime.

ONNX Runtime adds up the leaves in another order, so its results differ from XGBoost's by rounding
of float32. :func:`fastest_trees` compares both, and measures them where the trees are loaded.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.missing import installed_version
from bigdl.nano.acceleration.trees import Trees, XGBTrees

if TYPE_CHECKING:
    from onnx import ModelProto

logger = logging.getLogger("bigdl.nano")

_RTOL, _ATOL = 1e-5, 1e-6
"""Largest difference of results that are equal but for rounding."""
LEAST_GAIN = 1.1
"""XGBoost is kept unless ONNX Runtime is faster by this factor."""
_REPEATS = 7
_TRIAL_ROWS = 256
_INPUT, _OUTPUT = "x", "margin"


def _identity(margins: np.ndarray) -> np.ndarray:
    return margins


def _sigmoid(margins: np.ndarray) -> np.ndarray:
    return np.float32(1) / (np.float32(1) + np.exp(-margins))


def _softmax(margins: np.ndarray) -> np.ndarray:
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _logit(score: np.ndarray) -> np.ndarray:
    return np.log(score / (1 - score))


_Function = Callable[[np.ndarray], np.ndarray]
_OBJECTIVES: Mapping[str, tuple[_Function, _Function]] = {
    "binary:logistic": (_sigmoid, _logit),
    "reg:logistic": (_sigmoid, _logit),
    "binary:logitraw": (_identity, _logit),
    "multi:softprob": (_softmax, _identity),
    "count:poisson": (np.exp, np.log),
    "reg:gamma": (np.exp, np.log),
    "reg:tweedie": (np.exp, np.log),
    **dict.fromkeys(
        (
            *("reg:squarederror", "reg:squaredlogerror", "reg:pseudohubererror"),
            *("reg:absoluteerror", "reg:quantileerror", "rank:ndcg", "rank:map", "rank:pairwise"),
        ),
        (_identity, _identity),
    ),
}
"""Functions from margins to predictions, and from the base score to the base margin."""


class TreeNetwork(Trees):
    """Trees of XGBoost whose values and margins ONNX Runtime computes.

    Leaves, contributions, and rows with a base margin are those of XGBoost.

    Parameters
    ----------
    trees : XGBTrees
    network : onnx.ModelProto
        Network of :func:`network_of`.
    """

    library = "onnxruntime"

    def __init__(self, trees: XGBTrees, network: ModelProto):
        import onnxruntime

        self._trees, self.threads = trees, trees.threads
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = trees.threads
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(
            network.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._link = _OBJECTIVES[objective_of(trees)][0]

    @property
    def width(self) -> int:
        return self._trees.width

    @property
    def names(self) -> list[str]:
        return self._trees.names

    def read_facts(self) -> dict[str, Any]:
        return self._trees.read_facts()

    def with_facts(self, facts: Mapping[str, Any]) -> bytes:
        return self._trees.with_facts(facts)

    def predict(
        self,
        block: np.ndarray,
        result: str = "value",
        missing: float = np.nan,
        margin: np.ndarray | None = None,
    ) -> np.ndarray:
        if margin is not None or result not in ("value", "margin") or not len(block):
            return self._trees.predict(block, result, missing, margin)
        if not np.isnan(missing):
            block = np.where(block == np.float32(missing), np.float32(np.nan), block)
        (margins,) = self._session.run([_OUTPUT], {_INPUT: block})
        if margins.shape[1] == 1:
            margins = margins[:, 0]
        return margins if result == "margin" else self._link(margins)


def objective_of(trees: XGBTrees) -> str:
    """Return the objective of trees of XGBoost."""
    return str(json.loads(trees.booster.save_config())["learner"]["objective"]["name"])


def network_of(trees: XGBTrees) -> ModelProto | None:
    """Return trees of XGBoost as an ONNX network; None if ONNX cannot represent them.

    That is the case for categories, for ``dart``, for vector leaves, and for objectives whose
    predictions are no known function of the margin.
    """
    from onnx import TensorProto, helper

    doc = json.loads(trees.booster.save_raw("json"))["learner"]
    objective = doc["objective"]["name"]
    boosted = doc["gradient_booster"]
    if boosted["name"] != "gbtree" or objective not in _OBJECTIVES:
        return None
    model, settings = boosted["model"], doc["learner_model_param"]
    score = np.atleast_1d(np.array(json.loads(settings["base_score"]), np.float64))
    outputs = max(1, int(settings["num_class"]), int(settings.get("num_target", 1)))
    base = np.broadcast_to(_OBJECTIVES[objective][1](score), (outputs,))
    nodes = _Nodes()
    for number, (tree, output) in enumerate(zip(model["trees"], model["tree_info"], strict=True)):
        if tree["categories"] or int(tree["tree_param"].get("size_leaf_vector", 1)) > 1:
            return None
        nodes.add(number, tree, int(output))
    attributes: dict[str, Any] = {"n_targets": outputs, **nodes.attributes}
    attributes["base_values"] = base.astype(np.float32).tolist()
    node = helper.make_node(
        "TreeEnsembleRegressor", [_INPUT], [_OUTPUT], domain="ai.onnx.ml", **attributes
    )
    rows = helper.make_tensor_value_info(_INPUT, TensorProto.FLOAT, [None, trees.width])
    margins = helper.make_tensor_value_info(_OUTPUT, TensorProto.FLOAT, [None, outputs])
    graph = helper.make_graph([node], "trees", [rows], [margins])
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=versions, ir_version=8)


class _Nodes:
    """Attributes of ONNX's TreeEnsembleRegressor, one entry per node or leaf."""

    def __init__(self) -> None:
        names = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids")
        more = ("falsenodeids", "missing_value_tracks_true")
        targets = ("treeids", "nodeids", "ids", "weights")
        self.attributes: dict[str, list[Any]] = {
            **{f"nodes_{name}": [] for name in (*names, *more)},
            **{f"target_{name}": [] for name in targets},
        }

    def add(self, number: int, tree: Mapping[str, Any], output: int) -> None:
        """Add the nodes of a tree, whose leaves belong to an output."""
        lefts, rights = tree["left_children"], tree["right_children"]
        remaining = [0]  # pruned nodes are in the arrays, too, but nothing refers to them
        while remaining:
            index = remaining.pop()
            left, right = lefts[index], rights[index]
            value, is_leaf = tree["split_conditions"][index], left < 0
            if not is_leaf:
                remaining += [right, left]
            self._append(
                "nodes",
                treeids=number,
                nodeids=index,
                featureids=0 if is_leaf else tree["split_indices"][index],
                values=0.0 if is_leaf else value,
                modes="LEAF" if is_leaf else "BRANCH_LT",
                truenodeids=0 if is_leaf else left,
                falsenodeids=0 if is_leaf else right,
                missing_value_tracks_true=0 if is_leaf else int(tree["default_left"][index]),
            )
            if is_leaf:
                self._append("target", treeids=number, nodeids=index, ids=output, weights=value)

    def _append(self, prefix: str, **values: object) -> None:
        for name, value in values.items():
            self.attributes[f"{prefix}_{name}"].append(value)


def fastest_trees(trees: Trees, rows: int, missing: float = np.nan) -> Trees:
    """Return the trees in the faster runtime, if its results are equal but for rounding.

    Both predict the same rows in turns. The features of these rows are near the thresholds of the
    trees, or missing.

    Parameters
    ----------
    trees : Trees
    rows : int
        Number of rows of a typical call.
    missing : float
        Value of missing features, in addition to NaN.

    Returns
    -------
    Trees
        Those of XGBoost in ONNX Runtime, or `trees`.
    """
    if not isinstance(trees, XGBTrees):
        return trees
    if installed_version("onnxruntime") is None or installed_version("onnx") is None:
        return trees
    network = network_of(trees)
    if network is None:
        return trees
    other = TreeNetwork(trees, network)
    block = sample_rows(trees, max(_TRIAL_ROWS, rows))
    for result in ("value", "margin"):
        expected, predicted = (each.predict(block, result, missing) for each in (trees, other))
        if not np.allclose(predicted, expected, rtol=_RTOL, atol=_ATOL):
            logger.warning(
                "ONNX Runtime predicts other values than XGBoost for these trees, so XGBoost "
                "predicts them"
            )
            return trees
    block = np.ascontiguousarray(block[:rows])
    seconds: list[list[float]] = [[], []]
    for _ in range(_REPEATS):
        for each, taken in zip((trees, other), seconds, strict=True):
            began = time.perf_counter()
            each.predict(block, "value", missing)
            taken.append(time.perf_counter() - began)
    gain = float(np.median(seconds[0]) / np.median(seconds[1]))
    logger.debug("ONNX Runtime predicts %d rows %.2f times as fast as XGBoost", rows, gain)
    return other if gain >= LEAST_GAIN else trees


def sample_rows(trees: XGBTrees, rows: int) -> np.ndarray:
    """Return random rows whose features are near the thresholds of the trees, or missing."""
    random = np.random.default_rng(0)
    block = random.random((rows, trees.width), dtype=np.float32)
    table = json.loads(trees.booster.save_raw("json"))["learner"]["gradient_booster"]["model"]
    thresholds: dict[int, list[float]] = {}
    for tree in table["trees"]:
        for feature, left, value in zip(
            tree["split_indices"], tree["left_children"], tree["split_conditions"], strict=True
        ):
            if left >= 0:
                thresholds.setdefault(feature, []).append(value)
    for feature, values in thresholds.items():
        drawn = random.choice(np.array(values, np.float32), rows)
        steps = random.integers(-1, 2, rows).astype(np.float32)
        block[:, feature] = np.where(
            steps == 0, drawn, np.nextafter(drawn, drawn + steps, dtype=np.float32)
        )
    block[random.random(block.shape) < 0.05] = np.nan
    return block
