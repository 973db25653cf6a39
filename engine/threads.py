"""How compute threads wait for each other.

Owns one decision, which must be made before torch is imported: threads that wait sleep instead of spinning. On a
machine with other work, spinning threads hold the processors that the thread they wait for needs: measured here, ten
times slower with two busy neighbours, and no faster without (docs/decisions/0003).
"""

from __future__ import annotations

import os


def prefer_sleeping_threads() -> None:
    """Set OpenMP's wait policy unless the user has; without effect once torch is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
