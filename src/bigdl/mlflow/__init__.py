"""MLflow integration (extra ``mlflow``): Estimators as MLflow models.

Callbacks that log training runs are in :mod:`bigdl.mlflow.pytorch` and :mod:`bigdl.mlflow.keras`,
and one that logs the trials of a search in :mod:`bigdl.mlflow.tuning`.
"""

from bigdl.common.dropped import explain_imports
from bigdl.mlflow.flavour import load_model, log_model, save_model

__all__ = ["load_model", "log_model", "save_model"]

explain_imports()
