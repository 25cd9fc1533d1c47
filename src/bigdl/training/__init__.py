"""Parts of a fit that all frameworks share: position, checkpoints, triggers, figures, retries."""

from bigdl.common.dropped import explain_imports

explain_imports()
