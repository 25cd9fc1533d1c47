"""MLflow flavor ``bigdl`` for Estimators.

A saved model has the flavor ``bigdl``, which :func:`load_model` reads, and ``python_function``, for
:func:`mlflow.pyfunc.load_model`, ``spark_udf`` and MLflow's servers.  Its data is a pickle: load a
model only from a source whose code you would run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, require
from bigdl.common.missing import installed_version
from bigdl.common.private_folders import scratch_folder
from bigdl.orca.inference.shipping import ModelBytes
from bigdl.orca.learn.prediction.predictor import PredictOptions

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from mlflow.models import ModelSignature
    from mlflow.models.model import Model, ModelInfo

    from bigdl.orca.learn.estimator import TrainingEstimator
    from bigdl.orca.learn.trees.estimator import TreeEstimator

FLAVOR_NAME = "bigdl"
_FOLDER, _MODEL, _OPTIONS = "bigdl", "model.pkl", "predict.json"
_PACKAGES = {
    "pytorch": ("torch",),
    "keras": ("keras", "tensorflow", "torch"),
    "xgboost": ("xgboost", "torch"),
    "lightgbm": ("lightgbm", "torch"),
}


def log_model(
    estimator: TrainingEstimator | TreeEstimator,
    name: str = "model",
    *,
    registered_model_name: str | None = None,
    params: Mapping[str, Any] | None = None,
    **options: Any,
) -> ModelInfo:
    """Log the model of an Estimator in the active MLflow run, or in a new one.

    Parameters
    ----------
    estimator : PyTorchEstimator, KerasEstimator, XGBEstimator or LGBMEstimator
        An Estimator of :mod:`bigdl.orca.learn.pytorch`, :mod:`bigdl.orca.learn.tf2` or
        :mod:`bigdl.orca.learn.trees`.
    name : str
        Name of the model in the run.
    registered_model_name : str, optional
        Also register the model under this name.
    params : mapping, optional
        Parameters of the model, shown by MLflow.
    **options
        Options of :func:`save_model`.

    Returns
    -------
    mlflow.models.model.ModelInfo
        Information about the model, with its ``model_uri``.

    Examples
    --------
    >>> import mlflow
    >>> import numpy as np
    >>> import torch
    >>> import bigdl.mlflow
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> mlflow.set_tracking_uri("sqlite:///runs.db")
    >>> estimator = Estimator.from_torch(model=torch.nn.ReLU(), backend="local")
    >>> x = np.array([[-1.0, 2.0]], dtype="float32")
    >>> info = bigdl.mlflow.log_model(estimator, input_example=x)
    >>> mlflow.pyfunc.load_model(info.model_uri).predict(x)
    array([[0., 2.]], dtype=float32)
    """
    require("mlflow", "mlflow")
    from mlflow.models import Model

    return Model.log(
        artifact_path=None,
        name=name,
        flavor=sys.modules[__name__],
        registered_model_name=registered_model_name,
        params=None if params is None else dict(params),
        estimator=estimator,
        **options,
    )


def save_model(
    estimator: TrainingEstimator | TreeEstimator,
    path: str | os.PathLike,
    *,
    signature: ModelSignature | bool | None = None,
    input_example: object = None,
    feature_cols: str | Sequence[str] | None = None,
    output_cols: str | Sequence[str] | None = None,
    batch_size: int = 256,
    accelerate: str | os.PathLike | None = None,
    pip_requirements: Sequence[str] | str | None = None,
    extra_pip_requirements: Sequence[str] | str | None = None,
    conda_env: dict | str | None = None,
    code_paths: Sequence[str] | None = None,
    metadata: dict | None = None,
    mlflow_model: Model | None = None,
) -> None:
    """Save the model of an Estimator in MLflow's format.

    Parameters
    ----------
    estimator : PyTorchEstimator, KerasEstimator, XGBEstimator or LGBMEstimator
    path : str
        Target directory, which must not exist.
    signature : mlflow.models.ModelSignature, optional
        Signature of the model; default: inferred from `input_example`. False omits it.
    input_example : pandas.DataFrame, ndarray or dict of ndarray, optional
        Sample rows in the form of the model's input, saved with the model.
    feature_cols : str or list of str, optional
        Columns of the model's inputs; default: all columns of `input_example` if it is a frame.
        Without columns the model accepts arrays.
    output_cols : str or list of str, optional
        Names of the model's outputs, as in ``predict``.
    batch_size : int
        Number of rows per forward pass.
    accelerate : str, optional
        Acceleration as in ``predict``, for PyTorch models: the accelerated model is saved. It is
        converted with, and compared on, the rows of `input_example`. For trees ``"auto"``.
    pip_requirements, extra_pip_requirements, conda_env, code_paths, metadata
        As in MLflow's flavors. By default the requirements are the installed versions of BigDL and
        of the packages that the model needs.
    mlflow_model : mlflow.models.Model, optional
        Model to which the flavor is added; MLflow passes it.

    Raises
    ------
    UsageError
        For invalid arguments.

    Examples
    --------
    >>> import mlflow
    >>> import pandas as pd
    >>> import torch
    >>> import bigdl.mlflow
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> estimator = Estimator.from_torch(model=torch.nn.ReLU(), backend="local")
    >>> frame = pd.DataFrame({"x": [[-1.0, 2.0], [3.0, -4.0]]})
    >>> bigdl.mlflow.save_model(estimator, "relu", input_example=frame)
    >>> mlflow.pyfunc.load_model("relu").predict(frame)
    array([[0., 2.],
           [3., 0.]], dtype=float32)
    """
    require("mlflow", "mlflow")
    from mlflow import pyfunc
    from mlflow.models import Model, infer_signature

    check_positive("batch_size", batch_size)
    if feature_cols is None and hasattr(input_example, "columns"):
        feature_cols = [str(name) for name in input_example.columns]
    data, options = estimator.packed_model(
        input_example, feature_cols, batch_size, output_cols, accelerate
    )
    if signature is None and input_example is not None:
        outputs = PyfuncPredictor(data, options).predict(input_example)
        signature = infer_signature(input_example, outputs)
    if pip_requirements is None and conda_env is None:
        # otherwise MLflow loads the model in another process to find its imports
        pip_requirements = [*_requirements(estimator.framework), *(extra_pip_requirements or ())]
        extra_pip_requirements = None
    saved = Model() if mlflow_model is None else mlflow_model
    saved.add_flavor(
        FLAVOR_NAME,
        framework=estimator.framework,
        data=f"data/{_FOLDER}",
        bigdl_version=installed_version("bigdl") or "",
    )
    with scratch_folder("mlflow") as temporary:
        folder = Path(temporary, _FOLDER)
        folder.mkdir()
        (folder / _MODEL).write_bytes(data)
        (folder / _OPTIONS).write_text(json.dumps(vars(options)))
        pyfunc.save_model(
            os.fspath(path),
            loader_module="bigdl.mlflow.flavour",
            data_path=str(folder),
            code_paths=code_paths,
            conda_env=conda_env,
            mlflow_model=saved,
            signature=signature or None,
            input_example=input_example,
            pip_requirements=pip_requirements,
            extra_pip_requirements=extra_pip_requirements,
            metadata=metadata,
        )


def _requirements(framework: str) -> list[str]:
    """Return the pinned versions of BigDL and the packages that a framework's models need."""
    packages = ["bigdl[orca]", "mlflow-skinny", *_PACKAGES[framework]]
    versions = [(name, installed_version(name.partition("[")[0])) for name in packages]
    return [f"{name}=={number.partition('+')[0]}" for name, number in versions if number]


def load_model(
    model_uri: str, backend: str = "local", *, dst_path: str | None = None
) -> TrainingEstimator | TreeEstimator:
    """Load a model that :func:`save_model` or :func:`log_model` saved, as an Estimator.

    The Estimator can predict. To fit it, create an Estimator with a loss and an optimizer. Models
    saved with ``accelerate=`` are loaded by :func:`mlflow.pyfunc.load_model`.

    Parameters
    ----------
    model_uri : str
        URI of MLflow: a path, ``runs:/…`` or ``models:/…``.
    backend : str, default "local"
        Backend of the Estimator.
    dst_path : str, optional
        Directory for downloads.

    Returns
    -------
    PyTorchEstimator, KerasEstimator, XGBEstimator or LGBMEstimator

    Raises
    ------
    UsageError
        If the model has no ``bigdl`` flavor.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> import bigdl.mlflow
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> estimator = Estimator.from_torch(model=torch.nn.ReLU(), backend="local")
    >>> bigdl.mlflow.save_model(estimator, "relu")
    >>> bigdl.mlflow.load_model("relu").predict(np.array([[-1.0, 2.0]], dtype="float32"))
    array([[0., 2.]], dtype=float32)
    """
    artifacts = require("mlflow.artifacts", "mlflow")
    from mlflow.models import Model

    path = artifacts.download_artifacts(artifact_uri=model_uri, dst_path=dst_path)
    flavors = Model.load(path).flavors
    if FLAVOR_NAME not in flavors:
        raise UsageError(
            f"{model_uri} is no model of bigdl.mlflow: its flavors are {', '.join(flavors)}; load "
            "it by mlflow.pyfunc.load_model",
            code="file-format",
            path=str(model_uri),
        )
    flavor = flavors[FLAVOR_NAME]
    data = Path(path, flavor["data"], _MODEL).read_bytes()
    if flavor["framework"] == "pytorch":
        from bigdl.orca.learn.pytorch.estimator import PyTorchEstimator

        return PyTorchEstimator.of_packed_model(data, backend)
    if flavor["framework"] in ("xgboost", "lightgbm"):
        from bigdl.orca.learn import trees

        estimator_class = {"xgboost": trees.XGBEstimator, "lightgbm": trees.LGBMEstimator}
        return estimator_class[flavor["framework"]].of_packed_model(data, backend)
    from bigdl.orca.learn.tf2.estimator import KerasEstimator

    return KerasEstimator.of_packed_model(data, backend)


def _load_pyfunc(path: str) -> PyfuncPredictor:
    """Load the Python function of a model from its data directory, for MLflow."""
    options = json.loads(Path(path, _OPTIONS).read_text())
    return PyfuncPredictor(Path(path, _MODEL).read_bytes(), PredictOptions(**options))


class PyfuncPredictor:
    """A saved model with MLflow's ``predict`` interface.

    Parameters
    ----------
    data : bytes
        Bytes of an Estimator's ``packed_model``.
    options : PredictOptions
    """

    def __init__(self, data: bytes, options: PredictOptions):
        self._model, self._options = ModelBytes(data).load(), options

    def predict(
        self,
        model_input: object,
        params: dict | None = None,
    ) -> np.ndarray | dict[str, Any] | pd.DataFrame:
        """Return predictions equal to those of the Estimator.

        Parameters
        ----------
        model_input : pandas.DataFrame, ndarray or dict of ndarray
        params : dict, optional
            Ignored.

        Returns
        -------
        ndarray, dict of ndarray or pandas.DataFrame
            A frame or dict of several outputs: a frame if the input is a frame.
        """
        from bigdl.orca.learn.prediction.predictor import predict_shard

        return predict_shard(self._model, model_input, self._options)
