"""The sandbox pool as a service: pools of sandboxes, whose slots are leased over HTTP."""
