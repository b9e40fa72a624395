"""The methods of the clients, one for each request of the HTTP contract, in an asynchronous and a blocking form."""
