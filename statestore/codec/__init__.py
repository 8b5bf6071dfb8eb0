"""The encoding of rows, keys and schemas as bytes, and back. Nothing here stores or sends the bytes."""
