"""How a search is run, and what is known of it."""
