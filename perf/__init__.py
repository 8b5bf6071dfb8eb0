"""Benchmarks: one module for each question, ``python -m perf.NAME``.

Each prints a table for people and, with ``--json FILE``, writes an object whose ``bars`` maps each measured name to its
number. The workload they all use is in ``shuffle.examples.workload``, what they share otherwise in
``perf.common``.
"""
