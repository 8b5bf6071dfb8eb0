"""Compiles the source with which Spark's real-time mode is measured, ``java/RealTimeRows.java``.

The mode accepts no source but Kafka's and those that are made for it, and none that is written in Python.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyspark

SOURCE = Path(__file__).parent / "java" / "RealTimeRows.java"
COMPILE_TIMEOUT_S = 120


class NoJavac(Exception):
    """The source cannot be compiled on this machine; the message says why."""


def compiled(folder: Path) -> Path:
    """The folder of the compiled classes, inside ``folder``."""
    javac = shutil.which("javac")
    if javac is None:
        raise NoJavac("there is no javac on this machine (a JDK has it, a Java runtime does not)")
    to = folder / "realtime-classes"
    jars = Path(pyspark.__file__).parent / "jars" / "*"
    command = [javac, "-nowarn", "-proc:none", "-d", str(to), "-cp", str(jars), str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise NoJavac(f"javac cannot compile {SOURCE.name}: {error.stderr.strip().splitlines()[0]}") from None
    return to
