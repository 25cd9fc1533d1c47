"""Helpers of BigDL 2.x's ``dllib.utils``."""
