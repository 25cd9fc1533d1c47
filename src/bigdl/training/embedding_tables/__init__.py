"""Tables of embeddings whose rows lie in slices on the workers."""
