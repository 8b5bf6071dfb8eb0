"""Modules that benchmarks share: reports, pictures, sampling of workers, paced input, jobs."""
