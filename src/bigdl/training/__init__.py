"""Shared parts of all trainings: position, checkpoints, triggers, metrics and retries."""

from bigdl.common.dropped import explain_imports

explain_imports()
