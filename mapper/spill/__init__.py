"""Rows of reducers that lag far behind: when they are spilled, in which form, and where they wait."""
