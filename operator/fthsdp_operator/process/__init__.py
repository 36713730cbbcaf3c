"""The operator as a process: what wakes it, its queue, probes, log and metrics."""
