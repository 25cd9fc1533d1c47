"""Searches for the best parameters of XGBoost."""

from bigdl.orca.automl.model.base_xgboost_model import XGBoostModelBuilder
from bigdl.orca.automl.xgboost.auto_xgb import AutoXGBClassifier, AutoXGBRegressor

__all__ = ["AutoXGBClassifier", "AutoXGBRegressor", "XGBoostModelBuilder"]
