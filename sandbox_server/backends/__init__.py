"""How a sandbox is created, observed and destroyed on each kind of infrastructure. Backends run no commands in sandboxes."""
