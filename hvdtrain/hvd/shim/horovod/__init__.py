"""Not Horovod: another name for hvdtrain.hvd. See hvdtrain.hvd.alias."""

import sys
from pathlib import Path

try:
    from hvdtrain.hvd.alias import install
except ModuleNotFoundError as error:
    if error.name != "hvdtrain":
        raise
    # Started by a process that had found hvdtrain in its working directory.
    sys.path.append(str(Path(__file__).parents[4]))
    from hvdtrain.hvd.alias import install

install()
