"""Text tables and files, as the command line prints and writes them."""
