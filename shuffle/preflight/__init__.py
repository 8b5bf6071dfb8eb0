"""The checks of a spec that need the store, made before any worker starts."""
