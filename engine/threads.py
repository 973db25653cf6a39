"""How compute threads wait for each other.

Owns one decision, which must be made before torch is imported: threads that wait spin for some microseconds, then
sleep. On a machine with other work, threads that spin for long hold the processors that the thread they wait for
needs: measured ten times slower; threads that never spin cost a quarter where there is none (docs/decisions/0003).
"""

from __future__ import annotations

import os

_SPINS = "2000"


def prefer_short_spins() -> None:
    """Bound OpenMP's spinning unless the user has chosen; without effect once torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
