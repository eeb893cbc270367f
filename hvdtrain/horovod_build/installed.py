"""The Horovod that is installed in this interpreter, read from its files."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

INSTALL = "hvdtrain install-horovod"


@dataclass(frozen=True)
class InstalledHorovod:
    """An installed Horovod: its version, and the torch that it was compiled against."""

    version: str
    torch: str | None
    """`torch.__version__` at build time; None when the build had no PyTorch, or does not say."""

    def problem(self, torch_version: str) -> str | None:
        """Say why this Horovod cannot serve `torch_version` and what to do; None when it can.

        C++ has no stable ABI between two torch versions, nor between a +cpu and a +cu build of the
        same one, so only an equal string will do.
        """
        if self.torch is None:
            return f"Horovod {self.version} here was built without PyTorch; run: {INSTALL}"
        if self.torch != torch_version:
            return (
                f"Horovod {self.version} here was built for torch {self.torch}, "
                f"this is torch {torch_version}; run: {INSTALL}"
            )
        return None


def installed_horovod() -> InstalledHorovod | None:
    """Find the installed Horovod. Reads files only: no torch, no Horovod import."""
    try:
        found = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return None
    package = Path(str(found.locate_file("horovod")))
    return InstalledHorovod(found.version, _built_for(package))


def _built_for(package: Path) -> str | None:
    # Horovod's CMake writes metadata.json before it compiles: without the library it means nothing.
    library = package / "torch" / f"mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"
    if not library.is_file():
        return None
    try:
        version = json.loads((package / "metadata.json").read_text(encoding="utf-8"))["pytorch"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(version)
