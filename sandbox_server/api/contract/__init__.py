"""The values of the HTTP contract: requests, responses, parsing and rendering."""
