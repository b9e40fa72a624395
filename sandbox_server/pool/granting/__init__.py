"""What happens to a waiting acquire: preparing slots, granting leases, refusing acquires that cannot be served."""
