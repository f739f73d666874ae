"""The command line: typed configuration in, commands of a few lines, errors that help."""
