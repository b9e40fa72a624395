"""The benchmark, `make bench`: the service, the bare machine and a peer, measured in turns. Nothing here is a test."""
