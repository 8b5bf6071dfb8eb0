"""The border to the user's classes: loading them, calling them, and what becomes of rows they refuse."""
