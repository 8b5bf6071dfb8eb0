"""The command ``shuffle state``, which shows what is in a store."""
