"""The command ``shuffle``.

Exit codes: 0 done, 1 failed, 2 a wrong spec or wrong arguments, 3 an exception in the user's code, 130 Ctrl-C.
Errors are printed in one place, on stderr, after ``error: ``. Modules are imported by the commands that need them, so
that ``shuffle --help`` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias

from shuffle.errors import ShuffleError
from shuffle.support.exit_codes import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_SPEC, report
from shuffle.support.process_memory import keep_small

if TYPE_CHECKING:
    from shuffle.run.controller import RunOptions

DELEGATES = {
    "mapper": ("shuffle.mapper.__main__", "run one mapper of a processor, or several in one process"),
    "reducer": ("shuffle.reducer.__main__", "run one reducer of a processor, or several in one process"),
    "exporter": ("shuffle.reducer.exporter.__main__", "carry what reducers emit to an output outside of the store"),
    "statestore": ("shuffle.statestore.server.daemon", "serve a state store"),
    "demo": ("shuffle.examples.demo", "see it all work, with processes killed on the way"),
}
"""Commands that are another module's ``main(arguments)``, with a ``--help`` of its own."""

WORKERS = ("mapper", "reducer", "exporter")
"""The commands that call ``keep_small`` themselves, since they have to do it before Arrow is imported."""

_EXAMPLES = """\
examples:
  shuffle demo                              see it all work, in under two minutes
  shuffle check job.yaml                    is the spec right, and map deterministic?
  shuffle run job.yaml                      run it until Ctrl-C
  shuffle run job.yaml --until-drained      run it until all input there is has been committed
  shuffle status job.yaml --json            positions, workers, lag
  shuffle dead-letters job.yaml list        rows that were set aside
  shuffle COMMAND --help                    more about one of them
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. Raises only ``SystemExit`` (from ``--help`` and wrong arguments)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(given, is_program=arguments is None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed the pipe. Python would fail once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except ShuffleError as error:
        return report(error)


def _dispatch(given: list[str], is_program: bool) -> int:
    if given and given[0] in DELEGATES:
        if is_program and given[0] not in WORKERS:
            keep_small()
        module = importlib.import_module(DELEGATES[given[0]][0])
        return int(module.main(given[1:]) or 0)
    parser = build_parser(given[0] if given else "")
    options = parser.parse_args(given)
    command: Callable[[argparse.Namespace], int] | None = getattr(options, "run_command", None)
    if command is None:
        parser.print_help()
        return EXIT_SPEC
    if is_program:
        keep_small()
    return command(options)


def build_parser(given: str = "") -> argparse.ArgumentParser:
    """The parser of all commands. Of subcommands only those of the command ``given`` are built, as each imports a
    module."""
    parser = argparse.ArgumentParser(
        prog="shuffle",
        description="A streaming map-reduce stage whose shuffle does not touch the disk.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shuffle {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_run(commands)
    _add_check(commands)
    _add_status(commands)
    _add_top(commands)
    _add_dead_letters(commands, given)
    _add_upgrade(commands)
    for name, (_, what) in DELEGATES.items():
        commands.add_parser(name, help=what, add_help=False)
    state = _add(
        commands,
        "state",
        "look into a state store: tables, queues, sizes",
        "shuffle state ls ./job.state",
        "shuffle state scan ./job.state activity --prefix root --limit 10",
        "shuffle state queues grpc://host:port",
    )
    if given == "state":
        from shuffle.statestore.admin import commands as state_commands

        state_commands.add_parsers(state)
        state.set_defaults(run_command=state_commands.run)
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("streaming-shuffle")
    except PackageNotFoundError:
        return "(not installed)"


# Parsers of the commands in this module ------------------------------------------------------------------------------

if TYPE_CHECKING:
    _Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


def _add(commands: _Commands, name: str, what: str, *examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_run(commands: _Commands) -> None:
    parser = _add(
        commands,
        "run",
        "start a processor, watch it, and start again what dies",
        "shuffle run job.yaml",
        "shuffle run job.yaml --until-drained --no-screen",
        "shuffle run job.yaml --mappers-only",
        "shuffle run job.yaml --engine spark --master spark://host:7077",
    )
    parser.add_argument("spec", metavar="SPEC", help="the processor's spec, a YAML file")
    parser.add_argument(
        "--until-drained", action="store_true", help="end with 0 once all input that is there has been committed"
    )
    parser.add_argument("--no-screen", action="store_true", help="lines of progress, even on a terminal")
    parser.add_argument("--no-check", action="store_true", help="do not try map on a sample of the input first")
    parser.add_argument(
        "--accept-new-map",
        action="store_true",
        help="go on with a map that was changed over existing state; refused while that could lose or double rows",
    )
    parser.add_argument(
        "--mappers-only",
        action="store_true",
        help="no reducers: for a Spark query that reads the rows (format shuffle) or runs the reducers (reduce_stream)",
    )
    parser.add_argument(
        "--engine",
        choices=("processes", "spark"),
        default="processes",
        help="what runs the workers: processes of this machine, or long-lived tasks of a Spark cluster "
        "(default: %(default)s)",
    )
    parser.add_argument("--master", metavar="URL", help="the Spark master, with --engine spark")
    parser.set_defaults(run_command=_run)


def _add_check(commands: _Commands) -> None:
    parser = _add(
        commands,
        "check",
        "check a spec against its store, and whether map is deterministic on the real input",
        "shuffle check job.yaml",
    )
    parser.add_argument("spec", metavar="SPEC", help="the processor's spec, a YAML file")
    parser.set_defaults(run_command=_check)


def _add_status(commands: _Commands) -> None:
    parser = _add(
        commands,
        "status",
        "show positions, workers and lag",
        "shuffle status job.yaml",
        "shuffle status job.yaml --json | jq '.mappers[].live.window_bytes'",
    )
    parser.add_argument("spec", metavar="SPEC", help="the processor's spec, a YAML file")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run_command=_status)


def _add_top(commands: _Commands) -> None:
    parser = _add(commands, "top", "show the status again and again", "shuffle top job.yaml --interval 0.5")
    parser.add_argument("spec", metavar="SPEC", help="the processor's spec, a YAML file")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between looks (default 1)")
    parser.add_argument("--count", type=int, default=None, metavar="N", help="end after N looks")
    parser.set_defaults(run_command=_top)


def _add_dead_letters(commands: _Commands, given: str) -> None:
    parser = _add(
        commands,
        "dead-letters",
        "list, show, replay or drop the rows that were set aside (on_error: dead_letter)",
        "shuffle dead-letters job.yaml list",
        "shuffle dead-letters job.yaml show --rows 5",
        "shuffle dead-letters job.yaml replay",
        "shuffle dead-letters job.yaml drop --yes",
    )
    if given == "dead-letters":
        from shuffle.run import dead_letters_command

        parser.add_argument("spec", metavar="SPEC", help="the processor's spec, a YAML file")
        dead_letters_command.add_parsers(parser)
        parser.set_defaults(run_command=dead_letters_command.run)


def _add_upgrade(commands: _Commands) -> None:
    parser = _add(
        commands,
        "upgrade",
        "bring a processor's tables up to date that an earlier version of this project has written",
        "shuffle upgrade job.yaml",
    )
    parser.add_argument("spec", metavar="SPEC", help="the processor's spec, a YAML file")
    parser.set_defaults(run_command=_upgrade)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("between 0.1 and 3600 seconds")
    return value


# Implementations of the commands -------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from shuffle.errors import SpecError
    from shuffle.run.controller import run
    from shuffle.run.run_lock import hold_run_lock
    from shuffle.spec.config import load_spec
    from shuffle.support.logs import setup_logging
    from shuffle.support.slow_wait import say_on_stderr

    spec = load_spec(options.spec)
    if options.master is not None and options.engine != "spark":
        raise SpecError(f"--master {options.master} is for the other engine: add --engine spark")
    if options.engine == "spark" and options.master is None:
        raise SpecError("--engine spark needs --master URL: spark://host:7077, local[4], or what else Spark knows")
    screen = sys.stderr.isatty() and not options.no_screen and options.engine != "spark"
    # Events of the processor are on the screen, or printed as lines; the controller's log is for its own errors.
    setup_logging("controller", spec.processor, level="error" if screen else "warning")
    with ExitStack() as stack:
        # A store that does not exist yet needs no lock, and a refused spec must not leave a store folder behind.
        if spec.state_folder is None or spec.state_folder.is_dir() or options.engine != "spark":
            stack.enter_context(hold_run_lock(spec, say_on_stderr))
        if options.engine == "spark":
            from shuffle.spark_connector.engine import run_on_spark

            return run_on_spark(spec, options.master, _run_options(options, screen))
        return run(spec, _run_options(options, screen))


def _upgrade(options: argparse.Namespace) -> int:
    from shuffle.durable.upgrade import upgrade
    from shuffle.run.run_lock import hold_run_lock
    from shuffle.spec.config import load_spec
    from shuffle.support.slow_wait import say_on_stderr

    spec = load_spec(options.spec)
    with hold_run_lock(spec, say_on_stderr), spec.open_state() as client:
        done = upgrade(client, spec.processor)
    print(f"the tables of processor {spec.processor} are up to date" + (" now" if done else ""))
    return 0


def _run_options(options: argparse.Namespace, screen: bool) -> RunOptions:
    from shuffle.run.controller import RunOptions

    return RunOptions(
        until_drained=options.until_drained,
        screen=screen,
        check=not options.no_check,
        accept_new_map=options.accept_new_map,
        reducers=not options.mappers_only,
    )


def _check(options: argparse.Namespace) -> int:
    from shuffle.errors import SpecError
    from shuffle.preflight.check import check_against_store
    from shuffle.run.controller import not_deterministic
    from shuffle.run.determinism import check_map, describe
    from shuffle.run.store_service import log_folder, open_client, require_store, served_store
    from shuffle.run.supervisor import Supervisor
    from shuffle.spec.config import load_spec

    given = load_spec(options.spec)
    require_store(given)
    supervisor = Supervisor()
    try:
        with log_folder(given) as logs, served_store(given, supervisor, logs) as spec, open_client(spec) as client:
            mapper_count = check_against_store(spec, client, register=False)
            print(f"{spec.path}: fine: {mapper_count} mappers, {spec.reducer.count} reducers")
            result = check_map(spec, client, mapper_count)
            for line in describe(result, spec):
                print(line)
            if result.difference is not None:
                raise SpecError(not_deterministic(spec, result.difference))
    finally:
        supervisor.kill()
    return 0


def _status(options: argparse.Namespace) -> int:
    import json

    from shuffle.run.status import collect
    from shuffle.run.store_service import open_client, require_store
    from shuffle.run.terminal import print_status
    from shuffle.spec.config import load_spec

    spec = load_spec(options.spec)
    require_store(spec)
    with open_client(spec) as client:
        status = collect(spec, client)
    if options.json:
        print(json.dumps(status.to_json(), indent=2))
    else:
        print_status(status)
    return 0


def _top(options: argparse.Namespace) -> int:
    from shuffle.run.status import StatusCollector
    from shuffle.run.store_service import open_client, require_store
    from shuffle.run.terminal import show_repeatedly
    from shuffle.spec.config import load_spec

    spec = load_spec(options.spec)
    require_store(spec)
    with open_client(spec) as client, StatusCollector(spec, client) as collector:
        show_repeatedly(collector.collect, options.interval, options.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
