"""The front door that server and router share: which hosts and pages may call, and how many connections stay open."""
