"""RL environments and data generation on slots: remote clients of the sandbox service. They own the conversation and the reward.

Nothing here imports `sandbox_server`, and only `environments.hermes_base_env` imports atroposlib.
"""
