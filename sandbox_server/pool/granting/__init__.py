"""From a waiting acquire to its answer: preparing slots, granting leases, refusing acquires that cannot be served."""
