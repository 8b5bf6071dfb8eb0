"""The end of an error message about a name that is not known: the known name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LIKENESS_MIN = 0.6
"""The least similarity of two names (``difflib``, 0 to 1) for one to be suggested for the other: that of a word of four
letters and the same word with one typing error. Below that, suggestions are as often wrong as right."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The name in ``known`` that is most similar to ``word``; None if none is similar."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=LIKENESS_MIN)
    return near[0] if near else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """``; did you mean 'x'?`` with the known name most similar to ``word``; ``otherwise`` if none is similar."""
    near = nearest(word, known)
    return otherwise if near is None else f"; did you mean {near!r}?"
