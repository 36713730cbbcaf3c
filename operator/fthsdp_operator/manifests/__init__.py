"""What each object of a job looks like. All pure: a job and a few numbers in, manifests out."""
