"""A structure-aware fuzzer over everything that takes bytes from outside: ``python -m tests.fuzz --inputs 200000``.

Each input begins as a valid message of the project's own codecs, is broken in one or a few places, and is given to the
product: a store, mappers and reducers as processes (``world``), or a decoder in a child process (``children``). What
must hold for every input is in ``oracles`` and ``world``. An input is a function of the seed and its number.
"""
