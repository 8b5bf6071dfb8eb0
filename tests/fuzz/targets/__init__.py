"""The targets of the fuzzer: a module for each, and what they have in common in ``base``."""
