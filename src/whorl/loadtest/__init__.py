"""Load generator for OpenAI-compatible servers: open-loop arrivals, latencies from the scheduled send time, SLOs."""
