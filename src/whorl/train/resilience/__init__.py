"""Fault tolerance of long runs: spike guard, rollback, heartbeat, preemption, memory budget."""
