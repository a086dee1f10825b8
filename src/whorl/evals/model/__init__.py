"""Models under evaluation: requests, responses, the response cache, and the back ends that answer requests."""
