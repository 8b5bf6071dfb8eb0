"""The interface to the user's classes: loading and creating them, and handling rows that they refuse."""
