"""What a run was like, for people: its course, picture and summary, from a folder or from a cluster."""
