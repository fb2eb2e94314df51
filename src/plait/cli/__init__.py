"""The command line: one file per command. The only room, with comm/world.py, that reads the environment."""
