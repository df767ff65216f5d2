"""Real packages' models: recorded as they are, applied unsharded and to FSDP2 shards, compared bit for bit.

`make sweep` prints the table of all; tests/test_sweep.py runs a sample of them."""
