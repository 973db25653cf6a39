"""One file per engine: it loads its engine, runs a workload and writes what happened, in that engine's own Python."""
