"""A spec: what a streaming processor is made of, as frozen objects and as a YAML file."""
