"""What a demonstration of the environments and their tests need besides the service: a model server that plays written trajectories, a small tokenizer,
and a small repository with a bug.
"""
