"""Tools for the developers of this project. Nothing here is installed."""
