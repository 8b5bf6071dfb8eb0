"""What ``pyproject.toml`` cannot say about the wheel."""

from __future__ import annotations

from setuptools import setup
from setuptools.command.build_py import build_py

ALIASES = ("mapper", "reducer", "statestore", "spark_connector")
"""These packages live inside ``shuffle``, so that a user's own ``mapper.py`` hides nothing of ours. Their names are at
the top level, too, for ``from statestore import StateClient`` and ``python -m mapper``: the package itself and what
``-m`` runs, which is all that is installed there."""


class BuildPy(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        if package not in ALIASES:
            return modules
        return [found for found in modules if found[1] in ("__init__", "__main__")]


setup(cmdclass={"build_py": BuildPy})
