"""How rows, keys and schemas become bytes, and back. Knows nothing of where the bytes go."""
