"""The service beside the bare machine and a peer, in one run: `make bench`. Nothing here is a test; a ratio counts, an absolute time does not."""
