"""Router over engine replicas: prefix-aware routing, health checks, retries, replica processes, deployment manifests."""
