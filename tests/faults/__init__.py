"""The crash harness: the real service under load, while its processes, connections, disk and clock fail; what its clients saw is held against a model."""
