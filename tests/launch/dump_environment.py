"""Write this rank's environment as JSON into the folder that is the last argument."""

import json
import os
import sys
from pathlib import Path

Path(sys.argv[-1], f"{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))
