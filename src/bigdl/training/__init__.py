"""Parts of a fit that all frameworks share: position, checkpoints, triggers, failures, figures."""
