"""What is attacked: a module for each target, and what all of them have in common in ``base``."""
