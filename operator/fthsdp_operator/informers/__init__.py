"""Collections of a cluster, kept like the API server has them: LIST, watch, and LIST again after a gap."""
