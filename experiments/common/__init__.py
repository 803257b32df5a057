"""What experiments share: machine, launches, systems, unlike processes, results."""
