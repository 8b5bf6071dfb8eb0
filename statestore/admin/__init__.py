"""``shuffle state``: looking into a store."""
