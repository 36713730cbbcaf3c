"""What the operator sees: pods, nodes and a coordinator's words as small views. All pure."""
