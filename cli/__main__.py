"""The console script, and ``python -m kvq.cli``: minds signals before anything is imported that takes long."""

from __future__ import annotations

import sys

from kvq.cli.interrupts import end_when_interrupted
from kvq.worker.stop_signals import exit_when_told


def main() -> None:
    """Run the command line of this process, which ends with it."""
    if sys.argv[1:2] == ["worker"]:
        exit_when_told()
    else:
        end_when_interrupted()
    from kvq.cli.main import main as run_command_line  # a fifth of a second of other people's imports

    run_command_line()


if __name__ == "__main__":
    main()
