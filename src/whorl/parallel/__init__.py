"""Process groups of replicas on one machine."""
