"""Writing from Spark: queues and tables, as streams and as batches."""
