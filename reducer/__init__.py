"""Reducers: fetch from every mapper, run the user's reduce, commit state and positions together."""
