"""Kubernetes from outside: requests, what their answers mean, the Lease, and calls to coordinators."""
