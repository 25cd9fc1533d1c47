"""Parts that all training loops share: position, checkpoints, triggers, metrics and retries."""

from bigdl.common.dropped import explain_imports

explain_imports()
