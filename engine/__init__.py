"""Continuous batching over a paged KV cache; knows requests, blocks and steps, nothing of queues or SQL."""
