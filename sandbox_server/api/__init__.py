"""HTTP: parse a request, call one method, render the response."""
