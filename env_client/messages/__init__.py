"""HTTP requests and responses of the contract as values. The modules in this folder do no I/O."""
