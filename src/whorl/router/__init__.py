"""Several servers as one: a router that knows what is cached where, replicas, prefill and decode apart, manifests."""
