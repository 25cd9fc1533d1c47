"""Models in a search, by framework."""
