"""The arms with a Horovod API initialised: the real `horovod.torch`, or ours.

Tests say `@pytest.mark.parametrize("hvd_ranks", OUR_ARMS, indirect=True)`, and
`hvd_ranks.run(function, *args)` calls `function(hvd, *args)` on every rank, `hvd` being the module.
"""

from __future__ import annotations

from tests.ranks import SIZES, Ranks

HvdRanks = Ranks
REAL_ARMS = [arm for arm in SIZES["hvd_ranks"] if arm[0].startswith("horovod")]
OUR_ARMS = [arm for arm in SIZES["hvd_ranks"] if arm not in REAL_ARMS]
