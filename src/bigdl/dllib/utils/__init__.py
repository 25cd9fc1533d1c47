"""Helpers that programs for BigDL 2.x import."""
