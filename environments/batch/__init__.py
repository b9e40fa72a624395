"""The batch runner: one trajectory for each prompt of a file, on the slots of a sandbox service. `python -m environments.batch --help` lists the options."""
