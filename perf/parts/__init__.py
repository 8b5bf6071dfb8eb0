"""Parts of single benchmarks that are too long for one file."""
