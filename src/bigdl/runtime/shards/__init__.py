"""Rows of one worker: columns in memory-mapped spools, and their batches."""
