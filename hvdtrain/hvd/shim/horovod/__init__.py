"""Not Horovod: an alias of hvdtrain.hvd, for child processes. See hvdtrain.hvd.alias."""

import sys
from pathlib import Path

try:
    from hvdtrain.hvd.alias import install
except ModuleNotFoundError as error:
    if error.name != "hvdtrain":
        raise
    # The parent process found hvdtrain in its working directory, which is not in our sys.path.
    sys.path.append(str(Path(__file__).parents[4]))
    from hvdtrain.hvd.alias import install

install()
