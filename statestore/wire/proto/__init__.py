"""The control plane's messages. ``*_pb2*.py`` are generated from ``control.proto`` by ``make proto``."""
