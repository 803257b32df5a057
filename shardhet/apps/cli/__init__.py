"""What the programs share on the command line and on the screen."""
