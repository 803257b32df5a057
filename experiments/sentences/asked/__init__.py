"""Whether what the report of a plan says is what the command answers when asked."""
