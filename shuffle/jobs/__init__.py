"""Ready-made jobs: a mapper that hashes, a reducer that aggregates."""
