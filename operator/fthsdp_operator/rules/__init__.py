"""The rules: what is to be done for a job, given what is there. All pure; ``plan`` puts them together."""
