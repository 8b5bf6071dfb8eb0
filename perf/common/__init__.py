"""What benchmarks share: reports, pictures, watches, paced input, jobs."""
