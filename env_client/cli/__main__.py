"""`python -m env_client.cli`, for where `sandbox` is not on the PATH."""

from env_client.cli import main

main()
