"""Load on a server, and what it felt like: arrivals that wait for nobody, latencies from the time that was due."""
