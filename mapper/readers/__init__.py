"""Readers of the kinds of input that come with the project."""
