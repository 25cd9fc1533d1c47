"""Collective operations among the workers of a job."""
