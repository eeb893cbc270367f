"""Install `horovod` as an alias of hvdtrain.hvd, so that a Horovod script runs unchanged.

`python -m hvdtrain.hvd SCRIPT` calls `install()` before the script; `import hvdtrain` alone never
does. Afterwards `horovod.__version__` is "0.28.1", the version whose interface is provided.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

VERSION = "0.28.1"

# Horovod's modules, and what replaces them. Importing any other module of Horovod raises an error.
MODULES = {
    "horovod.common.basics": "hvdtrain.hvd.basics",
    "horovod.common.elastic": "hvdtrain.hvd.elastic.common",
    "horovod.common.exceptions": "hvdtrain.hvd.exceptions",
    "horovod.common.process_sets": "hvdtrain.hvd.process_sets",
    "horovod.common.util": "hvdtrain.hvd.util",
    "horovod.data": "hvdtrain.hvd.data",
    "horovod.data.data_loader_base": "hvdtrain.hvd.data",
    "horovod.runner": "hvdtrain.launch.runner",
    "horovod.runner.common.util.hosts": "hvdtrain.launch.host_list",
    "horovod.torch": "hvdtrain.hvd",
    "horovod.torch.compression": "hvdtrain.hvd.compression",
    "horovod.torch.elastic": "hvdtrain.hvd.elastic",
    "horovod.torch.elastic.sampler": "hvdtrain.hvd.elastic.sampler",
    "horovod.torch.elastic.state": "hvdtrain.hvd.elastic.state",
    "horovod.torch.functions": "hvdtrain.hvd.functions",
    "horovod.torch.mpi_ops": "hvdtrain.hvd.mpi_ops",
    "horovod.torch.optimizer": "hvdtrain.hvd.optimizer",
    "horovod.torch.sync_batch_norm": "hvdtrain.hvd.sync_batch_norm",
}

# Packages of Horovod that have modules only.
_PACKAGES = ("horovod.common", "horovod.runner.common", "horovod.runner.common.util")

# Imported on use: what they need is an extra.
EXTRAS = {
    "horovod.ray": "hvdtrain.launch.ray",
    "horovod.ray.elastic": "hvdtrain.launch.ray",
    "horovod.ray.runner": "hvdtrain.launch.ray",
    "horovod.spark": "hvdtrain.launch.spark",
    "horovod.spark.runner": "hvdtrain.launch.spark",
}

# A folder with a package `horovod` that calls `install()`. Children started by multiprocessing
# (DataLoader workers) need it: they inherit sys.path, but not sys.modules.
SHIM = Path(__file__).parent / "shim"
_PACKAGE = SHIM / "horovod" / "__init__.py"


def install() -> None:
    """Make `import horovod.torch` import hvdtrain.hvd, here and in multiprocessing's children.

    Hides an installed real Horovod. Not collective. Raises ImportError if the real one has been
    imported already.
    """
    package = sys.modules.get("horovod")
    if package is not None and getattr(package, "__file__", None) != str(_PACKAGE):
        raise ImportError(
            f"horovod was imported from {getattr(package, '__file__', None)} before hvdtrain could "
            "take its name; call hvdtrain.hvd.alias.install() before the first import of horovod"
        )
    if installed():
        return
    if str(SHIM) not in sys.path:
        sys.path.insert(1, str(SHIM))  # behind the script's own folder, before what is installed
    found = {name: importlib.import_module(here) for name, here in MODULES.items()}
    found |= {name: _package(name) for name in _PACKAGES}
    if package is None:
        spec = importlib.util.spec_from_file_location("horovod", _PACKAGE)
        assert spec is not None
        package = importlib.util.module_from_spec(spec)
    runner = found["horovod.runner"]
    vars(runner)[
        "__path__"
    ] = []  # a package as Horovod's, so `_OnlyThese` is asked for its modules
    vars(package).update({"__version__": VERSION, "run": runner.run})
    found["horovod"] = package
    # Make every module an attribute of its parent, as a real import does.
    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(found[parent], last):
            setattr(found[parent], last, module)
    sys.modules.update(found)
    sys.meta_path.insert(0, _OnlyThese())


def _package(name: str) -> ModuleType:
    package = ModuleType(name, "A package of Horovod's that has modules only.")
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    package.__path__ = []
    return package


def installed() -> bool:
    """Return whether `horovod` is hvdtrain in this process."""
    here = sys.modules.get(MODULES["horovod.torch"])
    return here is not None and sys.modules.get("horovod.torch") is here


class _ByAnotherName(Loader):
    """Loads a module of hvdtrain under a name of Horovod's."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(EXTRAS[spec.name])
        self._own = module.__spec__, module.__loader__, list(getattr(module, "__path__", []))
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__, module.__loader__, module.__path__ = self._own


class _OnlyThese(MetaPathFinder):
    """Finds modules of EXTRAS, and raises a one-line error for others of Horovod's. Called for
    those that are not in sys.modules.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        if fullname in EXTRAS:
            return ModuleSpec(fullname, _ByAnotherName())
        if fullname.startswith("horovod.runner."):
            has = "starts jobs by hvdtrain.run and hvdrun, not by Horovod's launcher"
        else:
            names = ", ".join(name for name in (*MODULES, *EXTRAS) if name.count(".") == 1)
            has = f"has Horovod for PyTorch only ({names}, horovod.common)"
        raise ModuleNotFoundError(f"No module named {fullname!r}: hvdtrain {has}")
