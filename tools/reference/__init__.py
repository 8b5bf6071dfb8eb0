"""The reference: the pages of docs/reference, whose tables are generated from the code.

A page is written by hand except for its *regions*, each between two comments that the reader does not see:

    <!-- made from the code: spec mapper -->
    …
    <!-- until here -->

``python -m tools.reference`` generates the contents of every region, and leaves the rest unchanged. The output depends
only on the code, so a test can compare the pages with it (tests/unit/test_reference.py).

| module | what it makes |
|---|---|
| ``pages`` | finds the regions, and fills them |
| ``spec`` | the keys of a spec, and a spec with all of them in it |
| ``command`` | the commands and their options, and exit codes |
| ``python`` | the classes and functions that users import, and column types |
| ``spark`` | the options of ``format("shuffle")`` |
| ``metrics`` | the metrics of the workers |
| ``errors`` | the errors, and the limits |
| ``text`` | docstrings, tables and numbers as Markdown |
"""
