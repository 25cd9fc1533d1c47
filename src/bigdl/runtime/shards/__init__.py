"""Storage of a worker's rows as columns in memory-mapped files, and their batches."""
