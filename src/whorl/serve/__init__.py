"""Serving a model over HTTP: the API, the router over replicas, the pages."""
