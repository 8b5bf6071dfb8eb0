"""Outputs: where the rows go that the user's reducers emit."""
