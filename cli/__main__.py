"""``python -m kvq.cli``: the same as ``kvq``."""

from kvq.cli.main import main

main()
