"""What ``pyproject.toml`` cannot say about the wheel."""

from __future__ import annotations

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ALIASES = ("mapper", "reducer", "statestore", "spark_connector")
"""These packages live inside ``shuffle``, so that a user's own ``mapper.py`` hides nothing of ours. Their names are at
the top level, too, for ``from statestore import StateClient`` and ``python -m mapper``: the package itself and what
``-m`` runs, which is all that is installed there."""

KERNELS = Extension(
    "shuffle.support.native._kernels",
    ["shuffle/support/native/kernels.c"],
    extra_compile_args=["-O3"],
    optional=True,  # Without a compiler the package is built without them, and works, more slowly.
)


class BuildPy(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        if package not in ALIASES:
            return modules
        return [found for found in modules if found[1] in ("__init__", "__main__")]


class BuildExt(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """The kernels are no module of Python but a plain library, the same for every version of Python."""
        return fullname.replace(".", "/") + ".so"


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """A wheel for one kind of machine, and for every version of Python."""
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[KERNELS], cmdclass={"build_py": BuildPy, "build_ext": BuildExt, "bdist_wheel": BdistWheel})
