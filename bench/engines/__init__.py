"""One file per engine: each loads its engine, runs a workload and writes what happened. Run in that engine's own Python."""
