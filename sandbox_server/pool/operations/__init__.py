"""What clients ask of the pools beyond acquire and release: narrow, verify, locate a slot, views, and the limits of tenants."""
