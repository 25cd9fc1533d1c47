"""What a worker's rows are as batches of tensors: of a spooled shard or of a DataLoader."""
