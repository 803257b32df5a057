"""Steps of several rounds, drawn by the hundred, against one process."""
