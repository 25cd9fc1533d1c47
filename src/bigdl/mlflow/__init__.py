"""MLflow (extra ``mlflow``): Estimators as its models.

Callbacks that log fits are in :mod:`bigdl.mlflow.pytorch` and :mod:`bigdl.mlflow.keras`.
"""

from bigdl.common.dropped import explain_imports
from bigdl.mlflow.flavour import load_model, log_model, save_model

__all__ = ["load_model", "log_model", "save_model"]

explain_imports()
