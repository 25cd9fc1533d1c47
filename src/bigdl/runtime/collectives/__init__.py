"""Collectives among the workers of a job."""
