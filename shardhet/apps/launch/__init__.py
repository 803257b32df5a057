"""Starting the ranks of a run, and ending them with a cause."""
