"""The streaming source: what the driver decides, and what the tasks read."""
