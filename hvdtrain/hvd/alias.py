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
    if package is None:
        spec = importlib.util.spec_from_file_location("horovod", _PACKAGE)
        assert spec is not None
        package = sys.modules["horovod"] = importlib.util.module_from_spec(spec)
    sys.meta_path.insert(0, _Aliases())
    for name in MODULES:
        importlib.import_module(name)
    run = importlib.import_module("horovod.runner").run
    vars(package).update({"__version__": VERSION, "run": run})


def installed() -> bool:
    """Return whether `horovod` is hvdtrain in this process."""
    here = sys.modules.get(MODULES["horovod.torch"])
    return here is not None and sys.modules.get("horovod.torch") is here


class _Aliases(MetaPathFinder, Loader):
    """Imports a module of hvdtrain under Horovod's name for it; raises a one-line error for the
    other modules of Horovod.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        if fullname == "horovod.common":  # it has modules only
            return ModuleSpec(fullname, None, is_package=True)
        if fullname in MODULES or fullname in EXTRAS:
            return ModuleSpec(fullname, self)
        names = ", ".join(name for name in (*MODULES, *EXTRAS) if name.count(".") == 1)
        raise ModuleNotFoundError(
            f"No module named {fullname!r}: hvdtrain has Horovod for PyTorch only ({names}, "
            "horovod.common); start jobs with hvdtrain.run or hvdrun"
        )

    def exec_module(self, module: ModuleType) -> None:
        """Put hvdtrain's module in the place of the new one, as a package: others are below it."""
        name = module.__name__
        own = sys.modules[name] = importlib.import_module((MODULES | EXTRAS)[name])
        vars(own).setdefault("__path__", [])
