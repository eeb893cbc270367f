"""Find the Horovod that is installed for this interpreter, from its files alone.

Used before a launch or a build, so nothing here imports torch or Horovod.
"""

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
    """`torch.__version__` at build time; None if it had no PyTorch, or did not record it."""

    def problem(self, torch_version: str) -> str | None:
        """Return why this Horovod does not work with `torch_version`, and the fix; None if it does.

        C++ has no stable ABI between two torch versions, nor between a +cpu and a +cu build of the
        same one, so the strings must be equal.
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
    """Return the installed Horovod, or None. Reads files only: no torch, no Horovod import."""
    try:
        found = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return None
    package = Path(str(found.locate_file("horovod")))
    return InstalledHorovod(found.version, _built_for(package))


def _built_for(package: Path) -> str | None:
    # Horovod's CMake writes metadata.json before it compiles, so it is valid only with the library.
    library = package / "torch" / f"mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"
    if not library.is_file():
        return None
    try:
        version = json.loads((package / "metadata.json").read_text(encoding="utf-8"))["pytorch"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(version)
