"""The command ``shuffle``: every command and option, from the parsers that read them, and the exit codes."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator

from shuffle import cli, errors
from shuffle.support import exit_codes
from tools.reference import text


def regions() -> dict[str, str]:
    return {"commands": _overview() + "\n\n" + _commands(), "exit codes": _exit_codes()}


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command by what is typed for it (``shuffle state scan``), in the order of the help."""
    return dict(_walk("shuffle", root()))


def root() -> argparse.ArgumentParser:
    return cli.build_parser()


def _walk(typed: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    inner = subcommands(parser)
    if not inner:
        yield typed, parser
    for name, (said, command) in inner.items():
        if typed == "shuffle" and name in cli.DELEGATES:
            module = importlib.import_module(cli.DELEGATES[name][0])
            command = module._parser()
        elif typed == "shuffle":
            # Parsers of subcommands are built only when their command is given, so that every command starts quickly.
            command = subcommands(cli.build_parser(name))[name][1]
        command.description = command.description or text.sentence(said)
        yield from _walk(f"{typed} {name}", command)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """The subcommands of a parser by name, each with its help and its parser."""
    found: dict[str, tuple[str, argparse.ArgumentParser]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found |= {name: (helps.get(name, ""), command) for name, command in action.choices.items()}
    return found


def _overview() -> str:
    rows = [(f"[`{typed}`](#{_anchor(typed)})", _what(typed, parser)) for typed, parser in commands().items()]
    return text.table(("command", "what it does"), rows)


def _anchor(typed: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", typed.lower()).replace(" ", "-")


def _what(typed: str, parser: argparse.ArgumentParser) -> str:
    if not parser.description:
        raise LookupError(f"{typed} does not say what it does: give its parser a description")
    return text.markdown(parser.description)


def _commands() -> str:
    return "\n\n".join(_command(typed, parser) for typed, parser in commands().items())


def _command(typed: str, parser: argparse.ArgumentParser) -> str:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    usage = " ".join([typed, *(_usage(action) for action in actions)])
    parts = [f"### {typed}", _what(typed, parser), f"    {usage}"]
    if actions:
        rows = [(text.code(_spelling(action)), _default(action), _help(typed, action)) for action in actions]
        parts.append(text.table(("argument", "default", "meaning"), rows))
    if parser.epilog:
        parts.append("\n".join(f"    {line}" for line in _examples(parser.epilog)))
    return "\n\n".join(parts)


def _value_name(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return _value_name(action)
    value = "" if action.nargs == 0 else f" {_value_name(action)}"
    return ", ".join(action.option_strings) + value


def _usage(action: argparse.Action) -> str:
    if not action.option_strings:
        name = _value_name(action)
        return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)
    value = "" if action.nargs == 0 else f" {_value_name(action)}"
    return f"{action.option_strings[0]}{value}" if action.required else f"[{action.option_strings[0]}{value}]"


def _default(action: argparse.Action) -> str:
    if not action.option_strings:
        return " " if action.nargs in ("?", "*") else "must be given"
    if action.required:
        return "must be given"
    if action.nargs == 0 or action.default in (None, argparse.SUPPRESS):
        return " "
    return text.code(f"{action.default:_}" if isinstance(action.default, int) else str(action.default))


_SAID_DEFAULT = re.compile(r"\s*\(default:? [^)]*\)")


def _help(typed: str, action: argparse.Action) -> str:
    """The help of an argument, without the default, which the table shows; a test finds arguments without help."""
    said = (action.help or "") % {**vars(action), "prog": typed}
    if action.default not in (None, argparse.SUPPRESS, False):
        said = _SAID_DEFAULT.sub("", said)
    return text.sentence(said)


def _examples(epilog: str) -> list[str]:
    lines = epilog.replace("example: ", "").splitlines()
    return [line.strip() for line in lines if line.strip() and line.strip() != "examples:"]


def _exit_codes() -> str:
    docs = text.attribute_docs(exit_codes)
    rows = [("0", "Done. `shuffle run --until-drained` ends so once all input that is there has been committed.")]
    codes = {name: int(value) for name, value in vars(exit_codes).items() if name.startswith("EXIT_")}
    for name, code in sorted(codes.items(), key=lambda entry: entry[1]):
        rows.append((str(code), text.markdown(docs[name])))
    return text.table(("exit code", "meaning"), rows)


def exit_code(error: type[errors.ShuffleError]) -> int:
    """The exit code of the command after this error, from the function that decides it."""
    return exit_codes.exit_code_of(error("an error"))
