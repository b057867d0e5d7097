"""The command line `flashrt-ros`: one file a command; heavy imports wait until they are needed."""
