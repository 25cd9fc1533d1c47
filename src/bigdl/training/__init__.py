"""Parts of a fit that all frameworks share: position, checkpoints, triggers, figures, retries."""
