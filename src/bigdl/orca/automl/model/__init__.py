"""Models of trials, by framework."""
