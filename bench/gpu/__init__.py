"""The parts of ``bench.gpu_check``; each also runs on a CPU at toy sizes, where only its code is tried."""
