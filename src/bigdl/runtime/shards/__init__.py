"""The rows of one worker: stored column by column in a spool, and cut into batches."""
