"""Embedding tables whose rows are sharded over the workers."""
