"""Measurements that anybody can repeat: kvq beside its peers, beside the machine's limits, and as work grows."""
