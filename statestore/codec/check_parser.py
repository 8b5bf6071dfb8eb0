"""The language of CHECK constraints: text to tree.

    or     := and (OR and)*
    and    := not (AND not)*
    not    := NOT not | test
    test   := sum [ comparison sum | IS [NOT] NULL | [NOT] IN ( sum, … ) | [NOT] BETWEEN sum AND sum ]
    sum    := product (( + | - ) product)*
    product:= unary (( * | / | % ) unary)*
    unary  := - unary | literal | column | length ( sum ) | ( or )

Keywords are case-insensitive, a column in double quotes is taken as written. Every node of the tree has its
position in the text, so that a mistake that is found later can still be shown there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal

EXPRESSION_CHARS_MAX = 4_096
"""The most characters of one expression. A CHECK is a line or two; a longer one belongs into a program."""

DEPTH_MAX = 30
"""The deepest nesting of parentheses, NOT and minus: each level costs the parser some ten frames of Python's stack."""

HEIGHT_MAX = 100
"""The largest height of the tree, in which each step of a long sum counts: a level costs the evaluator two frames."""

IN_MAX = 1_000
"""The most values of one IN list: each is one comparison."""

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<text>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")+")
      | (?P<word>[^\W\d]\w*)
      | (?P<sign><=|>=|<>|!=|==|[=<>+\-*/%(),])""",
    re.VERBOSE,
)
_KEYWORDS = frozenset(["AND", "OR", "NOT", "IN", "BETWEEN", "IS", "NULL", "TRUE", "FALSE"])
_COMPARISONS = {"=": "=", "==": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


class CheckError(Exception):
    """A mistake at a position of the expression."""

    def __init__(self, message: str, position: int, column: str | None = None) -> None:
        super().__init__(message)
        self.message, self.position, self.column = message, position, column


@dataclass(frozen=True)
class Literal:
    value: bool | int | Decimal | float | str | None
    position: int


@dataclass(frozen=True)
class Column:
    name: str
    position: int


@dataclass(frozen=True)
class Call:
    """An operator or function: ``AND``, ``OR``, ``NOT``, ``IS NULL``, ``length``, ``negate``, or a sign."""

    operator: str
    arguments: tuple[Node, ...]
    position: int
    height: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        height = 1 + max(argument.height if isinstance(argument, Call) else 0 for argument in self.arguments)
        if height > HEIGHT_MAX:
            raise CheckError(f"more than {HEIGHT_MAX} operations inside one another", self.position)
        object.__setattr__(self, "height", height)


Node = Literal | Column | Call


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    position: int


def parse(expression: str) -> Node:
    """The tree of ``expression``; ``CheckError`` says what is wrong and where (counted from 1)."""
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise CheckError(f"the expression has more than {EXPRESSION_CHARS_MAX} characters", EXPRESSION_CHARS_MAX)
    return _Parser(_tokens(expression)).whole()


def _tokens(expression: str) -> list[_Token]:
    tokens, at = [], 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if not match:
            what = "a string without its closing quote" if expression[at] in "'\"" else f"{expression[at]!r}"
            raise CheckError(f"{what} cannot be read", at + 1)
        kind, text = str(match.lastgroup), match[0]
        if kind == "word" and text.upper() in _KEYWORDS:
            kind, text = "keyword", text.upper()
        if kind != "space":
            tokens.append(_Token(kind, text, at + 1))
        at = match.end()
    tokens.append(_Token("end", "the end", len(expression) + 1))
    return tokens


class _Parser:
    """Recursive descent over the tokens, one method for each line of the grammar."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        node = self._or()
        if self._next.kind != "end":
            raise CheckError(f"{self._next.text!r} is not expected here", self._next.position)
        return node

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _accept(self, kind: str, *texts: str) -> _Token | None:
        token = self._next
        if token.kind == kind and (not texts or token.text in texts):
            self._at += 1
            return token
        return None

    def _expect(self, kind: str, text: str) -> _Token:
        token = self._accept(kind, text)
        if token is None:
            raise CheckError(f"{text!r} is expected instead of {self._next.text!r}", self._next.position)
        return token

    def _deeper(self, inner: Callable[[], Node], position: int) -> Node:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise CheckError(f"nested more than {DEPTH_MAX} deep", position)
        node = inner()
        self._depth -= 1
        return node

    def _or(self) -> Node:
        return self._flat(self._and, "OR")

    def _and(self) -> Node:
        return self._flat(self._not, "AND")

    def _flat(self, inner: Callable[[], Node], operator: str) -> Node:
        """All operands of a chain of one operator as one node, so that a long chain does not make a high tree."""
        nodes, position = [inner()], self._next.position
        while self._accept("keyword", operator):
            nodes.append(inner())
        return nodes[0] if len(nodes) == 1 else Call(operator, tuple(nodes), position)

    def _chain(self, inner: Callable[[], Node], *operators: str) -> Node:
        node = inner()
        while token := self._accept("sign", *operators):
            node = Call(token.text, (node, inner()), token.position)
        return node

    def _not(self) -> Node:
        if token := self._accept("keyword", "NOT"):
            return Call("NOT", (self._deeper(self._not, token.position),), token.position)
        return self._test()

    def _test(self) -> Node:
        left = self._sum()
        if token := self._accept("sign", *_COMPARISONS):
            return Call(_COMPARISONS[token.text], (left, self._sum()), token.position)
        if token := self._accept("keyword", "IS"):
            negated = self._accept("keyword", "NOT") is not None
            self._expect("keyword", "NULL")
            return _negate_if(negated, Call("IS NULL", (left,), token.position))
        negation = self._accept("keyword", "NOT")
        if token := self._accept("keyword", "IN"):
            return _negate_if(negation is not None, self._in(left, token.position))
        if token := self._accept("keyword", "BETWEEN"):
            low = self._sum()
            self._expect("keyword", "AND")
            at_least = Call(">=", (left, low), token.position)
            at_most = Call("<=", (left, self._sum()), token.position)
            return _negate_if(negation is not None, Call("AND", (at_least, at_most), token.position))
        if negation:
            raise CheckError("IN or BETWEEN is expected after NOT", self._next.position)
        return left

    def _in(self, left: Node, position: int) -> Node:
        self._expect("sign", "(")
        choices = [Call("=", (left, self._sum()), position)]
        while self._accept("sign", ","):
            choices.append(Call("=", (left, self._sum()), position))
            if len(choices) > IN_MAX:
                raise CheckError(f"more than {IN_MAX} values in IN", position)
        self._expect("sign", ")")
        return choices[0] if len(choices) == 1 else Call("OR", tuple(choices), position)

    def _sum(self) -> Node:
        return self._chain(self._product, "+", "-")

    def _product(self) -> Node:
        return self._chain(self._unary, "*", "/", "%")

    def _unary(self) -> Node:
        token = self._next
        self._at += 1
        if token.kind == "number":
            return Literal(_number(token.text), token.position)
        if token.kind == "text":
            return Literal(token.text[1:-1].replace("''", "'"), token.position)
        if token.kind == "keyword" and token.text in ("TRUE", "FALSE", "NULL"):
            return Literal({"TRUE": True, "FALSE": False, "NULL": None}[token.text], token.position)
        if token.kind == "quoted":
            return Column(token.text[1:-1].replace('""', '"'), token.position)
        if token.kind == "word":
            return self._word(token)
        if (token.kind, token.text) == ("sign", "-"):
            operand = self._deeper(self._unary, token.position)
            if isinstance(operand, Literal) and isinstance(operand.value, int | Decimal):
                return Literal(-operand.value, token.position)
            return Call("negate", (operand,), token.position)
        if (token.kind, token.text) == ("sign", "("):
            node = self._deeper(self._or, token.position)
            self._expect("sign", ")")
            return node
        raise CheckError(f"a value is expected instead of {token.text!r}", token.position)

    def _word(self, token: _Token) -> Node:
        if not self._accept("sign", "("):
            return Column(token.text, token.position)
        if token.text.lower() != "length":
            raise CheckError(f"there is no function {token.text!r} (only length)", token.position)
        argument = self._deeper(self._sum, token.position)
        self._expect("sign", ")")
        return Call("length", (argument,), token.position)


def _negate_if(negated: bool, node: Node) -> Node:
    return Call("NOT", (node,), node.position) if negated else node


def _number(text: str) -> int | Decimal:
    """The exact number: whether it becomes a float or a decimal depends on the type of the other operand."""
    return int(text) if text.isdigit() else Decimal(text)
