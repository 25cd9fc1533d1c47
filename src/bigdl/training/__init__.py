"""Components shared by all training loops: position, checkpoints, triggers, metrics and retries."""

from bigdl.common.dropped import explain_imports

explain_imports()
