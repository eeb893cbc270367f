"""Compiles hvdtrain/transports/page.c when hvdtrain is installed from source.

The wheel is then for this machine's kind of processor, and for every Python. Without a compiler, or
with HVDTRAIN_PURE_PYTHON set, as for the wheel of a release, it is pure Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILERS = (os.environ.get("CC", ""), "cc", "gcc", "clang", "c++ -x c", "g++ -x c")


def compile_page(source: Path, library: Path) -> bool:
    """Compile `source` to `library`; return whether a compiler has done it."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    flags = ["-O3", "-shared", "-fPIC", f'-DPAGE_SOURCE="{digest}"']
    new = library.with_suffix(f".{os.getpid()}")  # a running job may have the old one loaded
    for compiler in map(str.split, filter(None, COMPILERS)):
        if shutil.which(compiler[0]):
            command = [*compiler, *flags, str(source), "-o", str(new)]
            if subprocess.run(command, capture_output=True).returncode == 0:
                new.replace(library)
                return True
    return False


class CompilePage(BuildHookInterface):
    """Hatchling's hook: adds the library to a wheel, and names its platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile page.c. The library of an older one may stay: page.py does not use it."""
        source = Path(self.root, "hvdtrain", "transports", "page.c")
        library = source.with_name("libpage.so")
        is_pure = os.environ.get("HVDTRAIN_PURE_PYTHON", "0") != "0"
        if is_pure or not compile_page(source, library):
            return
        build_data["artifacts"].append("/hvdtrain/transports/libpage.so")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
