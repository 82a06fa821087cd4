"""Compiles the modules that every request passes through: the same Python, by mypyc, into a wheel or a folder.

The sources are shaped for the compiler (classes of their own, constructors written out, plain loops), and run without
it as they stand, some four times slower. So an editable install runs interpreted, and a change takes effect at once.
What is compiled never lies beside its source, where it would hide what was changed since. Not here: which modules
(pyproject.toml, at the hook's own section).

    python hatch_build.py build/compiled    # the packages with their compiled modules, to be put first on PYTHONPATH
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).parent
_FLAGS = ["-DNDEBUG", "-fwrapv", "-ffp-contract=off"]
"""What Python itself is built with, which a CFLAGS of whoever builds would replace: no asserts, and integers that wrap.

And no fusing: else a compiler may round a product and a sum once, where two roundings are what Python does.
"""
_SETUP = f"""
import sys
from mypyc.build import mypycify
from setuptools import setup
flags = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--python-version=3.11"]
modules = mypycify([*flags, *sys.argv[1:]], opt_level="2", debug_level="0", group_name="pointsman")
for module in modules:
    module.extra_compile_args += {_FLAGS}
setup(name="pointsman", ext_modules=modules, script_args=["-q", "build_ext", "--inplace"])
"""
_HEADER = Path(sysconfig.get_path("include"), "Python.h")
_WHAT_TO_DO = "install a C compiler and Python's headers (gcc, python3-dev), or set POINTSMAN_COMPILE=0 to run slowly"
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


class NoCompiler(Exception):
    """There is no C compiler, or it lacks Python's headers."""


class CompiledModules(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's hook. POINTSMAN_COMPILE=0 leaves a wheel as it is, for machines without a C compiler."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compiled modules to a wheel. Raise NoCompiler, or CalledProcessError for what does not compile."""
        if version == "editable" or os.environ.get("POINTSMAN_COMPILE") == "0":
            return
        self._folder = TemporaryDirectory()
        target = Path(self._folder.name)
        made = compile_into(target, self.build_config.packages, self.config["modules"])
        build_data["force_include"].update({str(path): str(path.relative_to(target)) for path in made})
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's
        """The wheel has been made."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def compile_into(target: Path, packages: list[str], modules: list[str]) -> list[Path]:
    """Copy `packages` to `target` and compile `modules` there; what was made. Raise NoCompiler where there is none."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    for needed, found in ((compiler, shutil.which(compiler)), (_HEADER.name, _HEADER.exists())):
        if not found:
            raise NoCompiler(f"{needed} not found: {_WHAT_TO_DO}")
    for package in packages:
        shutil.copytree(_ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    subprocess.run([sys.executable, "-c", _SETUP, *modules], cwd=target, check=True)  # noqa: S603 - our own text
    shutil.rmtree(target / "build")
    return sorted(target.rglob(f"*{_SUFFIX}"))


def main() -> None:
    """Compile into the folder that the command names, which is made anew."""
    target = Path(sys.argv[1])
    wheel = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    shutil.rmtree(target, ignore_errors=True)
    compile_into(target, wheel["packages"], wheel["hooks"]["custom"]["modules"])


if __name__ == "__main__":
    main()
