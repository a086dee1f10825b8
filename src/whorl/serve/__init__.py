"""Serving a model over HTTP: the API, the router over replicas, the load that measures both, the pages."""
