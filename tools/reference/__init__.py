"""The reference: the pages of docs/reference, whose tables are made from the code itself.

A page is written by hand but for its *regions*, each between two comments that the reader does not see:

    <!-- made from the code: spec mapper -->
    …
    <!-- until here -->

``python -m tools.reference`` makes what is inside of every region anew, and leaves the rest alone. The output depends
on nothing but the code, so a test can compare the pages with it (tests/unit/test_reference.py).

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
