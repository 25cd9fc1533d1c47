"""What the fits of all frameworks share: position, checkpoints, triggers, failures, figures."""
