"""Params that the stages share, with the chained setters of BigDL 2.x."""

from __future__ import annotations

from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasPredictionCol, HasSeed

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError

__all__ = ["ClassifierParams", "ModelParams", "TrainingParams"]


def _param(name: str, doc: str, converter=None) -> Any:
    return Param(Params._dummy(), name, doc, typeConverter=converter)


class ModelParams(HasFeaturesCol, HasPredictionCol):
    """Of every stage that has a model."""

    batchSize = _param("batchSize", "rows of a batch, over all workers", TypeConverters.toInt)

    def setBatchSize(self, value: int):
        """Rows of a batch, over all workers together."""
        return self._set(batchSize=check_positive("batchSize", value))

    def getBatchSize(self) -> int:
        return self.getOrDefault(self.batchSize)

    def setFeaturesCol(self, value: str):
        """The column of the model's input: vectors, arrays or numbers."""
        return self._set(featuresCol=value)

    def setPredictionCol(self, value: str):
        """The column that ``transform`` adds."""
        return self._set(predictionCol=value)


class TrainingParams(ModelParams, HasLabelCol, HasSeed):
    """Of every stage that trains."""

    maxEpoch = _param("maxEpoch", "how often every row is seen", TypeConverters.toInt)
    learningRate = _param("learningRate", "rate of the optimizer", TypeConverters.toFloat)
    learningRateDecay = _param(
        "learningRateDecay",
        "after n steps the rate is learningRate / (1 + n * this)",
        TypeConverters.toFloat,
    )
    workersPerNode = _param("workersPerNode", "workers on every node", TypeConverters.toInt)
    cachingSample = _param("cachingSample", "accepted: data is always kept", None)
    dataCacheLevel = _param("dataCacheLevel", "accepted: data lies in mapped files", None)

    def setMaxEpoch(self, value: int):
        """How often every row is seen, unless ``setEndWhen`` says when to stop."""
        return self._set(maxEpoch=check_positive("maxEpoch", value))

    def getMaxEpoch(self) -> int:
        return self.getOrDefault(self.maxEpoch)

    def setLearningRate(self, value: float):
        """Rate of the default optimizer and of those given as a class or a name."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UsageError(f"learningRate must be a number of at least 0, got {value!r}")
        return self._set(learningRate=float(value))

    def getLearningRate(self) -> float:
        return self.getOrDefault(self.learningRate)

    def setLearningRateDecay(self, value: float):
        """After n steps the rate is ``learningRate / (1 + n * value)``."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UsageError(f"learningRateDecay must be a number of at least 0, got {value!r}")
        return self._set(learningRateDecay=float(value))

    def getLearningRateDecay(self) -> float:
        return self.getOrDefault(self.learningRateDecay)

    def setWorkersPerNode(self, value: int):
        """Workers on every node; each gets its share of the node's cores."""
        return self._set(workersPerNode=check_positive("workersPerNode", value))

    def getWorkersPerNode(self) -> int:
        return self.getOrDefault(self.workersPerNode)

    def setSeed(self, value: int):
        """Seed of weights, shuffling and dropout; default random."""
        return self._set(seed=value)

    def setLabelCol(self, value: str):
        """The column of the targets: numbers, arrays or vectors."""
        return self._set(labelCol=value)

    def setCachingSample(self, value: bool):
        """Accepted for compatibility: every worker keeps its rows in a mapped file."""
        return self._set(cachingSample=bool(value))

    def isCachingSample(self) -> bool:
        return self.getOrDefault(self.cachingSample)

    def setDataCacheLevel(self, level: str, numSlice: int | None = None):
        """Accepted for compatibility: every worker keeps its rows in a mapped file.

        Parameters
        ----------
        level : str
            ``"DRAM"`` or ``"DISK_AND_DRAM"``.
        numSlice : int, optional
        """
        if level not in ("DRAM", "DISK_AND_DRAM"):
            raise UsageError(f'dataCacheLevel must be "DRAM" or "DISK_AND_DRAM", got {level!r}')
        return self._set(dataCacheLevel=[level, numSlice])

    def getDataCacheLevel(self):
        level, slices = self.getOrDefault(self.dataCacheLevel)
        return level if slices is None else (level, slices)


class ClassifierParams(Params):
    """Of classifiers, trained or not."""

    threshold = _param(
        "threshold", "probability above which one output means class 1", TypeConverters.toFloat
    )
    zeroBasedLabel = _param(
        "zeroBasedLabel", "whether classes count from 0 or from 1", TypeConverters.toBoolean
    )
    rawPredictionCol = _param(
        "rawPredictionCol", "column for the scores of the classes", TypeConverters.toString
    )

    def setThreshold(self, value: float):
        """Probability above which a model of one output means class 1; default 0.5."""
        return self._set(threshold=value)

    def getThreshold(self) -> float:
        return self.getOrDefault(self.threshold)

    def setZeroBasedLabel(self, value: bool):
        """Whether the first of several classes is 0.0 (default), or 1.0 as in BigDL 2.x."""
        return self._set(zeroBasedLabel=value)

    def isZeroBasedLabel(self) -> bool:
        return self.getOrDefault(self.zeroBasedLabel)

    def setRawPredictionCol(self, value: str):
        """Add a column of the scores of all classes too, e.g. for the area under a ROC curve."""
        return self._set(rawPredictionCol=value)

    def getRawPredictionCol(self) -> str | None:
        return self.getOrDefault(self.rawPredictionCol) if self._has_raw else None

    @property
    def _has_raw(self) -> bool:
        return self.isDefined(self.rawPredictionCol)
